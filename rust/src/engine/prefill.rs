//! Prompts run in parts between rounds.

use std::time::Instant;

use super::active::charge;
use super::decide::judge;
use super::round::fail;
use super::runner::check_rows;
use super::{Engine, ModelRunner};

impl<M: ModelRunner> Engine<M> {
    /// Runs the next tokens of the prompts that wait, up to the chunk size, in order. Between passes requests are
    /// admitted: those whose prompt has just become ready take it over in the same step.
    pub(super) fn prefill(&mut self) {
        let mut left = self.config.prefill_chunk_size;
        let mut most = usize::MAX;
        while left > 0 {
            self.admit();
            if self.prefilling.is_empty() {
                break;
            }
            match self.prefill_pass(left, most) {
                Some(tokens) => left -= tokens,
                // Whose fault it was shows when each goes alone.
                None => most = 1,
            }
        }
    }

    /// One pass over at most `left` tokens of at most `most` prompts; draws the first token of each request whose prompt is
    /// through. Returns the number of tokens, or nothing where a pass over several prompts failed, which leaves all of
    /// them as they were.
    fn prefill_pass(&mut self, left: usize, most: usize) -> Option<usize> {
        let started = Instant::now();
        let mut unused = left;
        let mut items = Vec::new();
        for active in self.prefilling.iter().take(most) {
            let part = active.part(unused, self.forks);
            unused -= part.len();
            items.push((active.request.id, part, active.request.drafts));
            // Only the last part may be less than what is left of its prompt.
            if unused == 0 || part.len() < active.unfilled() {
                break;
            }
        }
        let rows: Vec<_> = items.iter().map(|(_, part, _)| part.len()).collect();
        let outcome = self.runner.prefill(&items);
        let batch = &mut self.prefilling[..rows.len()];
        let spent = charge(batch.iter_mut(), |timing| &mut timing.prefill, started);
        self.stats.add(|stats| stats.prefill += spent);
        if outcome.is_err() && rows.len() > 1 {
            return None;
        }
        let outcome = outcome.and_then(|logits| {
            check_rows("prefill", &logits, rows.len())?;
            Ok(logits)
        });
        match outcome {
            Ok(mut logits) => {
                for (active, rows) in batch.iter_mut().zip(&rows) {
                    active.cached.mark = active.cached.rows;
                    active.cached.rows += rows;
                }
                let through = batch.iter().take_while(|active| active.unfilled() == 0).count();
                let first = self.active.len();
                self.active.extend(self.prefilling.drain(..through));
                self.draw_first(first, &mut logits);
            }
            Err(error) => fail(batch, &error),
        }
        self.retire();
        Some(left - unused)
    }

    /// Draws the first token of the requests from index `first` on, by their row of `logits` each. Who was preempted has
    /// its next token already: its anchor.
    fn draw_first(&mut self, first: usize, logits: &mut M::Rows) {
        let mut row = 0;
        for run in self.active[first..].chunk_by_mut(|a, b| a.is_fresh() == b.is_fresh()) {
            if run[0].is_fresh() {
                let close = judge(&mut self.runner, &self.config, run, logits, row, false);
                self.stats.add(|stats| stats.close += close);
            }
            row += run.len();
        }
    }
}
