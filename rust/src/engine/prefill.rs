//! Prompts run in parts between rounds.

use std::time::Instant;

use super::active::charge;
use super::round::{accept_batch, fail};
use super::{Engine, ModelRunner, PassRows};

impl<M: ModelRunner> Engine<M> {
    /// Runs the next tokens of the prompts that wait, up to the chunk size, in order, and draws the first token of each
    /// request whose prompt is through.
    pub(super) fn prefill(&mut self) {
        let started = Instant::now();
        let mut left = self.config.prefill_chunk_size;
        let mut items = Vec::new();
        for active in &self.prefilling {
            if left == 0 {
                break;
            }
            let (start, rows) = (active.prefilled, active.unfilled().min(left));
            items.push((
                active.request.id,
                &active.request.prompt[start..start + rows],
                active.request.drafts,
            ));
            left -= rows;
        }
        if items.is_empty() {
            return;
        }
        let rows: Vec<_> = items.iter().map(|(_, part, _)| part.len()).collect();
        let outcome = self.runner.prefill(&items);
        let batch = &mut self.prefilling[..rows.len()];
        let spent = charge(batch.iter_mut(), |timing| &mut timing.prefill, started);
        self.stats.add(|stats| stats.prefill += spent);
        match outcome {
            Ok(logits) => {
                batch.iter_mut().zip(&rows).for_each(|(active, rows)| active.prefilled += rows);
                // Only the last part can be less than what was left of its prompt.
                let through = batch.iter().take_while(|active| active.unfilled() == 0).count();
                let first = self.active.len();
                self.active.extend(self.prefilling.drain(..through));
                accept_batch(
                    self.config.rule,
                    &mut self.active[first..],
                    logits.rows().slice(0..through),
                    false,
                );
            }
            Err(error) => fail(batch, &error),
        }
        self.retire();
    }
}
