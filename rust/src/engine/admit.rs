//! Admission: requests start in order of arrival, with what other caches already hold of their prompts.

use std::ops::ControlFlow::{self, Break, Continue};
use std::time::Instant;

use super::active::Active;
use super::cached::Cached;
use super::pages::Pages;
use super::{Engine, FinishReason, Forks, ModelRunner, PAGE_SIZE, RequestId, RunnerError};

/// How a waiting request would start.
struct Start {
    /// Its grant: pages for the rows of its prompt, which are certain to be needed, and for the first round.
    pages: usize,
    /// The request to copy from, and how many tokens of the prompt its caches hold.
    source: Option<(RequestId, usize)>,
}

impl<M: ModelRunner> Engine<M> {
    /// Admits waiting requests while there is room.
    pub(super) fn admit(&mut self) {
        while self.active.len() + self.prefilling.len() < self.config.max_batch_size
            && let Some((active, start)) = self.next()
        {
            self.begin(active, start);
        }
    }

    /// The first request that can start; preempted ones come before those that never ran.
    fn next(&mut self) -> Option<(Active, Start)> {
        for at in 0..self.preempted.len() {
            let active = &self.preempted[at];
            let tokens = &active.cached.tokens[..active.goal()];
            if let Break(start) = self.start(tokens, active.request.drafts, active.demand()) {
                return start.map(|start| (self.preempted.remove(at), start));
            }
        }
        loop {
            let (request, start) = self.queue.take_first(|request| match request.max_tokens {
                0 => Break(Some(None)),
                _ => self
                    .start(&request.prompt, request.drafts, request.demand())
                    .map_break(|start| start.map(Some)),
            })?;
            let Some(start) = start else {
                self.end_unserved(request, FinishReason::Length, None);
                continue;
            };
            self.admissions += 1;
            return Some((Active::new(request, self.admissions, Instant::now()), start));
        }
    }

    /// How a request with these tokens to prefill can start now. If it has to wait for pages (`Break(None)`),
    /// so do the requests behind it, which would otherwise take those pages. If another request is just
    /// prefilling more of this prompt than is ready (`Continue`), only this request waits, no longer than
    /// that prefill lasts.
    fn start(&self, tokens: &[u32], drafts: bool, demand: usize) -> ControlFlow<Option<Start>> {
        let pages = Pages::needed(self.config.reach(tokens.len(), drafts).min(demand));
        let running = self.active.len() + self.prefilling.len();
        let evictable = self.pages.free() + self.prefixes.pages();
        // One page is left for each running request; otherwise the next round would take back what is granted
        // now.
        if pages + running > evictable {
            return Break(None);
        }
        // The last token has to run, because its logits are needed.
        let tokens = tokens.split_last().map_or(tokens, |(_, before)| before);
        let of = |active: &Active| active.cached.coming(active.goal(), tokens, drafts, self.forks);
        let coming = self.prefilling.iter().map(of).max().unwrap_or(0);
        let ready = self.holders().map(|(id, cached)| (id, cached.ready(tokens, drafts, self.forks)));
        let source = ready.filter(|(_, length)| *length > 0).max_by_key(|(_, length)| *length);
        let ready = source.map_or(0, |(_, length)| length);
        if coming < ready + PAGE_SIZE { Break(Some(Start { pages, source })) } else { Continue(()) }
    }

    /// All caches that the runner holds. Kept prefixes come last, because the last of equally good sources is
    /// preferred, and a kept prefix may never be needed again.
    pub(super) fn holders(&self) -> impl Iterator<Item = (RequestId, &Cached)> {
        let running = self.active.iter().chain(&self.prefilling);
        running.map(|active| (active.request.id, &active.cached)).chain(self.prefixes.iter())
    }

    /// Starts a request: grants its pages, and copies what it takes from another one's caches.
    fn begin(&mut self, mut active: Active, start: Start) {
        let Start { pages, source } = start;
        self.evict(pages, source.map(|(id, _)| id));
        let outcome = self.copy(&mut active, pages, source);
        match source {
            Some((source, _)) if active.cached.rows > 0 => self.used(source, &active.cached, pages),
            _ => self.evict(pages, None),
        }
        self.pages.allocate(pages);
        active.cached.grant = pages;
        if let Err(error) = outcome {
            active.fail(&error);
        }
        let failed = active.finish.is_some();
        insert(&mut self.prefilling, active);
        if failed {
            self.retire();
        } else {
            self.publish(Instant::now());
        }
    }

    /// Makes the caches of a starting request, with the first rows of the source's.
    fn copy(
        &mut self,
        active: &mut Active,
        pages: usize,
        source: Option<(RequestId, usize)>,
    ) -> Result<(), RunnerError> {
        let id = active.request.id;
        self.reserve(id, pages, source.map(|(id, _)| id))?;
        let Some((source, length)) = source else { return Ok(()) };
        let fork = |runner: &mut M| runner.fork(id, source, length, active.request.drafts);
        let taken = match fork(&mut self.runner) {
            Err(_) => {
                // As in `reserve`: try again without kept prefixes.
                self.evict(usize::MAX, Some(source));
                fork(&mut self.runner)
            }
            taken => taken,
        };
        match taken {
            // If the copy fails, the prompt goes through the target.
            Err(_) => return Ok(()),
            Ok(0) => self.note_refusal(source, length),
            Ok(taken) if taken > length => {
                return Err(RunnerError(format!("a fork at {length} positions took {taken}")));
            }
            Ok(taken) => active.cached.rows = taken,
        }
        if active.preemptions == 0 {
            active.reused = active.cached.rows;
        }
        self.stats.add(|stats| stats.reused_tokens += active.cached.rows as u64);
        Ok(())
    }

    /// Notes that a source refused a fork. Otherwise a request that relies on it would neither wait for a
    /// better source nor be kept as a prefix itself.
    fn note_refusal(&mut self, source: RequestId, length: usize) {
        let running = self.active.iter_mut().chain(&mut self.prefilling);
        let running = running.map(|active| (active.request.id, &mut active.cached));
        if let Some((_, cached)) = running.chain(self.prefixes.iter_mut()).find(|(id, _)| *id == source) {
            cached.refused = cached.refused.max(length);
        }
    }

    /// Notes that `copy` was made of a source. A kept prefix is dropped if the copy holds all of it, draft
    /// context included, or if its pages are the only ones left.
    fn used(&mut self, source: RequestId, copy: &Cached, pages: usize) {
        let Some(prefix) = self.prefixes.get(source) else { return };
        let is_whole = copy.rows == prefix.rows && (copy.drafted || !prefix.drafted);
        let replaced = is_whole && self.forks == Forks::Anywhere;
        if replaced || !self.pages.can_allocate(pages) {
            let prefix = self.prefixes.take(source);
            self.forget(prefix);
        } else {
            self.prefixes.touch(source);
        }
    }
}

/// Inserts a request into a list that is in order of admission.
pub(super) fn insert(list: &mut Vec<Active>, active: Active) {
    let at = list.partition_point(|other| other.admission < active.admission);
    list.insert(at, active);
}
