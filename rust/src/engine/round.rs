//! One round over the running requests: draft, plan, verify, accept, commit.

use std::time::{Duration, Instant};

use super::active::{Active, charge};
use super::decide::{Chains, judge};
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
        let failures = self.aside.failures;
        self.aside.begin_round();
        let put_off = self.decide_depths();
        self.draft(&mut time);
        match self.verify(&mut time) {
            Ok(()) => {
                // What earlier rounds put off is no cost of this one.
                time.total = (started.elapsed() - put_off).as_secs_f64();
                // Nor is a draft that failed one of plain rounds.
                if self.aside.failures == failures && self.planner.timed(&time) {
                    self.publish_costs();
                }
            }
            Err(error) => fail(&mut self.active, &error),
        }
        self.retire();
    }

    /// Shows other threads what rounds cost as of now.
    pub(super) fn publish_costs(&self) {
        let table = self.planner.cost_table().cloned();
        self.stats.add(|stats| stats.cost_table = table);
    }

    /// Asks the policy who drafts, and lets those who resume catch up with their context: the time of that.
    pub(super) fn decide_depths(&mut self) -> Duration {
        let block_size = self.config.block_size;
        let is_aside = self.aside.is_waiting();
        let allowed = if is_aside { 0 } else { block_size };
        let mut prospects: Vec<_> = self.active.iter_mut().map(|active| active.prospect(allowed)).collect();
        let depths = self.planner.depths(&mut prospects);
        let mut resuming = Vec::new();
        for (active, depth) in self.active.iter_mut().zip(depths) {
            active.chain.recycle(&mut active.workspace);
            if depth.tokens > 0 && active.depth.tokens == 0 {
                resuming.push(active.request.id);
            }
            active.depth = depth;
            if is_aside && active.room(block_size) > 0 {
                active.depth.skipped = Some(Skip::Broken);
            }
        }
        if resuming.is_empty() {
            return Duration::ZERO;
        }
        let started = Instant::now();
        if let Err(error) = self.runner.feed(&resuming) {
            self.step_aside(&error);
            return Duration::ZERO;
        }
        let fed = self.active.iter_mut().filter(|active| resuming.contains(&active.request.id));
        let spent = charge(fed, |timing| &mut timing.draft, started);
        self.stats.add(|stats| {
            stats.draft += spent;
            stats.feed += spent;
        });
        spent
    }

    /// Drafts for the requests that the policy lets draft.
    fn draft(&mut self, time: &mut RoundTime) {
        let started = Instant::now();
        let gamma = self.config.gamma;
        let mut drafting: Vec<&mut Active> =
            self.active.iter_mut().filter(|active| active.depth.tokens > 0).collect();
        if drafting.is_empty() {
            return;
        }
        let items: Vec<_> = drafting.iter().map(|active| (active.request.id, active.anchor())).collect();
        let pass = self.runner.draft(&items).and_then(|pass| {
            check_rows("draft", &pass.base, items.len() * gamma)?;
            Ok(pass)
        });
        let drafted = Instant::now();
        let chains = Chains { config: &self.config, planner: &self.planner };
        let outcome = pass.and_then(|mut pass| chains.draw(&mut self.runner, &mut pass, &mut drafting));
        let chained = drafted.elapsed();
        if let Err(error) = outcome {
            self.step_aside(&error);
            return;
        }
        self.aside.end();
        time.drafting = drafting.len();
        time.drafted = drafting.iter().map(|active| active.chain.ids.len()).sum();
        (time.draft, time.chain) = ((drafted - started).as_secs_f64(), chained.as_secs_f64());
        charge(drafting.into_iter(), |timing| &mut timing.draft, started);
        self.stats.add(|stats| {
            stats.draft += drafted - started;
            stats.chain += chained;
        });
    }

    /// Lets the target check as much of each draft as the policy says, and commits what it keeps.
    fn verify(&mut self, time: &mut RoundTime) -> Result<(), RunnerError> {
        self.plan();
        let started = Instant::now();
        let items: Vec<_> =
            self.active.iter().map(|active| (active.request.id, active.rows.as_slice())).collect();
        (time.requests, time.tokens) = (items.len(), items.iter().map(|(_, rows)| rows.len()).sum());
        let mut logits = self.runner.verify(&items)?;
        check_rows("verify", &logits, time.tokens)?;
        let verified = charge(self.active.iter_mut(), |timing| &mut timing.verify, started);

        let started = Instant::now();
        let close = judge(&mut self.runner, &self.config, &mut self.active, &mut logits, 0, true);
        let accepted = charge(self.active.iter_mut(), |timing| &mut timing.sample, started);
        drop(logits);
        // Decisions on the pass's rows grow with it.
        time.verify = (verified + accepted).as_secs_f64();
        self.planner.learn(self.active.iter_mut().filter_map(Active::lesson));

        let kept: Vec<_> = self.active.iter_mut().filter_map(Active::kept).collect();
        self.stats.add(|stats| {
            stats.passes += 1;
            stats.close += close;
            stats.verify += verified;
            stats.accept += accepted;
            stats.acceptance_by_position.clear();
            stats.acceptance_by_position.extend(self.planner.acceptance());
        });
        // Clients first: what follows prepares the next round.
        self.retire();
        let started = Instant::now();
        // Also for nobody: the runner lets go of what the pass left of those that ended.
        self.runner.commit(&kept)?;
        let spent = charge(self.active.iter_mut(), |timing| &mut timing.draft, started);
        time.feed = spent.as_secs_f64();
        self.stats.add(|stats| {
            stats.draft += spent;
            stats.feed += spent;
        });
        Ok(())
    }

    /// Sets every request's rows of the coming target pass: its anchor and the drafted tokens to check.
    fn plan(&mut self) {
        let all_greedy = self.active.iter().all(|active| active.request.params.is_greedy());
        let drafts: Vec<_> = self.active.iter().map(|active| plannable(&active.chain)).collect();
        // Confidences are probabilities here; were they not, verifying nothing is always sound.
        let lengths = self.planner.plan(&drafts, all_greedy).unwrap_or_else(|_| vec![0; drafts.len()]);
        for (active, verified) in self.active.iter_mut().zip(lengths) {
            let anchor = active.anchor();
            active.rows.clear();
            active.rows.push(anchor);
            active.rows.extend_from_slice(&active.chain.ids[..verified]);
        }
    }
}

/// What the plan may count on. A head whose confidence is not a probability vouches for nothing from there on;
/// without a head every drafted token stands for itself.
fn plannable(chain: &Chain) -> Draft<'_> {
    let confidences = chain.confidence.as_slice();
    let sure = confidences.iter().take_while(|c| (0.0..=1.0).contains(*c)).count();
    let drafted = if confidences.is_empty() { chain.ids.len() } else { sure };
    // The limits of budget and window were the chain's: what it drafted fits.
    Draft { drafted, limit: drafted, confidences: &confidences[..sure] }
}

/// Ends every request of a pass that failed.
pub(super) fn fail(batch: &mut [Active], error: &RunnerError) {
    batch.iter_mut().for_each(|active| active.fail(error));
}
