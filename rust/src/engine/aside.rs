//! A draft that fails: drafting pauses for a while, and requests continue with the target alone.

use super::round::at;
use super::{Engine, ModelRunner, RunnerError};
use crate::schedule::Skip;

/// The longest pause, in rounds: each try that fails costs time and a traceback in the log.
const LONGEST: u32 = 1024;

/// A pause from drafting after a failure: 8 rounds, and twice as many after each further failure until a
/// draft works again. The engine has one for failures that concern all requests, each request one for its
/// own.
#[derive(Debug, Default)]
pub(super) struct Aside {
    length: u32,
    left: u32,
}

impl Aside {
    /// Counts a round that begins.
    pub(super) fn begin_round(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Whether drafting is paused.
    pub(super) fn is_waiting(&self) -> bool {
        self.left > 0
    }

    /// Notes that a draft worked.
    pub(super) fn end(&mut self) {
        self.length = 0;
    }

    fn fail(&mut self) {
        self.length = (2 * self.length).clamp(8, LONGEST);
        self.left = self.length;
    }
}

impl<M: ModelRunner> Engine<M> {
    /// Continues this round and the next ones without drafts after a part of the draft failed: only the
    /// target's rows may fail a request.
    pub(super) fn step_aside(&mut self, error: &RunnerError) {
        self.count_failure(error);
        self.aside.fail();
        // Decide again, now that no request may draft: what was planned and drawn is dropped.
        self.decide_depths();
    }

    /// A call of the draft failed for the running requests at `places`: pauses those for which it also fails
    /// `alone`. Returns false if that is none of them, or all that are to draft: then the requests are not
    /// the cause.
    pub(super) fn blame(
        &mut self,
        places: &[usize],
        error: &RunnerError,
        alone: impl Fn(&mut Self, usize) -> Result<(), RunnerError>,
    ) -> bool {
        let drafting = self.drafting().len();
        if drafting < 2 {
            return false;
        }
        let failed: Vec<_> = places.iter().copied().filter(|&place| alone(self, place).is_err()).collect();
        if failed.is_empty() || failed.len() == drafting {
            return false;
        }
        self.count_failure(error);
        for place in failed {
            let active = &mut self.active[place];
            active.aside.fail();
            active.drop_draft();
            active.depth.skipped = Some(Skip::Broken);
        }
        true
    }

    /// The target's pass failed with the drafted tokens of these requests, and succeeded without them. The
    /// first time, the cause may be the memory that kept prefixes took; twice in a row it is the drafts, and
    /// the engine pauses drafting.
    pub(super) fn blame_width(&mut self, places: &[usize], error: &RunnerError) {
        if places.is_empty() {
            return;
        }
        if self.wide_failed {
            self.count_failure(error);
            self.aside.fail();
            places.iter().for_each(|&place| self.active[place].depth.skipped = Some(Skip::Broken));
        }
        self.wide_failed = true;
    }

    /// Pauses those drafting requests whose first draft row was bad: they pay for drafts and get none.
    pub(super) fn blame_rows(&mut self, places: &[usize]) {
        for active in at(&mut self.active, places) {
            if active.chain.ids.is_empty() && active.chain.bad_rows > 0 {
                active.aside.fail();
                active.depth.skipped = Some(Skip::Broken);
            } else {
                active.aside.end();
            }
        }
    }

    fn count_failure(&mut self, error: &RunnerError) {
        self.draft_failures += 1;
        self.stats.add(|stats| {
            stats.draft_failures += 1;
            stats.draft_failure.get_or_insert_with(|| error.to_string());
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds without a draft until the next try.
    fn wait(aside: &mut Aside) -> u32 {
        let mut rounds = 0;
        while aside.is_waiting() {
            rounds += 1;
            aside.begin_round();
        }
        rounds
    }

    #[test]
    fn a_draft_that_keeps_failing_is_tried_ever_more_rarely() {
        let mut aside = Aside::default();
        assert!(!aside.is_waiting());
        let mut waits = Vec::new();
        for _ in 0..9 {
            aside.fail();
            waits.push(wait(&mut aside));
        }
        assert_eq!(waits, [8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
        aside.end();
        aside.fail();
        assert_eq!(wait(&mut aside), 8);
    }
}
