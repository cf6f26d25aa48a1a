//! The text of a request that has stop strings.

use crate::stop::{StopMatch, StopStrings};

/// Turns tokens into text as they come; implemented where the tokenizer lives.
pub trait Detokenizer: Send {
    /// The text that `token` completes; empty while a character is unfinished.
    fn push(&mut self, token: u32) -> String;
    /// The text that is left when no token follows.
    fn flush(&mut self) -> String;
}

/// Shows a request's text to its stop strings, token by token.
pub struct StopText {
    strings: StopStrings,
    detokenizer: Box<dyn Detokenizer>,
    certain: String,
}

impl StopText {
    /// Stop strings, and the detokenizer that shows them the text.
    pub fn new(strings: StopStrings, detokenizer: Box<dyn Detokenizer>) -> Self {
        StopText { strings, detokenizer, certain: String::new() }
    }

    /// Reads a token; returns the stop string that it completes, if it `may_stop`.
    pub(super) fn push(&mut self, token: u32, may_stop: bool) -> Option<String> {
        let StopMatch { text, stop } = self.strings.push(&self.detokenizer.push(token), may_stop);
        self.certain.push_str(&text);
        stop
    }

    /// Takes the text that is certain by now; once the request `is_over`, all of the rest. A stop string that
    /// only the detokenizer's last text completes is cut out, but does not change how the request ended.
    pub(super) fn take(&mut self, is_over: bool) -> String {
        if is_over {
            let rest = self.detokenizer.flush();
            self.certain.push_str(&self.strings.finish(&rest));
        }
        std::mem::take(&mut self.certain)
    }
}
