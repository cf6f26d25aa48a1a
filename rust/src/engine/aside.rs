//! A draft that fails: speculation steps aside for a while, and every request goes on with the target alone.

use super::{Engine, ModelRunner, RunnerError};

/// The longest wait: a try that fails costs time and a traceback in the log.
const LONGEST: u32 = 1024;

/// Rounds without a draft after one that failed: 8, and after each failure that follows before a draft works again twice
/// as many.
#[derive(Debug, Default)]
pub(super) struct Aside {
    length: u32,
    left: u32,
    /// Since the engine's start.
    pub(super) failures: u64,
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
        self.failures += 1;
        self.length = (2 * self.length).clamp(8, LONGEST);
        self.left = self.length;
    }
}

impl<M: ModelRunner> Engine<M> {
    /// Lets this round and the next ones go on without drafts: something of the draft failed, and only the target's rows can
    /// fail a request.
    pub(super) fn step_aside(&mut self, error: &RunnerError) {
        self.aside.fail();
        self.stats.add(|stats| {
            stats.draft_failures += 1;
            stats.draft_failure.get_or_insert_with(|| error.to_string());
        });
        // Anew, now that nobody may draft: what was planned and drawn is dropped.
        self.decide_depths();
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
        assert_eq!((wait(&mut aside), aside.failures), (8, 10));
    }
}
