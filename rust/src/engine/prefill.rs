//! Prompts run in parts between rounds.

use std::cmp::Reverse;
use std::time::Instant;

use super::active::{Active, charge};
use super::admit::insert;
use super::cached::border;
use super::decide::judge;
use super::round::at;
use super::runner::check_rows;
use super::{Engine, Forks, ModelRunner, PAGE_SIZE};

/// The next tokens of a prompt: the place of its request, their number, and whether they complete the prompt.
#[derive(Clone, Copy)]
struct Part {
    place: usize,
    tokens: usize,
    is_last: bool,
}

impl<M: ModelRunner> Engine<M> {
    /// Runs the next tokens of the waiting prompts, up to the chunk size. Requests are admitted between
    /// passes, so that those whose prompt another request has just completed copy it in the same step.
    pub(super) fn prefill(&mut self) {
        let mut left = self.config.prefill_chunk_size;
        while left > 0 {
            self.admit();
            let parts = self.parts(left);
            if parts.is_empty() {
                break;
            }
            left -= parts.iter().map(|part| part.tokens).sum::<usize>();
            if parts.len() == 1 || !self.prefill_pass(&parts, true) {
                self.prefill_each(parts);
            }
        }
    }

    /// Runs each part alone; if their common pass has failed, this shows which of them is the cause. The last
    /// comes first, because a request that leaves moves those behind it. A part that fails is tried again
    /// without kept prefixes, since memory may be what it lacks.
    fn prefill_each(&mut self, mut parts: Vec<Part>) {
        parts.sort_by_key(|part| Reverse(part.place));
        for part in parts {
            let can_make_room = self.prefixes.iter().next().is_some();
            if !self.prefill_pass(&[part], can_make_room) {
                self.evict(usize::MAX, None);
                self.prefill_pass(&[part], false);
            }
        }
    }

    /// The parts that the next pass runs, `left` tokens at most; those that complete their prompts come
    /// first. Tokens go to the prompts with the fewest left, so that no short prompt waits for a long one; of
    /// equal ones, the first comes first. But half of the tokens, or a page, are for the oldest prompt, so
    /// that every prompt gets through.
    fn parts(&self, left: usize) -> Vec<Part> {
        let mut order: Vec<_> = self.prefilling.iter().enumerate().collect();
        order.sort_by_key(|(_, active)| active.unfilled());
        let chunk = self.config.prefill_chunk_size;
        let part = |active: &Active, left: usize| part(active, left, chunk, self.forks);
        let half = left.div_ceil(2).max(PAGE_SIZE).min(left);
        let mut reserved = self.prefilling.first().map_or(0, |oldest| part(oldest, half));
        let (mut unused, mut parts) = (left, Vec::new());
        for (place, active) in order {
            if place == 0 {
                reserved = 0;
            }
            let tokens = part(active, unused - reserved);
            unused -= tokens;
            if tokens > 0 {
                parts.push(Part { place, tokens, is_last: tokens == active.unfilled() });
            }
        }
        parts.sort_by_key(|part| (!part.is_last, part.place));
        parts
    }

    /// Runs one pass over these parts, and draws the first token of each request whose prompt is complete. If
    /// the pass fails, the requests end; if it is to be tried `again`, they stay as they were and it returns
    /// false.
    fn prefill_pass(&mut self, parts: &[Part], again: bool) -> bool {
        let started = Instant::now();
        let item = |part: &Part| {
            let active = &self.prefilling[part.place];
            let rows = active.cached.rows;
            (active.request.id, &active.cached.tokens[rows..rows + part.tokens], active.request.drafts)
        };
        let items: Vec<_> = parts.iter().map(item).collect();
        let outcome = self.runner.prefill(&items);
        let places: Vec<_> = parts.iter().map(|part| part.place).collect();
        let spent = charge(at(&mut self.prefilling, &places), |timing| &mut timing.prefill, started);
        self.stats.add(|stats| stats.prefill += spent);
        if outcome.is_err() && again {
            return false;
        }
        let outcome = outcome.and_then(|logits| {
            check_rows("prefill", &logits, parts.len())?;
            Ok(logits)
        });
        match outcome {
            Ok(mut logits) => {
                for part in parts {
                    let cached = &mut self.prefilling[part.place].cached;
                    cached.mark = cached.rows;
                    cached.rows += part.tokens;
                }
                // In order of their places, like their rows.
                let mut through: Vec<_> =
                    self.prefilling.extract_if(.., |active| active.unfilled() == 0).collect();
                self.draw_first(&mut through, &mut logits);
                through.into_iter().for_each(|active| insert(&mut self.active, active));
            }
            Err(error) => at(&mut self.prefilling, &places).for_each(|active| active.fail(&error)),
        }
        self.retire();
        true
    }

    /// Draws the first token of each request whose prompt is complete from its row of `logits`. A request
    /// that was preempted has its next token already: its anchor.
    fn draw_first(&mut self, through: &mut [Active], logits: &mut M::Rows) {
        let mut row = 0;
        for run in through.chunk_by_mut(|a, b| a.is_fresh() == b.is_fresh()) {
            if run[0].is_fresh() {
                let close = judge(&mut self.runner, &self.config, run, logits, row, false);
                self.stats.add(|stats| stats.close += close);
            }
            row += run.len();
        }
    }
}

/// Tokens of the next part of a prompt: at most the `left` ones of a step's `chunk`. If forks need it, a part
/// ends at the last page border. What follows the border begins where others will fork, so it is not split
/// but waits for a step that it fits in; only a chunk smaller than that splits it.
fn part(active: &Active, left: usize, chunk: usize, forks: Forks) -> usize {
    let unfilled = active.unfilled();
    let to_border = border(active.goal()).saturating_sub(active.cached.rows);
    match forks {
        Forks::AtParts if to_border > 0 => to_border.min(left),
        Forks::AtParts if left < unfilled && unfilled <= chunk => 0,
        _ => unfilled.min(left),
    }
}
