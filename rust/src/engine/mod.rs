//! The engine: admits requests, runs rounds over a [`ModelRunner`], and ends them.

mod active;
mod pages;
mod queue;
mod request;
mod round;
mod runner;
mod stats;
mod stop_text;

use std::sync::Arc;
use std::time::Instant;

pub use pages::{PAGE_SIZE, Pages};
pub use queue::Queue;
pub use request::{Failure, Finish, FinishReason, Request, Round, Sink, StopReason, Timing, Update};
pub use runner::{DraftPass, ModelRunner, PassRows, RequestId, RunnerError};
pub use stats::{Stats, StatsBoard};
pub use stop_text::{Detokenizer, StopText};

use crate::accept::Rule;
use crate::calibration::Calibration;
use crate::schedule::{Planner, Policy};
use active::{Active, refuse};

/// What an engine is told once.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The acceptance rule of every request.
    pub rule: Rule,
    /// How many drafted tokens a round verifies.
    pub policy: Policy,
    /// Tokens that one draft pass proposes; 0 without a draft.
    pub gamma: usize,
    /// Tokens to keep of them at most.
    pub block_size: usize,
    /// Candidates of the Markov chain; `None` for the whole vocabulary.
    pub markov_candidates: Option<usize>,
    /// Calibrations of the confidence head, each with the temperature that it was fitted at; `None` serves every
    /// request ([`at_temperature`](crate::calibration::at_temperature)).
    pub calibrations: Vec<(Option<f64>, Calibration)>,
    /// Requests that run at once.
    pub max_batch_size: usize,
    /// Prompt tokens that one step runs at most, over all requests: what running requests wait for, and what a deadline
    /// can be late by. Never 0.
    pub prefill_chunk_size: usize,
    /// Positions that all running requests may take in the caches.
    pub max_kv_tokens: usize,
}

impl EngineConfig {
    /// Positions that a request can come to take. Its last rounds draft less, so a verify pass adds none.
    pub fn demand(&self, request: &Request) -> usize {
        request.prompt.len() + request.max_tokens
    }

    /// Refuses a request that could never run.
    pub fn check(&self, request: &Request) -> Result<(), Failure> {
        let demand = self.demand(request);
        if Pages::new(self.max_kv_tokens).fits_ever(demand) {
            return Ok(());
        }
        Err(Failure::Capacity(format!(
            "the request can come to {demand} positions (prompt {}, max_tokens {}), \
             more than max_kv_tokens = {} holds",
            request.prompt.len(),
            request.max_tokens,
            self.max_kv_tokens
        )))
    }
}

/// The round loop. It lives on one thread; [`Queue`] and [`StatsBoard`] are how others reach it.
pub struct Engine<M: ModelRunner> {
    config: EngineConfig,
    runner: M,
    queue: Arc<Queue>,
    stats: Arc<StatsBoard>,
    pages: Pages,
    /// Admitted, with a prompt that is not through.
    prefilling: Vec<Active>,
    active: Vec<Active>,
    planner: Planner,
}

impl<M: ModelRunner> Engine<M> {
    /// An engine with nothing to do.
    pub fn new(config: EngineConfig, runner: M, queue: Arc<Queue>, stats: Arc<StatsBoard>) -> Self {
        let pages = Pages::new(config.max_kv_tokens);
        let planner = Planner::new(config.policy.clone(), config.rule, config.gamma);
        Engine { config, runner, queue, stats, pages, prefilling: Vec::new(), active: Vec::new(), planner }
    }

    /// Serves until the queue is closed; then aborts what is left.
    pub fn run(&mut self) {
        while !self.queue.is_closed() {
            if self.active.is_empty() && self.prefilling.is_empty() {
                self.queue.wait();
            }
            self.step();
        }
    }

    /// One round: ends what was cancelled, admits what fits, runs a part of the prompts that wait, and lets every
    /// running request advance. Public so that tests and other loops can drive the engine themselves.
    pub fn step(&mut self) {
        let started = Instant::now();
        self.end_overdue();
        self.admit();
        if !self.prefilling.is_empty() {
            self.prefill();
            self.end_overdue();
        }
        if !self.active.is_empty() {
            self.round();
        }
        self.stats.add(|stats| stats.round += started.elapsed());
    }

    /// Ends requests that were cancelled or are past their deadline.
    fn end_overdue(&mut self) {
        let now = Instant::now();
        for active in self.active.iter_mut().chain(&mut self.prefilling) {
            if active.request.is_over(now) {
                active.end(FinishReason::Abort, None);
            }
        }
        self.retire();
    }

    /// Takes waiting requests, in order, while there is room.
    fn admit(&mut self) {
        let now = Instant::now();
        for request in self.queue.take_if(|request| request.is_over(now)) {
            refuse(request, FinishReason::Abort, None);
        }
        while self.active.len() + self.prefilling.len() < self.config.max_batch_size {
            let Some(request) = self.queue.pop_if(|request| {
                let demand = self.config.demand(request);
                self.pages.can_reserve(demand) || !self.pages.fits_ever(demand)
            }) else {
                break;
            };
            let demand = self.config.demand(&request);
            if request.max_tokens == 0 {
                refuse(request, FinishReason::Length, None);
            } else if let Err(failure) = self.config.check(&request) {
                refuse(request, FinishReason::Error, Some(failure));
            } else {
                self.pages.reserve(demand);
                self.prefilling.push(Active::new(request, demand, now));
            }
        }
    }
}

impl<M: ModelRunner> Drop for Engine<M> {
    /// Nobody waits for ever: what is left is told that it was aborted.
    fn drop(&mut self) {
        self.queue.close();
        for active in self.active.iter_mut().chain(&mut self.prefilling) {
            active.end(FinishReason::Abort, None);
        }
        self.retire();
        for request in self.queue.take_if(|_| true) {
            refuse(request, FinishReason::Abort, None);
        }
    }
}
