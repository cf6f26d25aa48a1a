//! Running counts of an engine, readable from any thread.

use std::sync::Mutex;
use std::time::Duration;

use crate::schedule::{CostTable, Skipped};

/// Totals since the engine started.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Requests that run now.
    pub running: usize,
    /// Requests that ended, however they did.
    pub finished: u64,
    /// Tokens committed.
    pub tokens: u64,
    /// Rounds that requests took part in: a batch of three counts three.
    pub rounds: u64,
    /// Tokens drafted, verified and accepted.
    pub drafted: u64,
    /// See `drafted`.
    pub verified: u64,
    /// See `drafted`.
    pub accepted: u64,
    /// Rounds of requests that the policy left without a draft.
    pub skipped: Skipped,
    /// How often each position of a block was kept if the one before it was; ends before the first never judged.
    pub acceptance_by_position: Vec<f64>,
    /// What rounds cost as of now, under a policy that asks.
    pub cost_table: Option<CostTable>,
    /// Passes of the target over a batch, prefills apart.
    pub passes: u64,
    /// Time in prefill passes.
    pub prefill: Duration,
    /// Time in draft passes and context updates.
    pub draft: Duration,
    /// Time in Markov chains and confidence heads.
    pub chain: Duration,
    /// Time in target passes.
    pub verify: Duration,
    /// Time in the acceptance rule.
    pub accept: Duration,
    /// Time in whole rounds, all of the above included, prefills too.
    pub round: Duration,
}

/// The engine's [`Stats`] behind a lock that is held for nanoseconds.
#[derive(Debug, Default)]
pub struct StatsBoard(Mutex<Stats>);

impl StatsBoard {
    /// A copy of the totals.
    pub fn read(&self) -> Stats {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    pub(super) fn add(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}
