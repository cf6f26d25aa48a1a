//! The policy of an engine, and why it may skip a draft.

use std::num::NonZeroUsize;

use super::cost::CostTable;

/// What a round drafts and verifies.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// All drafted tokens are verified.
    Fixed,
    /// The chain stops before the first token with a confidence below this; all drafted tokens are verified.
    Threshold(f64),
    /// The expected throughput of the batch decides which requests draft and what is verified.
    Throughput {
        /// What a round costs, until live rounds correct it.
        cost: CostTable,
        /// The search to use where looking ahead would bias the output: `None` for Algorithm 1 with patience
        /// ([`super::patient`]), else the delayed search with budgets from this many rounds ago.
        lag: Option<NonZeroUsize>,
    },
}

impl Policy {
    /// The confidence below which the chain stops drafting.
    pub fn threshold(&self) -> Option<f64> {
        match self {
            Policy::Threshold(threshold) => Some(*threshold),
            Policy::Fixed | Policy::Throughput { .. } => None,
        }
    }
}

/// Why a request that might have drafted did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// No request drafts: the round is estimated to make more tokens per second without drafts.
    Slower,
    /// Its own drafts are rejected so often that it is better off without them while others draft, or would.
    Failing,
    /// A draft failed, and drafting is paused for a while.
    Broken,
}

/// Rounds that drafted nothing although there was room, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skipped {
    /// See [`Skip::Slower`].
    pub slower: u64,
    /// See [`Skip::Failing`].
    pub failing: u64,
    /// See [`Skip::Broken`].
    pub broken: u64,
}

impl Skipped {
    /// Counts a round.
    pub fn add(&mut self, skip: Option<Skip>) {
        match skip {
            Some(Skip::Slower) => self.slower += 1,
            Some(Skip::Failing) => self.failing += 1,
            Some(Skip::Broken) => self.broken += 1,
            None => {}
        }
    }
}
