//! Long contexts: the keys of a request in parts, each a task of its own.
//!
//! Without parts, a request's attention would use no more threads than there are key heads; where heads suffice,
//! parts only cost (a tenth to a quarter, at eight heads and two threads). They have fixed borders, so a row's
//! result does not depend on the other requests, or on who computes what. Whoever ends the last part of a head
//! merges all of them, in order.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::kernel::{Element, attend, finish};
use super::softmax::Softmax;
use super::{Heads, Layer, Reach, Segment};

/// Keys of a part of a long context: so many that what is kept of each query is small beside them.
pub(super) const PART: usize = 512;

/// Some keys of one head of one segment in one layer.
pub(super) struct Part<'a> {
    pub heads: Heads,
    pub segment: &'a Segment,
    pub layer: &'a Layer,
    /// The key head.
    pub head: usize,
    /// Positions.
    pub keys: Range<usize>,
}

/// What some keys leave of the queries.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// `[queries, size]`.
    pub sums: Vec<f32>,
    pub states: Vec<Softmax>,
}

impl Kept {
    fn new(queries: usize, size: usize) -> Self {
        Kept { sums: vec![0.0; queries * size], states: vec![Softmax::EMPTY; queries] }
    }

    fn merge(&mut self, later: &Kept, size: usize) {
        let rows = self.sums.chunks_exact_mut(size).zip(later.sums.chunks_exact(size));
        for ((state, &other), (sums, theirs)) in self.states.iter_mut().zip(&later.states).zip(rows) {
            let (own, others) = state.merge(other);
            for (sum, &their) in sums.iter_mut().zip(theirs) {
                *sum = sum.mul_add(own, their * others);
            }
        }
    }
}

/// The parts of one key head of one segment; only one where contexts are not divided.
#[derive(Debug)]
pub(super) struct Parts {
    /// Keys of a part.
    size: usize,
    kept: Vec<UnsafeCell<Kept>>,
    ended: AtomicUsize,
}

// SAFETY: each part has its own cell, and whoever finds that all others have ended reads them all.
unsafe impl Sync for Parts {}

impl Parts {
    /// The parts of a segment.
    pub(super) fn new(segment: &Segment, divided: bool) -> Self {
        let total = segment.length + segment.rows;
        let size = if divided { PART } else { total.max(1) };
        let kept = (0..total.div_ceil(size)).map(|_| UnsafeCell::default()).collect();
        Parts { size, kept, ended: AtomicUsize::new(0) }
    }

    /// Begins a layer, also after one that a panic ended halfway.
    pub(super) fn begin(&self) {
        self.ended.store(0, Ordering::Relaxed);
    }

    /// The parts that any of the rows sees.
    pub(super) fn seen(&self, reach: Reach, segment: &Segment) -> Range<usize> {
        let seen = reach.of_all(segment.rows, segment.length);
        seen.start / self.size..seen.end.div_ceil(self.size)
    }

    /// Attends to part `index` of those that are seen, and merges them if it is the last to end.
    ///
    /// # Safety
    /// As [`super::Pass::layer`] says; each part that is seen is attended to once in a layer.
    pub(super) unsafe fn attend<T: Element>(
        &self,
        heads: Heads,
        segment: &Segment,
        layer: &Layer,
        head: usize,
        index: usize,
    ) {
        let keys = index * self.size..((index + 1) * self.size).min(segment.length + segment.rows);
        let part = Part { heads, segment, layer, head, keys };
        let mut kept = Kept::new(segment.rows * heads.groups, heads.size);
        // SAFETY: as the caller vouches; no other task has this part, and none merges before it has ended.
        unsafe {
            attend::<T>(&part, &mut kept);
            *self.kept[index].get() = kept;
        }
        let seen = self.seen(layer.reach, segment);
        if self.ended.fetch_add(1, Ordering::AcqRel) + 1 < seen.len() {
            return;
        }
        // SAFETY: all parts have ended.
        let mut parts = self.kept[seen].iter().map(|kept| unsafe { std::mem::take(&mut *kept.get()) });
        let mut all = parts.next().unwrap_or_default();
        parts.for_each(|later| all.merge(&later, heads.size));
        // SAFETY: as the caller vouches.
        unsafe { finish::<T>(&part, &all) };
    }
}
