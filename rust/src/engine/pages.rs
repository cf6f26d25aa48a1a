//! How many key/value positions the running requests may still take.

/// Positions in one page: caches grow in these steps.
pub const PAGE_SIZE: usize = 16;

/// Counts pages, so that admitted requests always find room until they end.
#[derive(Debug, Clone)]
pub struct Pages {
    total: usize,
    used: usize,
}

impl Pages {
    /// Room for `tokens` positions over all requests.
    pub fn new(tokens: usize) -> Self {
        Pages { total: tokens / PAGE_SIZE, used: 0 }
    }

    /// Pages that `tokens` positions take.
    pub fn needed(tokens: usize) -> usize {
        tokens.div_ceil(PAGE_SIZE)
    }

    /// Whether `tokens` positions would fit an empty cache.
    pub fn fits_ever(&self, tokens: usize) -> bool {
        Self::needed(tokens) <= self.total
    }

    /// Whether `tokens` positions fit now.
    pub fn can_reserve(&self, tokens: usize) -> bool {
        self.used + Self::needed(tokens) <= self.total
    }

    /// Takes the pages of `tokens` positions; the caller has asked [`Self::can_reserve`].
    pub fn reserve(&mut self, tokens: usize) {
        self.used += Self::needed(tokens);
    }

    /// Gives back what [`Self::reserve`] took for the same number of positions.
    pub fn release(&mut self, tokens: usize) {
        self.used = self.used.saturating_sub(Self::needed(tokens));
    }

    /// Pages taken.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Pages there are.
    pub fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_comes_back() {
        let mut pages = Pages::new(64);
        assert_eq!(pages.total(), 4);
        pages.reserve(17);
        assert_eq!(pages.used(), 2);
        assert!(pages.can_reserve(32) && !pages.can_reserve(33));
        pages.release(17);
        assert_eq!(pages.used(), 0);
        assert!(pages.fits_ever(64) && !pages.fits_ever(65));
    }
}
