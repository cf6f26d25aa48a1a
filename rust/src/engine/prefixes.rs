//! Caches of requests that have ended, kept for requests that begin with the same tokens.

use super::cached::Cached;
use super::{Forks, RequestId};

/// The most prefixes that are kept. Each look-up compares a prompt with all of them, at the speed of memory:
/// a hundred of a thousand tokens take some ten microseconds, too little for a hash of pages to be worth its
/// code.
pub(super) const MOST: usize = 128;

/// Kept prefixes, the least recently used first.
#[derive(Debug)]
pub(super) struct Prefixes {
    kept: Vec<(RequestId, Cached)>,
    most: usize,
}

impl Prefixes {
    /// No prefixes yet, and never more than `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { kept: Vec::new(), most: most.max(1) }
    }

    /// Keeps what an ended request's caches hold. Returns the caches that need not be held any longer,
    /// perhaps these themselves: those that another prefix contains, and those beyond the limit.
    #[must_use]
    pub(super) fn keep(
        &mut self,
        id: RequestId,
        mut cached: Cached,
        forks: Forks,
    ) -> Vec<(RequestId, Cached)> {
        cached.tokens.truncate(cached.rows);
        let covers = |a: &Cached, b: &Cached| a.ready(&b.tokens, b.drafted, forks) >= b.rows;
        if let Some(at) = self.kept.iter().position(|(_, kept)| covers(kept, &cached)) {
            self.refresh(at);
            return vec![(id, cached)];
        }
        let mut dropped: Vec<_> = self.kept.extract_if(.., |(_, kept)| covers(&cached, kept)).collect();
        if self.kept.len() >= self.most {
            dropped.push(self.kept.remove(0));
        }
        self.kept.push((id, cached));
        dropped
    }

    /// Removes and returns the least recently used prefix other than `spared`.
    pub(super) fn evict(&mut self, spared: Option<RequestId>) -> Option<(RequestId, Cached)> {
        let at = self.kept.iter().position(|(id, _)| Some(*id) != spared)?;
        Some(self.kept.remove(at))
    }

    /// Removes and returns a prefix.
    pub(super) fn take(&mut self, id: RequestId) -> Option<(RequestId, Cached)> {
        let at = self.kept.iter().position(|(kept, _)| *kept == id)?;
        Some(self.kept.remove(at))
    }

    /// Makes a prefix the most recently used one.
    pub(super) fn touch(&mut self, id: RequestId) {
        if let Some(at) = self.kept.iter().position(|(kept, _)| *kept == id) {
            self.refresh(at);
        }
    }

    fn refresh(&mut self, at: usize) {
        let kept = self.kept.remove(at);
        self.kept.push(kept);
    }

    /// A prefix, if it is kept.
    pub(super) fn get(&self, id: RequestId) -> Option<&Cached> {
        self.iter().find(|(kept, _)| *kept == id).map(|(_, cached)| cached)
    }

    /// The prefixes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (RequestId, &Cached)> {
        self.kept.iter().map(|(id, cached)| (*id, cached))
    }

    /// The prefixes, mutable.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (RequestId, &mut Cached)> {
        self.kept.iter_mut().map(|(id, cached)| (*id, cached))
    }

    /// Pages that the prefixes hold.
    pub(super) fn pages(&self) -> usize {
        self.kept.iter().map(|(_, cached)| cached.grant).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(tokens: std::ops::Range<u32>) -> Cached {
        let rows = tokens.len();
        Cached { tokens: tokens.collect(), rows, drafted: true, grant: 1, ..Cached::default() }
    }

    fn ids(prefixes: &Prefixes) -> Vec<RequestId> {
        prefixes.iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut prefixes = Prefixes::new(MOST);
        for id in 0..4 {
            let start = 1000 * id as u32;
            assert!(prefixes.keep(id, cached(start..start + 20), Forks::Anywhere).is_empty());
        }
        prefixes.touch(0);
        assert_eq!(ids(&prefixes), [1, 2, 3, 0]);
        assert_eq!(prefixes.evict(Some(1)).unwrap().0, 2);
        assert_eq!(prefixes.take(0).unwrap().0, 0);
        assert_eq!((ids(&prefixes), prefixes.pages()), (vec![1, 3], 2));
        for id in 0..MOST as u64 {
            let start = 100_000 + 1000 * id as u32;
            let dropped = prefixes.keep(10 + id, cached(start..start + 20), Forks::Anywhere);
            assert!(dropped.len() <= 1);
        }
        assert_eq!(prefixes.pages(), MOST);
        assert!(!ids(&prefixes).contains(&1), "the oldest made room");
    }

    #[test]
    fn what_another_prefix_holds_is_not_kept_twice() {
        let mut prefixes = Prefixes::new(MOST);
        assert!(prefixes.keep(1, cached(0..30), Forks::Anywhere).is_empty());
        let dropped = prefixes.keep(2, cached(0..20), Forks::Anywhere);
        assert_eq!((dropped[0].0, ids(&prefixes)), (2, vec![1]));
        let dropped = prefixes.keep(3, cached(0..40), Forks::Anywhere);
        assert_eq!((dropped[0].0, ids(&prefixes)), (1, vec![3]));
        // An earlier recurrent state cannot be recovered from a later one.
        assert!(prefixes.keep(4, cached(0..20), Forks::AtParts).is_empty());
        // Nor can a draft context from caches without one.
        let plain = Cached { drafted: false, ..cached(0..50) };
        assert!(prefixes.keep(5, plain, Forks::Anywhere).is_empty());
        assert_eq!(prefixes.keep(6, Cached { drafted: false, ..cached(0..25) }, Forks::Anywhere)[0].0, 6);
    }
}
