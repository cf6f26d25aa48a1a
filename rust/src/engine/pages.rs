//! How many pages of key/value positions there are, and how many are granted.

/// Positions in one page, of the target's cache and the draft's context together.
pub const PAGE_SIZE: usize = 16;

/// The fewest pages that a grant grows by.
const SMALLEST_STEP: usize = 4;

/// Counts the pages of all caches: those of requests that run and those of kept prefixes.
#[derive(Debug, Clone)]
pub(super) struct Pages {
    total: usize,
    used: usize,
}

impl Pages {
    /// As many pages as `tokens` positions fill, all of them free.
    pub(super) fn new(tokens: usize) -> Self {
        Pages { total: tokens / PAGE_SIZE, used: 0 }
    }

    /// Pages that `tokens` positions take.
    pub(super) fn needed(tokens: usize) -> usize {
        tokens.div_ceil(PAGE_SIZE)
    }

    /// The new size of a grant that has to hold `needed` pages and will never hold more than `most`: an
    /// eighth more than before, so that the rows of a long request are not copied at every page.
    pub(super) fn grown(grant: usize, needed: usize, most: usize) -> usize {
        (grant + SMALLEST_STEP.max(grant / 8)).min(most).max(needed)
    }

    /// Whether that many pages are free.
    pub(super) fn can_allocate(&self, pages: usize) -> bool {
        pages <= self.free()
    }

    /// Takes pages; the caller has checked [`Self::can_allocate`].
    pub(super) fn allocate(&mut self, pages: usize) {
        debug_assert!(self.can_allocate(pages), "{pages} pages of {}", self.free());
        self.used += pages;
    }

    /// Gives pages back.
    pub(super) fn deallocate(&mut self, pages: usize) {
        debug_assert!(pages <= self.used, "{pages} pages of {}", self.used);
        self.used -= pages;
    }

    /// Pages that are not granted.
    pub(super) fn free(&self) -> usize {
        self.total - self.used
    }

    /// Pages granted.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// All pages.
    pub(super) fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allocated_comes_back() {
        let mut pages = Pages::new(79);
        assert_eq!((pages.total(), Pages::needed(16), Pages::needed(17)), (4, 1, 2));
        pages.allocate(3);
        assert!(pages.can_allocate(1) && !pages.can_allocate(2));
        pages.deallocate(2);
        assert_eq!((pages.used(), pages.free()), (1, 3));
    }

    #[test]
    fn grants_grow_in_steps_and_not_beyond_what_can_be_used() {
        assert_eq!(Pages::grown(1, 2, 100), 5);
        assert_eq!(Pages::grown(80, 81, 100), 90);
        assert_eq!(Pages::grown(80, 81, 83), 83);
        assert_eq!(Pages::grown(2, 9, 100), 9);
    }
}
