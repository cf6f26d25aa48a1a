//! The policy of an engine, and why it may leave out a draft.

use std::num::NonZeroUsize;

use super::cost::CostTable;

/// What a round drafts and verifies.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// All that were drafted.
    Fixed,
    /// All before the first confidence below this; the chain itself stops there, so all that were drafted.
    Threshold(f64),
    /// Who drafts, and what is verified, by the expected throughput of the batch.
    Throughput {
        /// What a round costs, to begin with.
        cost: CostTable,
        /// Where looking ahead would bias the output: `None` for Algorithm 1 with patience ([`super::patient`]), else
        /// the delayed search with budgets from this many rounds ago.
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
    /// Nobody drafts: the round is estimated to make more tokens per second without.
    Slower,
    /// Its own drafts are refused so often that it is better off without while others draft, or would.
    Failing,
    /// A draft raised an error, and all go on without for a while.
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
