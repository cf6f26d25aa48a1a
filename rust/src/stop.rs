//! Where a request stops: end ids and stop strings.
//!
//! A stop string is a property of the text, not of the tokens: it may begin in one token, or one round, and
//! end in another. So the text is matched as it arrives, token by token, and the token that completes a
//! string ends the request, even in the middle of an accepted prefix.

/// The ids that end a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopIds {
    end: Vec<u32>,
    own: Vec<u32>,
}

/// An id that ends the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopHit {
    /// An end token of the model: nothing to report.
    End,
    /// One of the request's own stop ids.
    Token(u32),
}

impl StopIds {
    /// The model's `end` tokens (none under `ignore_eos`) and the request's `own` stop ids. An id in both is
    /// an end token.
    pub fn new(end: &[u32], own: &[u32]) -> Self {
        let sorted = |ids: &mut dyn Iterator<Item = u32>| {
            let mut ids: Vec<u32> = ids.collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        let end = sorted(&mut end.iter().copied());
        let own = sorted(&mut own.iter().copied().filter(|id| end.binary_search(id).is_err()));
        Self { end, own }
    }

    /// Whether and how `id` ends the request.
    pub fn check(&self, id: u32) -> Option<StopHit> {
        if self.end.binary_search(&id).is_ok() {
            Some(StopHit::End)
        } else {
            self.own.binary_search(&id).is_ok().then_some(StopHit::Token(id))
        }
    }

    /// All the ids, each once.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.end.iter().chain(&self.own).copied()
    }
}

/// What one more token of text led to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopMatch {
    /// Text that is now certain to stay; it follows what was returned before.
    pub text: String,
    /// The stop string that the token completed. The request has then ended, and `text` is its last.
    pub stop: Option<String>,
}

/// Matches stop strings against a text that arrives in pieces, and holds back what may still be cut.
///
/// The string whose end comes first wins; of several that end at the same byte, the first listed. One
/// automaton per string (Knuth, Morris and Pratt) reads each byte once, however the text is divided. Matching
/// bytes is as good as matching characters: in UTF-8 no character's bytes occur inside another's.
#[derive(Debug, Clone)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    keep: bool,
    held: String,
    ended: bool,
}

#[derive(Debug, Clone)]
struct Pattern {
    text: String,
    /// `border[n]`: length of the longest proper suffix of the first n + 1 bytes that is also a prefix.
    border: Vec<usize>,
    /// Length of the longest end of the text read so far that is a proper prefix of this string.
    matched: usize,
}

impl StopStrings {
    /// Strings in the order of the request. With `keep`, the string that was found stays in the text
    /// (`include_stop_str_in_output`); otherwise it is cut out. An empty string is never found: code that
    /// takes parameters from users refuses it.
    pub fn new(strings: Vec<String>, keep: bool) -> Self {
        let patterns = strings.into_iter().filter(|s| !s.is_empty()).map(Pattern::new).collect();
        Self { patterns, keep, held: String::new(), ended: false }
    }

    /// Reads the text of one more token. Unless it `may_stop` (`min_tokens`), a string that ends in it does
    /// not count; one that only begins in it may be completed later. After a match the text has ended, and
    /// what is pushed then is dropped.
    pub fn push(&mut self, piece: &str, may_stop: bool) -> StopMatch {
        if self.ended {
            return StopMatch::default();
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            let found = self.step(byte);
            if let Some(index) = found.filter(|_| may_stop) {
                return self.end(index, before + i + 1);
            }
        }
        // What is held is the longest end of the text that may still become a string to be cut out.
        let hold = if self.keep { 0 } else { self.patterns.iter().map(|p| p.matched).max().unwrap_or(0) };
        let held = self.held.split_off(self.held.len() - hold);
        StopMatch { text: std::mem::replace(&mut self.held, held), stop: None }
    }

    /// The rest of a text that no string has ended: what was held back, then `rest`, which is matched too.
    /// A string that `rest` completes only cuts the text: no token completed it, and the request has ended
    /// for another reason already, `min_tokens` or not.
    pub fn finish(&mut self, rest: &str) -> String {
        let StopMatch { text, .. } = self.push(rest, true);
        self.ended = true;
        text + &std::mem::take(&mut self.held)
    }

    /// Feeds every automaton; returns the first listed of the strings that this byte completes.
    fn step(&mut self, byte: u8) -> Option<usize> {
        let mut found = None;
        for (index, pattern) in self.patterns.iter_mut().enumerate() {
            // Not `find`: the other automata must read the byte, too, in case the match does not count.
            if pattern.step(byte) && found.is_none() {
                found = Some(index);
            }
        }
        found
    }

    /// Ends the text at a string whose last byte is the held text's byte `end - 1`.
    fn end(&mut self, index: usize, end: usize) -> StopMatch {
        let stop = self.patterns[index].text.clone();
        // Not below 0: if the string is to be cut out, all of it was held back.
        self.held.truncate(if self.keep { end } else { end - stop.len() });
        self.ended = true;
        StopMatch { text: std::mem::take(&mut self.held), stop: Some(stop) }
    }
}

impl Pattern {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut border = vec![0; bytes.len()];
        let mut length = 0;
        for n in 1..bytes.len() {
            while length > 0 && bytes[n] != bytes[length] {
                length = border[length - 1];
            }
            length += usize::from(bytes[n] == bytes[length]);
            border[n] = length;
        }
        Self { text, border, matched: 0 }
    }

    /// Whether this byte completes the string.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.border[self.matched - 1];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        let complete = self.matched == bytes.len();
        if complete {
            self.matched = self.border[self.matched - 1];
        }
        complete
    }
}

#[cfg(test)]
#[path = "stop_tests.rs"]
mod tests;
