//! The decisions of DSpark speculative decoding.
//!
//! Everything that chooses lives here: which noise a draw uses, what a row of logits means under the
//! request's sampling parameters, what is drafted, verified and accepted, and where a request stops. A
//! model's matrices are multiplied elsewhere, except in two cases for which there is no good operation there
//! ([`attention`] and [`product`]). Nothing here knows Python: the bindings sit behind the feature `python`.

pub mod accept;
pub mod attention;
pub mod calibration;
pub mod chain;
pub mod confidence;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod engine;
pub mod history;
mod lanes;
pub mod law;
mod linear;
pub mod mutant;
pub mod noise;
mod number;
pub mod params;
pub mod product;
pub mod rows;
pub mod schedule;
pub mod stop;
mod threads;
pub mod workers;

#[cfg(feature = "python")]
mod python;
