//! Attention of the newest rows of many sequences over their cached keys and values, in one call per layer.
//!
//! torch has no operation for ragged rows over separate caches, and a call per request costs more than its
//! arithmetic: with 32 requests of SmolLM2, half of a pass. Here a layer is a list of independent tasks, one
//! for each request, key head and part of a long context, which any workers may take.

mod kernel;
mod softmax;
mod split;
mod tile;

use std::marker::PhantomData;
use std::ops::Range;

pub use kernel::Element;

use self::split::Parts;
use crate::workers::Workers;

/// Head sizes are multiples of this.
pub const LANES: usize = 16;

/// Heads of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Key (and value) heads.
    pub keys: usize,
    /// Query heads for each of them.
    pub groups: usize,
    /// Numbers in a head, a multiple of [`LANES`].
    pub size: usize,
}

/// Which keys the rows of a request see.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// Whether a row sees nothing later than itself.
    pub causal: bool,
    /// The most keys that a row sees; `None` for all.
    pub window: Option<usize>,
    /// Whether the window is fixed: every row sees the `window` keys before the first row, and the rows.
    pub anchored: bool,
}

impl Reach {
    /// The range of keys (end exclusive) that row `row` of `rows`, behind `length` keys, sees.
    pub(crate) fn of(self, row: usize, rows: usize, length: usize) -> (usize, usize) {
        let own = length + row;
        let end = if self.causal { own + 1 } else { length + rows };
        let start = match self.window {
            Some(window) if self.anchored => length.saturating_sub(window),
            Some(window) => (own + 1).saturating_sub(window),
            None => 0,
        };
        (start, end)
    }

    /// The range of keys that any of the rows sees.
    pub(crate) fn of_all(self, rows: usize, length: usize) -> Range<usize> {
        // No row sees an earlier key than the first one.
        self.of(0, rows, length).0..length + rows
    }
}

/// One request's rows of a pass, and where its cache is.
///
/// The cache is `[layers, 2 * key heads, capacity, size]`, the key heads before the value heads.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// Address of the cache.
    pub cache: usize,
    /// Positions that it has room for.
    pub capacity: usize,
    /// Positions that it holds.
    pub length: usize,
    /// New rows, written behind them.
    pub rows: usize,
    /// Index of the first of them in the pass.
    pub first: usize,
}

/// One layer's call: heads in, attended values out.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// Which layer of the caches.
    pub index: usize,
    /// Visibility.
    pub reach: Reach,
    /// Address of the rows `[rows, query heads + key heads + value heads, size]`; queries are scaled, queries
    /// and keys rotated.
    pub input: usize,
    /// Numbers from one row to the next.
    pub row_stride: usize,
    /// Address of the output `[rows, query heads * size]`.
    pub output: usize,
}

/// The attention of one pass over numbers of type `T`.
#[derive(Debug)]
pub struct Pass<T> {
    heads: Heads,
    segments: Vec<Segment>,
    /// Those of each segment's key heads.
    parts: Vec<Vec<Parts>>,
    element: PhantomData<T>,
}

impl<T: Element> Pass<T> {
    /// A pass of these rows, for so many threads: long contexts are divided if these are more than key heads.
    ///
    /// # Safety
    /// For as long as the pass is used, each segment's cache is memory of `T` of the stated shape, with at
    /// least `length + rows` of `capacity` positions, and the caches do not overlap.
    ///
    /// # Panics
    /// If a head's size is not a multiple of [`LANES`], or a segment's rows exceed its capacity.
    pub unsafe fn new(heads: Heads, segments: Vec<Segment>, threads: usize) -> Self {
        assert!(
            heads.size > 0 && heads.size.is_multiple_of(LANES),
            "the head size is no multiple of {LANES}"
        );
        assert!(
            segments.iter().all(|segment| segment.length + segment.rows <= segment.capacity),
            "a segment is longer than its cache"
        );
        let parts = segments
            .iter()
            .map(|segment| {
                let divided = threads > heads.keys;
                (0..heads.keys).map(|_| Parts::new(segment, divided)).collect()
            })
            .collect();
        Pass { heads, segments, parts, element: PhantomData }
    }

    /// Key positions times queries, over all tasks: a measure of a layer's work.
    pub fn work(&self) -> usize {
        let read = |segment: &Segment| (segment.length + segment.rows) * segment.rows;
        self.segments.iter().map(read).sum::<usize>() * self.heads.keys * self.heads.groups
    }

    /// Writes the new keys and values of a layer behind the cached ones, and attends.
    ///
    /// # Safety
    /// `layer.input` and `layer.output` are memory of `T` for every row of the segments, disjoint from each
    /// other and from the caches, and nobody else uses any of it meanwhile; the caches have the layer
    /// `layer.index`; layers are called one after the other.
    pub unsafe fn layer(&self, layer: &Layer, workers: &impl Workers) {
        let mut tasks = Vec::new();
        for (segment, parts) in self.segments.iter().zip(&self.parts) {
            for (head, parts) in parts.iter().enumerate() {
                parts.begin();
                let seen = parts.seen(layer.reach, segment);
                tasks.extend(seen.map(|index| (segment, head, parts, index)));
            }
        }
        workers.run(tasks.len(), &|task| {
            let (segment, head, parts, index) = tasks[task];
            // SAFETY: the callers of `new` and of this vouch for the memory; a task writes to its own part of
            // its own head of its own segment's cache, and the head's last one to the head's output.
            unsafe { parts.attend::<T>(self.heads, segment, layer, head, index) };
        });
    }
}

#[cfg(test)]
mod tests;
