//! Running counts of an engine, readable from any thread.

use std::sync::Mutex;
use std::time::Duration;

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
