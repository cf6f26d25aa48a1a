//! The engine: admits requests, runs rounds over a [`ModelRunner`], and ends them.

mod active;
mod admit;
mod aside;
mod audit;
mod cached;
mod decide;
mod pages;
mod prefill;
mod prefixes;
mod queue;
mod request;
mod retire;
mod room;
mod round;
mod runner;
mod stats;
mod stop_text;
mod verify;

use std::sync::Arc;
use std::time::Instant;

pub use pages::PAGE_SIZE;
pub use queue::Queue;
pub use request::{Failure, Finish, FinishReason, Request, Round, Sink, StopReason, Timing, Update};
pub use runner::{
    Block, ChainBlock, DraftPass, Forks, Judgement, ModelRunner, PassRows, RequestId, RunnerError,
};
pub use stats::{PageCounts, Percentiles, Stats, StatsBoard};
pub use stop_text::{Detokenizer, StopText};

use crate::accept::Rule;
use crate::calibration::{Calibration, Regime, fitting};
use crate::params::SamplingParams;
use crate::schedule::{Planner, Policy};
use active::Active;
use aside::Aside;
use pages::Pages;
use prefixes::{MOST, Prefixes};
use stats::Latencies;

/// The configuration that an engine starts with.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The acceptance rule of every request.
    pub rule: Rule,
    /// How many drafted tokens a round verifies.
    pub policy: Policy,
    /// Tokens that one draft pass proposes; 0 without a draft.
    pub gamma: usize,
    /// The most tokens that a request drafts in a round.
    pub block_size: usize,
    /// Candidates of the Markov chain; `None` for the whole vocabulary.
    pub markov_candidates: Option<usize>,
    /// Calibrations of the confidence head, each with the sampling it was fitted under; `None` serves every
    /// request ([`fitting`](crate::calibration::fitting)).
    pub calibrations: Vec<(Option<Regime>, Calibration)>,
    /// The most requests that run at once.
    pub max_batch_size: usize,
    /// The most prompt tokens that one step runs, over all requests: running requests wait for them, and a
    /// deadline can be late by as much. Never 0.
    pub prefill_chunk_size: usize,
    /// Positions that running requests and kept prefixes may take in the caches, in whole pages.
    pub max_kv_tokens: usize,
    /// Requests that may wait. Never 0: every request passes through the queue.
    pub max_queue_size: usize,
}

impl EngineConfig {
    /// Rows that a request's caches, which hold `rows` now, must have room for in its next round.
    fn reach(&self, rows: usize, drafts: bool) -> usize {
        rows + 1 + if drafts { self.block_size } else { 0 }
    }
}

/// The round loop. It runs on one thread; others reach it through [`Queue`] and [`StatsBoard`].
pub struct Engine<M: ModelRunner> {
    config: EngineConfig,
    runner: M,
    queue: Arc<Queue>,
    stats: Arc<StatsBoard>,
    forks: Forks,
    pages: Pages,
    /// Caches of requests that ended.
    prefixes: Prefixes,
    /// Requests that gave up their caches for others. This list and the next two are in order of admission.
    preempted: Vec<Active>,
    /// Admitted requests whose prompts are not complete.
    prefilling: Vec<Active>,
    /// Requests that decode.
    active: Vec<Active>,
    /// Requests that were admitted since the start.
    admissions: u64,
    planner: Planner,
    /// Whether drafting pauses because drafts have failed, and how often they failed since the start.
    aside: Aside,
    draft_failures: u64,
    /// Whether the last target pass over drafted tokens failed and then succeeded without them.
    wide_failed: bool,
}

impl<M: ModelRunner> Engine<M> {
    /// An engine with nothing to do.
    pub fn new(config: EngineConfig, runner: M, queue: Arc<Queue>, stats: Arc<StatsBoard>) -> Self {
        let forks = runner.forks();
        let mut planner = Planner::new(config.policy.clone(), config.rule, config.gamma);
        for params in [SamplingParams::greedy(), SamplingParams::default()] {
            if let Some(calibration) = fitting(&config.calibrations, &params) {
                planner.expect(params.is_greedy(), calibration.acceptance());
            }
        }
        let most = match forks {
            Forks::Anywhere | Forks::Never => MOST,
            // Each has a recurrent state of its own, which the pages do not count: only as many as requests
            // may run.
            Forks::AtParts => config.max_batch_size.min(MOST),
        };
        Engine {
            forks,
            pages: Pages::new(config.max_kv_tokens),
            planner,
            config,
            runner,
            queue,
            stats,
            prefixes: Prefixes::new(most),
            preempted: Vec::new(),
            prefilling: Vec::new(),
            active: Vec::new(),
            admissions: 0,
            aside: Aside::default(),
            draft_failures: 0,
            wide_failed: false,
        }
    }

    /// Serves until the queue is closed; dropping the engine then aborts what is left.
    pub fn run(&mut self) {
        while !self.queue.is_closed() {
            if self.active.is_empty() && self.prefilling.is_empty() && self.preempted.is_empty() {
                self.queue.wait();
            }
            self.step();
        }
    }

    /// One step: ends cancelled requests, admits those that fit, runs parts of the waiting prompts, and
    /// advances every decoding request by a round. Public so that tests and other loops can drive the engine
    /// themselves.
    pub fn step(&mut self) {
        let started = Instant::now();
        self.end_overdue();
        self.prefill();
        self.end_overdue();
        self.grow();
        if !self.active.is_empty() {
            self.round();
        }
        self.stats.add(|stats| {
            stats.pages = self.page_counts();
            stats.preempted = self.preempted.len();
            stats.round += started.elapsed();
        });
    }

    fn page_counts(&self) -> PageCounts {
        PageCounts { total: self.pages.total(), used: self.pages.used(), kept: self.prefixes.pages() }
    }

    /// Ends requests that were cancelled or are past their deadline, whether they run or wait.
    fn end_overdue(&mut self) {
        let now = Instant::now();
        let mut ended = false;
        for active in self.admitted().filter(|active| active.request.is_over(now)) {
            active.end(FinishReason::Abort, None);
            ended = true;
        }
        if ended {
            self.retire();
        }
        for request in self.queue.take_if(|request| request.is_over(now)) {
            self.end_unserved(request, FinishReason::Abort, None);
        }
    }

    /// Ends a request that never ran.
    fn end_unserved(&self, mut request: Request, reason: FinishReason, error: Option<Failure>) {
        self.stats.add(|stats| stats.finished += 1);
        let waited = request.submitted.elapsed();
        let timing = Timing { queue: waited, total: waited, ..Timing::default() };
        let finish = Finish { timing, ..Finish::unserved(reason, error) };
        request.sink.update(Update { finish: Some(finish), ..Update::default() });
    }

    /// Every request from its admission to its end.
    fn admitted(&mut self) -> impl Iterator<Item = &mut Active> {
        self.active.iter_mut().chain(&mut self.prefilling).chain(&mut self.preempted)
    }
}

impl<M: ModelRunner> Drop for Engine<M> {
    /// Ends what is left as aborted, or as failed if the engine panicked, so that no client waits for ever.
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if failed {
            self.queue.fail()
        } else {
            self.queue.close()
        }
        let failure = || failed.then(Failure::ended);
        let reason = if failed { FinishReason::Error } else { FinishReason::Abort };
        self.admitted().for_each(|active| active.end(reason, failure()));
        self.retire();
        self.evict(usize::MAX, None);
        self.stats.add(|stats| stats.pages = self.page_counts());
        for request in self.queue.take_if(|_| true) {
            self.end_unserved(request, reason, failure());
        }
    }
}
