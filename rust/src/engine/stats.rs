//! Running counts of an engine, readable from any thread.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::schedule::{CostTable, Skipped};
use hdrhistogram::Histogram;

/// Totals since the engine started.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Requests that run: those that decode, and those whose prompts are not complete.
    pub running: usize,
    /// Of these, those whose prompts are not complete.
    pub prefilling: usize,
    /// Requests that gave up their caches for others and wait for room.
    pub preempted: usize,
    /// Pages of the caches: all, those granted, and of these the ones that kept prefixes hold.
    pub pages: PageCounts,
    /// Positions that were taken from the caches of another request instead of being computed.
    pub reused_tokens: u64,
    /// How often a request gave up its caches for others.
    pub preemptions: u64,
    /// Requests that ended, for whatever reason.
    pub finished: u64,
    /// Tokens committed.
    pub tokens: u64,
    /// Rounds that requests took part in: a batch of three counts three.
    pub rounds: u64,
    /// Tokens drafted, verified and accepted.
    pub drafted: u64,
    /// See `drafted`.
    pub verified: u64,
    /// Draft rows from which no token could be drawn.
    pub bad_draft_rows: u64,
    /// See `drafted`.
    pub accepted: u64,
    /// Rounds of requests that the policy left without a draft.
    pub skipped: Skipped,
    /// How often a part of the draft failed: its pass, that of its context, or a chain.
    pub draft_failures: u64,
    /// The error message of the first failure.
    pub draft_failure: Option<String>,
    /// How often each position of a block was kept if the one before it was; ends before the first position
    /// that was never judged.
    pub acceptance_by_position: Vec<f64>,
    /// What rounds cost now, under a policy that uses it.
    pub cost_table: Option<CostTable>,
    /// Passes of the target over a batch, without prefills.
    pub passes: u64,
    /// Decisions of a runner (see [`ModelRunner::judge`](super::ModelRunner::judge)) whose margin was within
    /// rounding.
    pub close: u64,
    /// Time in prefill passes.
    pub prefill: Duration,
    /// Time in draft passes and context updates.
    pub draft: Duration,
    /// Of this, time in commits and in catching up before a draft, when caches advance and taps become draft
    /// context.
    pub feed: Duration,
    /// Time in Markov chains and confidence heads.
    pub chain: Duration,
    /// Time in target passes.
    pub verify: Duration,
    /// Time in the acceptance rule.
    pub accept: Duration,
    /// Time in whole steps, including all of the above, prefills too.
    pub round: Duration,
}

/// Pages by use.
#[derive(Debug, Clone, Copy, Default)]
pub struct PageCounts {
    /// What `max_kv_tokens` amounts to.
    pub total: usize,
    /// Granted to running requests and kept prefixes.
    pub used: usize,
    /// Held by kept prefixes, until they are needed.
    pub kept: usize,
}

/// Distributions of latencies, as a client sees them, over the last minute or two: percentiles over all that
/// an engine ever did would say little about what it does now.
#[derive(Debug)]
pub(super) struct Latencies {
    first_token: Recent,
    between_tokens: Recent,
}

/// A distribution over the current minute and the one before it.
#[derive(Debug)]
struct Recent {
    now: Histogram<u64>,
    before: Histogram<u64>,
    since: Instant,
}

const MINUTE: Duration = Duration::from_secs(60);

impl Recent {
    fn new() -> Self {
        // Two significant digits: latencies do not repeat to within 1 %, and a histogram takes 26 kB.
        let histogram = || Histogram::new_with_bounds(1, LONGEST, 2).expect("constant bounds are valid");
        Recent { now: histogram(), before: histogram(), since: Instant::now() }
    }

    /// Drops what is too old.
    fn turn(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since);
        if passed < MINUTE {
            return;
        }
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.reset();
        if passed >= 2 * MINUTE {
            self.before.reset();
        }
        self.since = now;
    }

    fn percentiles(&mut self, now: Instant) -> Option<Percentiles> {
        self.turn(now);
        let mut both = self.now.clone();
        both.add(&self.before).expect("both have the same bounds");
        let at = |quantile| Duration::from_micros(both.value_at_quantile(quantile));
        (!both.is_empty()).then(|| Percentiles { p50: at(0.5), p90: at(0.9), p99: at(0.99) })
    }
}

/// The longest latency that can be recorded, in microseconds: an hour. Longer ones count as this.
const LONGEST: u64 = 3_600_000_000;

impl Default for Latencies {
    fn default() -> Self {
        Latencies { first_token: Recent::new(), between_tokens: Recent::new() }
    }
}

impl Latencies {
    /// Adds an update of `tokens` tokens that came `at` after its request was submitted and followed the
    /// update `last`. A round's tokens come together, so each counts as an equal share of the gap.
    pub(super) fn record(
        &mut self,
        at: Duration,
        tokens: usize,
        last: Option<&(Duration, usize)>,
        now: Instant,
    ) {
        self.first_token.turn(now);
        self.between_tokens.turn(now);
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(LONGEST);
        match last {
            None => self.first_token.now.saturating_record(micros(at)),
            Some((before, _)) => {
                let share = micros(at.saturating_sub(*before)) / tokens as u64;
                self.between_tokens.now.saturating_record_n(share, tokens as u64);
            }
        }
    }
}

/// The middle and the tail of a distribution of latencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Percentiles {
    /// Half are at most this.
    pub p50: Duration,
    /// Nine of ten are at most this.
    pub p90: Duration,
    /// 99 of 100 are at most this.
    pub p99: Duration,
}

/// What an engine publishes: [`Stats`] behind a lock that is held for nanoseconds, and latencies behind
/// another one, held for the microseconds that a walk through their buckets takes.
#[derive(Debug, Default)]
pub struct StatsBoard {
    totals: Mutex<Stats>,
    latencies: Mutex<Latencies>,
}

impl StatsBoard {
    /// A copy of the totals.
    pub fn read(&self) -> Stats {
        lock(&self.totals).clone()
    }

    /// Time from submission to the first token, over the last minute or two; `None` if there was none.
    pub fn time_to_first_token(&self) -> Option<Percentiles> {
        lock(&self.latencies).first_token.percentiles(Instant::now())
    }

    /// Time between tokens, over all tokens of the last minute or two but the first of each request; `None`
    /// if there was none.
    pub fn inter_token(&self) -> Option<Percentiles> {
        lock(&self.latencies).between_tokens.percentiles(Instant::now())
    }

    pub(super) fn add(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut lock(&self.totals));
    }

    pub(super) fn latencies(&self) -> MutexGuard<'_, Latencies> {
        lock(&self.latencies)
    }
}

/// Numbers cannot be left half changed, so poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rounds_tokens_share_its_gap() {
        let board = StatsBoard::default();
        assert_eq!((board.time_to_first_token(), board.inter_token()), (None, None));
        let at = Duration::from_millis;
        let record = |at, tokens, last: Option<&(Duration, usize)>| {
            board.latencies().record(at, tokens, last, Instant::now());
        };
        record(at(100), 1, None);
        record(at(140), 4, Some(&(at(100), 1)));
        record(at(240), 1, Some(&(at(140), 4)));
        let near = |found: Duration, expected: Duration| found.abs_diff(expected) <= expected / 100;
        assert!(near(board.time_to_first_token().unwrap().p99, at(100)));
        let between = board.inter_token().unwrap();
        assert!(near(between.p50, at(10)) && near(between.p99, at(100)), "{between:?}");
        record(Duration::from_secs(1_000_000), 1, None);
        assert!(near(board.time_to_first_token().unwrap().p99, Duration::from_secs(3600)));
    }

    #[test]
    fn percentiles_are_of_the_last_minute_or_two() {
        let mut recent = Recent::new();
        let start = recent.since;
        let at = |seconds| start + Duration::from_secs(seconds);
        recent.now.record(1_000_000).unwrap();
        let p50 =
            |recent: &mut Recent, seconds| recent.percentiles(at(seconds)).map(|found| found.p50.as_secs());
        assert_eq!(p50(&mut recent, 59), Some(1));
        assert_eq!(p50(&mut recent, 61), Some(1));
        (0..3).for_each(|_| recent.now.record(5_000_000).unwrap());
        assert_eq!(p50(&mut recent, 119), Some(5));
        assert_eq!(p50(&mut recent, 122), Some(5));
        assert_eq!(p50(&mut recent, 300), None);
    }
}
