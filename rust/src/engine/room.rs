//! Pages for the next round, and which requests make room when there are none.

use super::admit::insert;
use super::cached::Cached;
use super::pages::Pages;
use super::{Engine, ModelRunner, PAGE_SIZE, RequestId, RunnerError};
use crate::schedule::Depth;

impl<M: ModelRunner> Engine<M> {
    /// Gives every decoding request the pages that its next round can need, the oldest first. Kept prefixes
    /// make room, the least recently used first, then the requests that were admitted last; the oldest one
    /// always continues.
    pub(super) fn grow(&mut self) {
        let mut next = 0;
        while next < self.active.len() {
            let active = &self.active[next];
            let (grant, demand) = (active.cached.grant, active.demand());
            let needed = Pages::needed(self.config.reach(active.goal(), active.request.drafts).min(demand));
            if needed > grant {
                let grown = Pages::grown(grant, needed, Pages::needed(demand));
                self.evict(grown - grant, None);
                while !self.pages.can_allocate(needed - grant) && !self.is_youngest(next) {
                    self.preempt();
                }
                if !self.pages.can_allocate(needed - grant) {
                    self.preempt();
                    break;
                }
                self.extend(next, self.pages.free().min(grown - grant));
            }
            next += 1;
        }
        if self.active.iter().any(|active| active.finish.is_some()) {
            self.retire();
        }
    }

    /// Grants that many more pages to the request at `index`.
    fn extend(&mut self, index: usize, pages: usize) {
        let active = &mut self.active[index];
        self.pages.allocate(pages);
        active.cached.grant += pages;
        let (id, grant) = (active.request.id, active.cached.grant);
        if let Err(error) = self.reserve(id, grant, None) {
            self.active[index].fail(&error);
        }
    }

    /// Asks the runner to make room for that many pages of a request's caches. If it cannot, it is asked
    /// again after all kept prefixes but `spared` have been given up: what they were granted is memory, too.
    pub(super) fn reserve(
        &mut self,
        id: RequestId,
        pages: usize,
        spared: Option<RequestId>,
    ) -> Result<(), RunnerError> {
        let items = [(id, pages * PAGE_SIZE)];
        self.runner.reserve(&items).or_else(|_| {
            self.evict(usize::MAX, spared);
            self.runner.reserve(&items)
        })
    }

    /// Whether the decoding request at `index` was admitted last of all that run.
    fn is_youngest(&self, index: usize) -> bool {
        let admission = self.active[index].admission;
        index + 1 == self.active.len() && self.prefilling.last().is_none_or(|last| last.admission < admission)
    }

    /// Gives up the caches of the request that was admitted last, whether its prompt is complete or not. It
    /// waits in front of all requests that never ran. Once its prompt and its generated tokens have gone
    /// through the target again, it continues at its anchor: nothing is drawn twice.
    fn preempt(&mut self) {
        let decodes = !self.active.is_empty() && self.is_youngest(self.active.len() - 1);
        let running = if decodes { &mut self.active } else { &mut self.prefilling };
        let Some(mut active) = running.pop() else { return };
        let Cached { grant, rows, mark, refused, .. } = &mut active.cached;
        self.pages.deallocate(std::mem::take(grant));
        (*rows, *mark, *refused) = (0, 0, 0);
        active.preemptions += 1;
        // Its context will have to be fed again before it drafts.
        active.depth = Depth::default();
        self.runner.release(&[active.request.id]);
        insert(&mut self.preempted, active);
        self.stats.add(|stats| stats.preemptions += 1);
    }

    /// Gives up kept prefixes other than `spared` until that many pages are free or no prefix is left.
    pub(super) fn evict(&mut self, pages: usize, spared: Option<RequestId>) {
        while !self.pages.can_allocate(pages)
            && let Some(prefix) = self.prefixes.evict(spared)
        {
            self.forget([prefix]);
        }
    }

    /// Makes the runner forget caches, and takes their pages back.
    pub(super) fn forget(&mut self, caches: impl IntoIterator<Item = (RequestId, Cached)>) {
        let release = |(id, cached): (RequestId, Cached)| {
            self.pages.deallocate(cached.grant);
            id
        };
        let ids: Vec<_> = caches.into_iter().map(release).collect();
        if !ids.is_empty() {
            self.runner.release(&ids);
        }
    }
}
