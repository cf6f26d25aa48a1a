//! One round over the running requests: draft, plan, and the target's part (`verify.rs`).

use std::time::{Duration, Instant};

use super::active::{Active, charge};
use super::decide::Chains;
use super::runner::check_rows;
use super::{Engine, ModelRunner, RunnerError};
use crate::chain::Chain;
use crate::schedule::{Draft, RoundTime, Skip};

impl<M: ModelRunner> Engine<M> {
    /// Lets every running request advance by one round.
    pub(super) fn round(&mut self) {
        if let Some(policy) = self.queue.take_policy() {
            self.planner.set_policy(policy);
            self.publish_costs();
        }
        let started = Instant::now();
        let mut time = RoundTime::default();
        let failures = self.draft_failures;
        self.aside.begin_round();
        self.active.iter_mut().for_each(|active| active.aside.begin_round());
        let put_off = self.decide_depths();
        self.draft(&mut time);
        self.plan();
        if self.verify(&mut time) {
            // Feeding what earlier rounds put off is not a cost of this one.
            time.total = (started.elapsed() - put_off).as_secs_f64();
            // Nor is a draft that failed a cost of plain rounds.
            if self.draft_failures == failures && self.planner.timed(&time) {
                self.publish_costs();
            }
        }
        self.retire();
    }

    /// Publishes what rounds cost now for other threads.
    pub(super) fn publish_costs(&self) {
        let table = self.planner.cost_table().cloned();
        self.stats.add(|stats| stats.cost_table = table);
    }

    /// Asks the policy which requests draft, and brings the draft context of those that resume up to date.
    /// Returns the time that the latter took.
    pub(super) fn decide_depths(&mut self) -> Duration {
        let block_size = self.config.block_size;
        let all_wait = self.aside.is_waiting();
        let allowed = |active: &Active| if all_wait || active.aside.is_waiting() { 0 } else { block_size };
        let mut prospects: Vec<_> =
            self.active.iter_mut().map(|active| active.prospect(allowed(active))).collect();
        let depths = self.planner.depths(&mut prospects);
        let mut resuming = Vec::new();
        for (place, (active, depth)) in self.active.iter_mut().zip(depths).enumerate() {
            active.chain.recycle(&mut active.workspace);
            if depth.tokens > 0 && active.depth.tokens == 0 {
                resuming.push(place);
            }
            active.depth = depth;
            if allowed(active) == 0 && active.room(block_size) > 0 {
                active.depth.skipped = Some(Skip::Broken);
            }
        }
        if resuming.is_empty() {
            return Duration::ZERO;
        }
        let started = Instant::now();
        if let Err(error) = self.feed(&resuming)
            && !self.blame(&resuming, &error, |engine, place| engine.feed(&[place]))
        {
            self.step_aside(&error);
            return Duration::ZERO;
        }
        let spent = charge(at(&mut self.active, &resuming), |timing| &mut timing.draft, started);
        self.stats.add(|stats| {
            stats.draft += spent;
            stats.feed += spent;
        });
        spent
    }

    fn feed(&mut self, places: &[usize]) -> Result<(), RunnerError> {
        let ids: Vec<_> = places.iter().map(|&place| self.active[place].request.id).collect();
        self.runner.feed(&ids)
    }

    /// Drafts for the requests that the policy lets draft.
    fn draft(&mut self, time: &mut RoundTime) {
        let started = Instant::now();
        let mut drafting = self.drafting();
        if drafting.is_empty() {
            return;
        }
        let mut outcome = self.draw(&drafting);
        if let Err(error) = &outcome
            && self.blame(&drafting, error, |engine, place| engine.draw(&[place]).map(drop))
        {
            drafting = self.drafting();
            outcome = self.draw(&drafting); // together: a runner keeps the laws of its last chains only
        }
        let (draft, chain) = match outcome {
            Ok(spent) => spent,
            Err(error) => {
                self.step_aside(&error);
                return;
            }
        };
        (time.draft, time.chain) = (draft.as_secs_f64(), chain.as_secs_f64());
        time.drafting = drafting.len();
        for active in at(&mut self.active, &drafting) {
            time.drafted += active.chain.ids.len();
        }
        self.blame_rows(&drafting);
        charge(at(&mut self.active, &drafting), |timing| &mut timing.draft, started);
        self.stats.add(|stats| {
            stats.draft += draft;
            stats.chain += chain;
        });
    }

    /// Places of the requests that draft in this round.
    pub(super) fn drafting(&self) -> Vec<usize> {
        (0..self.active.len()).filter(|&place| self.active[place].depth.tokens > 0).collect()
    }

    /// Runs one draft pass for the requests at these places, and draws their chains. Returns the times of the
    /// two.
    fn draw(&mut self, places: &[usize]) -> Result<(Duration, Duration), RunnerError> {
        let started = Instant::now();
        let mut drafting: Vec<_> = at(&mut self.active, places).collect();
        let items: Vec<_> = drafting.iter().map(|active| (active.request.id, active.anchor())).collect();
        let mut pass = self.runner.draft(&items)?;
        check_rows("draft", &pass.base, items.len() * self.config.gamma)?;
        let drafted = Instant::now();
        let chains = Chains { config: &self.config, planner: &self.planner };
        chains.draw(&mut self.runner, &mut pass, &mut drafting)?;
        Ok((drafted - started, drafted.elapsed()))
    }

    /// Sets every request's rows of the coming target pass: its anchor and the drafted tokens to check.
    fn plan(&mut self) {
        let all_greedy = self.active.iter().all(|active| active.request.params.is_greedy());
        let drafts: Vec<_> = self.active.iter().map(|active| plannable(&active.chain)).collect();
        // Confidences are probabilities here; if they were not, verifying nothing would still be sound.
        let lengths = self.planner.plan(&drafts, all_greedy).unwrap_or_else(|_| vec![0; drafts.len()]);
        for (active, verified) in self.active.iter_mut().zip(lengths) {
            let anchor = active.anchor();
            active.rows.clear();
            active.rows.push(anchor);
            active.rows.extend_from_slice(&active.chain.ids[..verified]);
        }
    }
}

/// The requests at these places, in order of place.
pub(super) fn at<'a>(active: &'a mut [Active], places: &'a [usize]) -> impl Iterator<Item = &'a mut Active> {
    active.iter_mut().enumerate().filter(|(place, _)| places.contains(place)).map(|(_, active)| active)
}

/// The drafted tokens that the plan may use: those before the first confidence that is not a probability, or
/// all of them if there is no confidence head.
fn plannable(chain: &Chain) -> Draft<'_> {
    let confidences = chain.confidence.as_slice();
    let sure = confidences.iter().take_while(|c| (0.0..=1.0).contains(*c)).count();
    let drafted = if confidences.is_empty() { chain.ids.len() } else { sure };
    // The chain has kept to the limits of budget and window, so all that it drafted fits.
    Draft { drafted, limit: drafted, confidences: &confidences[..sure] }
}
