//! A draft that fails: speculation steps aside for a while, and every request goes on with the target alone.

use super::round::at;
use super::{Engine, ModelRunner, RunnerError};
use crate::schedule::Skip;

/// The longest wait: a try that fails costs time and a traceback in the log.
const LONGEST: u32 = 1024;

/// Rounds without a draft after one that failed: 8, and after each failure that follows before a draft works again twice
/// as many. The engine has one for what fails everybody, each request one for what fails it alone.
#[derive(Debug, Default)]
pub(super) struct Aside {
    length: u32,
    left: u32,
}

impl Aside {
    /// A round begins.
    pub(super) fn begin_round(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Whether nobody may draft.
    pub(super) fn is_waiting(&self) -> bool {
        self.left > 0
    }

    /// A draft worked.
    pub(super) fn end(&mut self) {
        self.length = 0;
    }

    fn fail(&mut self) {
        self.length = (2 * self.length).clamp(8, LONGEST);
        self.left = self.length;
    }
}

impl<M: ModelRunner> Engine<M> {
    /// Lets this round and the next ones go on without drafts: something of the draft failed, and only the target's rows can
    /// fail a request.
    pub(super) fn step_aside(&mut self, error: &RunnerError) {
        self.count_failure(error);
        self.aside.fail();
        // Anew, now that nobody may draft: what was planned and drawn is dropped.
        self.decide_depths();
    }

    /// A call of the draft failed for running requests, given by their places: puts those aside for which it fails `alone`
    /// too. False if that is nobody, or everybody who is to draft: then it is not for them that it fails.
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

    /// The target's pass failed with the drafted tokens of these requests, and not without: once may be the memory that
    /// kept prefixes took; twice in a row it is the drafts, and all step aside.
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

    /// Puts aside those of the drafting requests whose first row was a bad one: they pay for drafts and have none.
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
