//! The target's pass of a round: what it checks, what is committed, and which requests a failure is due to.

use std::ops::Range;
use std::time::Instant;

use super::active::{Active, charge};
use super::decide::judge;
use super::runner::check_rows;
use super::{Engine, ModelRunner, RunnerError};
use crate::schedule::RoundTime;

impl<M: ModelRunner> Engine<M> {
    /// Lets the target check the rows of every running request, and commits what it keeps. A pass that fails
    /// has kept nothing, so it is repeated, without drafts and after freeing the memory of kept prefixes. If
    /// it fails again, it is repeated for each request alone, so that a request ends only by its own failure.
    /// Returns whether the first pass was enough: the time of a repaired round says nothing about what rounds
    /// cost.
    pub(super) fn verify(&mut self, time: &mut RoundTime) -> bool {
        let all = 0..self.active.len();
        let error = match self.pass(all.clone(), time) {
            Ok(logits) => {
                if time.drafting > 0 {
                    self.aside.end();
                    self.wide_failed = false;
                }
                return self.keep(all, logits, time);
            }
            Err(error) => error,
        };
        self.evict(usize::MAX, None);
        let wide: Vec<_> = all.clone().filter(|&place| self.active[place].rows.len() > 1).collect();
        self.active.iter_mut().for_each(Active::drop_draft);
        match self.pass(all.clone(), time) {
            Ok(logits) => {
                self.blame_width(&wide, &error);
                self.keep(all, logits, time);
            }
            Err(error) if all.len() == 1 => self.active[0].fail(&error),
            // Each is committed right after its pass, because a runner knows only its last one, and the last
            // comes first, because a request that ends moves those behind it.
            Err(_) => all.rev().for_each(|place| match self.pass(place..place + 1, time) {
                Ok(logits) => {
                    self.keep(place..place + 1, logits, time);
                }
                Err(error) => self.active[place].fail(&error),
            }),
        }
        false
    }

    /// Runs the target over the rows of the requests at these places.
    fn pass(&mut self, places: Range<usize>, time: &mut RoundTime) -> Result<M::Rows, RunnerError> {
        let started = Instant::now();
        let batch = &mut self.active[places];
        let items: Vec<_> = batch.iter().map(|active| (active.request.id, active.rows.as_slice())).collect();
        (time.requests, time.tokens) = (items.len(), items.iter().map(|(_, rows)| rows.len()).sum());
        let outcome = self.runner.verify(&items);
        let spent = charge(batch.iter_mut(), |timing| &mut timing.verify, started);
        time.verify = spent.as_secs_f64();
        self.stats.add(|stats| stats.verify += spent);
        let logits = outcome?;
        check_rows("verify", &logits, time.tokens)?;
        Ok(logits)
    }

    /// Judges the rows of the last pass, which was for the requests at these places, and commits what stays.
    /// Returns false if the commit failed, which ends all of them.
    fn keep(&mut self, places: Range<usize>, mut logits: M::Rows, time: &mut RoundTime) -> bool {
        let started = Instant::now();
        let batch = &mut self.active[places.clone()];
        let close = judge(&mut self.runner, &self.config, batch, &mut logits, 0, true);
        let accepted = charge(batch.iter_mut(), |timing| &mut timing.sample, started);
        drop(logits);
        // The time of decisions on the pass's rows grows with the pass.
        time.verify += accepted.as_secs_f64();
        self.planner.learn(batch.iter_mut().filter_map(Active::lesson));

        let kept: Vec<_> = batch.iter_mut().filter_map(Active::kept).collect();
        self.stats.add(|stats| {
            stats.passes += 1;
            stats.close += close;
            stats.accept += accepted;
            stats.acceptance_by_position.clear();
            stats.acceptance_by_position.extend(self.planner.acceptance());
        });
        // Clients first: what follows prepares the next round.
        self.retire();
        let staying = &mut self.active[places.start..places.start + kept.len()];
        let started = Instant::now();
        // Called even if all have ended: the runner then drops what the pass left of them.
        if let Err(error) = self.runner.commit(&kept) {
            staying.iter_mut().for_each(|active| active.fail(&error));
            return false;
        }
        let spent = charge(staying.iter_mut(), |timing| &mut timing.draft, started);
        time.feed = spent.as_secs_f64();
        self.stats.add(|stats| {
            stats.draft += spent;
            stats.feed += spent;
        });
        true
    }
}
