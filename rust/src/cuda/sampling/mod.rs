//! Verify sampling and the Markov chain as kernels: what to copy, what to launch, and what the outcome means.
//!
//! The decisions are those of [`crate::law`], [`crate::accept`] and [`crate::chain`] on the same logits and noise, to
//! the last bit of every weight; only sums over a truncated row, and logarithms, are rounded in another way. A decision
//! whose margin is below 2^-40 is counted.

mod chain;
mod edits;
mod heads;
mod layout;
mod plan;
mod verify;

pub use chain::ChainPlan;
pub use heads::{DeviceHeads, DeviceKind, DeviceMarkov, DeviceVocabulary};
pub use layout::SampleArgs;
pub use plan::Launch;
pub use verify::{DeviceDrafts, DraftLaws, Verify};

use crate::accept::Rule;
use crate::params::SamplingParams;
use crate::rows::DType;

/// The kernels of `sampling.cu`.
pub(super) const VERIFY_ENTRIES: &[&str] = &[
    "sample_scan",
    "sample_cut",
    "sample_weigh",
    "sample_race",
    "sample_decide",
    "sample_residual",
    "sample_finish",
];
/// The kernels of `chain.cu`.
pub(super) const CHAIN_ENTRIES: &[&str] = &["chain_latent", "chain_bend", "chain_draw", "chain_confide"];

/// Rows of logits in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows {
    /// Address of the first element.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Elements in a row, contiguous.
    pub columns: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// A batch that the kernels cannot take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SampleError(pub String);

/// Whether a request's blocks can be judged by the kernels.
///
/// # Errors
/// The reason why they cannot: then rows go to the host, and the core decides.
pub fn serves(rule: Rule, params: &SamplingParams) -> Result<(), &'static str> {
    if rule == Rule::Block {
        Err("the rule \"block\" is judged on the host")
    } else if params.logprobs.is_some() {
        Err("log-probabilities are reported from the host")
    } else if edits::biases_twice(params) {
        Err("a token with two biases is judged on the host")
    } else {
        Ok(())
    }
}
