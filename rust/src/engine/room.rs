//! Pages for the next round, and who makes room when there are none.

use super::cached::Cached;
use super::pages::Pages;
use super::{Engine, ModelRunner, PAGE_SIZE, RequestId};
use crate::schedule::Depth;

impl<M: ModelRunner> Engine<M> {
    /// Gives every decoding request the pages that its next round can need, the oldest first. Kept prefixes make room, the
    /// least recently used first, then the requests that were admitted last: the oldest one always goes on.
    pub(super) fn grow(&mut self) {
        let mut next = 0;
        while next < self.active.len() {
            let active = &self.active[next];
            let (grant, demand) = (active.cached.grant, active.demand());
            let needed = Pages::needed(self.config.reach(active.goal(), active.request.drafts).min(demand));
            if needed > grant {
                let grown = Pages::grown(grant, needed, Pages::needed(demand));
                self.evict(grown - grant, None);
                let is_last = |engine: &Self| engine.prefilling.is_empty() && next + 1 == engine.active.len();
                while !self.pages.can_allocate(needed - grant) && !is_last(self) {
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

    /// Grants that many pages more to the request at `index`.
    fn extend(&mut self, index: usize, pages: usize) {
        let active = &mut self.active[index];
        self.pages.allocate(pages);
        active.cached.grant += pages;
        if let Err(error) = self.runner.reserve(&[(active.request.id, active.cached.grant * PAGE_SIZE)]) {
            active.fail(&error);
        }
    }

    /// Gives up the caches of the request that was admitted last. It waits in front of all others, and once its prompt
    /// and what it generated have gone through the target again, it goes on at its anchor: nothing is drawn twice.
    fn preempt(&mut self) {
        let Some(mut active) = self.prefilling.pop().or_else(|| self.active.pop()) else { return };
        let Cached { grant, rows, mark, .. } = &mut active.cached;
        self.pages.deallocate(std::mem::take(grant));
        (*rows, *mark) = (0, 0);
        active.preemptions += 1;
        // Its context will have to be fed again before it drafts.
        active.depth = Depth::default();
        self.runner.release(&[active.request.id]);
        self.preempted.push_front(active);
        self.stats.add(|stats| stats.preemptions += 1);
    }

    /// Gives up kept prefixes, `spared` apart, until that many pages are free or none is left.
    pub(super) fn evict(&mut self, pages: usize, spared: Option<RequestId>) {
        while !self.pages.can_allocate(pages)
            && let Some(prefix) = self.prefixes.evict(spared)
        {
            self.forget([prefix]);
        }
    }

    /// Lets the runner forget caches, and takes their pages back.
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
