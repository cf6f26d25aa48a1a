//! The tokens that penalties look at: those of the prompt, and those generated since.

use std::collections::HashMap;

/// How often one token was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Whether it occurs in the prompt.
    pub in_prompt: bool,
    /// How often it occurs in the output.
    pub in_output: u32,
}

/// What came before the next token of one request.
///
/// Drafted tokens are pushed while a block is drafted or checked, since row `k` of a block is
/// penalised for the tokens before it, and taken back with [`History::rewind`].
#[derive(Clone, Debug, Default)]
pub struct History {
    seen: HashMap<u32, Seen>,
    output: Vec<u32>,
}

impl History {
    /// The state after the prompt, before anything is generated.
    pub fn new(prompt: &[u32]) -> Self {
        let in_prompt = Seen { in_prompt: true, in_output: 0 };
        Self { seen: prompt.iter().map(|&token| (token, in_prompt)).collect(), output: Vec::new() }
    }

    /// The state after a prompt and the output so far.
    pub fn after(prompt: &[u32], output: &[u32]) -> Self {
        let mut history = Self::new(prompt);
        output.iter().for_each(|&token| history.push(token));
        history
    }

    /// Number of tokens generated so far.
    pub fn generated(&self) -> usize {
        self.output.len()
    }

    /// The tokens generated so far.
    pub fn output(&self) -> &[u32] {
        &self.output
    }

    /// Appends a token to the output.
    pub fn push(&mut self, token: u32) {
        self.output.push(token);
        self.seen.entry(token).or_default().in_output += 1;
    }

    /// Takes tokens back until `generated` of them are left; does nothing if there are not more than that.
    pub fn rewind(&mut self, generated: usize) {
        while self.output.len() > generated {
            let Some(token) = self.output.pop() else { break };
            if let Some(seen) = self.seen.get_mut(&token) {
                seen.in_output -= 1;
                if *seen == Seen::default() {
                    self.seen.remove(&token);
                }
            }
        }
    }

    /// How often a token was seen.
    pub fn count(&self, token: u32) -> Seen {
        self.seen.get(&token).copied().unwrap_or_default()
    }

    /// Every token seen, once, in no particular order.
    pub fn distinct(&self) -> impl Iterator<Item = (u32, Seen)> + '_ {
        self.seen.iter().map(|(&token, &seen)| (token, seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewinding_restores_what_was_seen() {
        let mut history = History::new(&[5, 5, 6]);
        for token in [6, 7, 7] {
            history.push(token);
        }
        let seven = Seen { in_prompt: false, in_output: 2 };
        assert_eq!(history.count(7), seven);
        assert_eq!(history.count(6).in_output, 1);
        history.rewind(1);
        assert_eq!(history.count(7), Seen::default());
        assert_eq!(history.distinct().count(), 2);
        assert_eq!(history.output(), &[6]);
        history.rewind(9);
        assert_eq!(history.generated(), 1);
        history.rewind(0);
        assert_eq!(history.count(6).in_output, 0);
        assert!(history.count(6).in_prompt);
    }
}
