//! Losslessness: the text has the target's distribution, whatever the draft proposes.
//!
//! Everything here runs the production `accept`, on noise given by hand or counted, and compares what
//! comes out with the target's own law: exactly where the outcomes can be enumerated, and by chi-square
//! tests that fail once in 10^9 clean runs (and never again: the seeds are fixed) elsewhere.

mod adaptive;
mod chi;
mod closed_forms;
mod coupled;
mod enumeration;
mod exact;
#[cfg(feature = "mutants")]
mod mutants;
mod rare;
mod rounds;
mod sampled;
mod toy;
