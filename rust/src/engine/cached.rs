//! What the caches of one request hold, as the engine sees it.

use super::{Forks, PAGE_SIZE};

/// Tokens, rows and pages of a request that runs, waits, or has ended and is kept as a prefix.
#[derive(Debug, Default)]
pub(super) struct Cached {
    /// The committed text: the prompt, then what was generated.
    pub(super) tokens: Vec<u32>,
    /// How many of them the caches hold.
    pub(super) rows: usize,
    /// Where the last part of the prompt began.
    pub(super) mark: usize,
    /// Whether they hold the draft's context, too.
    pub(super) drafted: bool,
    /// Pages granted to the caches.
    pub(super) grant: usize,
    /// Length of the longest fork that was refused; shorter ones would be, too, since a sliding layer forgets
    /// from the front.
    pub(super) refused: usize,
}

impl Cached {
    /// How many of `tokens` a fork could take from these caches now; 0 below a page, which is not worth a
    /// copy.
    pub(super) fn ready(&self, tokens: &[u32], drafts: bool, forks: Forks) -> usize {
        if drafts && !self.drafted {
            return 0;
        }
        let shared = common(&self.tokens[..self.rows], tokens);
        let usable = match forks {
            Forks::Anywhere => shared,
            Forks::AtParts if self.rows <= shared => self.rows,
            Forks::AtParts if self.mark <= shared => self.mark,
            Forks::AtParts | Forks::Never => 0,
        };
        self.worth(usable)
    }

    fn worth(&self, usable: usize) -> usize {
        if usable < PAGE_SIZE || usable <= self.refused { 0 } else { usable }
    }

    /// The same once the first `goal` tokens have gone through the target.
    pub(super) fn coming(&self, goal: usize, tokens: &[u32], drafts: bool, forks: Forks) -> usize {
        if drafts && !self.drafted {
            return 0;
        }
        let shared = common(&self.tokens[..goal], tokens);
        let mark = border(goal).max(self.rows);
        let usable = match forks {
            Forks::Anywhere => shared,
            Forks::AtParts if mark <= shared => mark,
            Forks::AtParts | Forks::Never => 0,
        };
        self.worth(usable)
    }
}

/// The last page border before a prompt's last token.
pub(super) fn border(goal: usize) -> usize {
    (goal - 1) / PAGE_SIZE * PAGE_SIZE
}

/// Length of the longest common prefix. Whole runs are compared first: that is a memcmp.
fn common(a: &[u32], b: &[u32]) -> usize {
    const RUN: usize = 64;
    let runs = a.chunks_exact(RUN).zip(b.chunks_exact(RUN)).take_while(|(a, b)| a == b).count();
    let start = runs * RUN;
    start + a[start..].iter().zip(&b[start..]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(tokens: Vec<u32>, rows: usize, mark: usize) -> Cached {
        Cached { tokens, rows, mark, drafted: true, ..Cached::default() }
    }

    #[test]
    fn the_common_prefix_is_found_on_both_sides_of_a_run() {
        let a: Vec<u32> = (0..200).collect();
        for length in [0, 1, 63, 64, 65, 127, 128, 199, 200] {
            let mut b = a.clone();
            if length < 200 {
                b[length] = 1000;
            }
            assert_eq!(common(&a, &b), length);
            assert_eq!(common(&a[..length.min(150)], &b), length.min(150));
        }
    }

    #[test]
    fn a_fork_takes_what_is_held_where_it_can() {
        let source = cached((0..100).collect(), 90, 64);
        let tokens: Vec<u32> = (0..95).collect();
        assert_eq!(source.ready(&tokens, true, Forks::Anywhere), 90);
        assert_eq!(source.ready(&tokens, true, Forks::AtParts), 90);
        assert_eq!(source.ready(&tokens[..80], true, Forks::Anywhere), 80);
        assert_eq!(source.ready(&tokens[..80], true, Forks::AtParts), 64);
        assert_eq!(source.ready(&tokens[..60], true, Forks::AtParts), 0);
        assert_eq!(source.ready(&tokens[..PAGE_SIZE - 1], true, Forks::Anywhere), 0);
        let plain = Cached { drafted: false, ..source };
        assert_eq!(plain.ready(&tokens, true, Forks::Anywhere), 0, "no draft context to take");
        assert_eq!(plain.ready(&tokens, false, Forks::Anywhere), 90);
    }

    #[test]
    fn what_was_refused_is_not_offered_again() {
        let source = Cached { refused: 40, ..cached((0..100).collect(), 90, 64) };
        let tokens: Vec<u32> = (0..95).collect();
        assert_eq!(source.ready(&tokens, true, Forks::Anywhere), 90);
        assert_eq!(source.ready(&tokens[..40], true, Forks::Anywhere), 0);
        assert_eq!(source.ready(&tokens[..41], true, Forks::Anywhere), 41);
        assert_eq!(source.ready(&tokens, true, Forks::Never), 0);
        assert_eq!(source.coming(100, &tokens, true, Forks::Never), 0);
    }

    #[test]
    fn what_is_coming_is_known_from_the_prompt() {
        let source = cached((0..100).collect(), 3, 0);
        let tokens: Vec<u32> = (0..99).collect();
        assert_eq!(source.coming(100, &tokens, true, Forks::Anywhere), 99);
        assert_eq!(source.coming(100, &tokens, true, Forks::AtParts), 96);
        assert_eq!(source.coming(100, &tokens[..95], true, Forks::AtParts), 0);
    }
}
