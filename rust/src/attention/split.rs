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
use super::{Heads, Layer, Segment};

/// Keys of a part: so many that what is kept of each query between parts is small beside them.
pub(super) const PART: usize = 512;

/// Some of the keys of one head.
pub(super) struct Part {
    /// The key head.
    pub head: usize,
    /// Positions.
    pub keys: Range<usize>,
}

/// What one part leaves.
#[derive(Debug)]
struct Kept {
    /// `[queries, size]`.
    sums: Vec<f32>,
    states: Vec<Softmax>,
}

/// The parts of one key head of one segment.
#[derive(Debug)]
pub(super) struct Parts {
    kept: Vec<UnsafeCell<Kept>>,
    ended: AtomicUsize,
}

// SAFETY: each part has its own cell, and whoever finds that all others have ended reads them all.
unsafe impl Sync for Parts {}

impl Parts {
    /// Room for the parts of a segment.
    pub(super) fn new(heads: Heads, segment: &Segment) -> Self {
        let queries = segment.rows * heads.groups;
        let kept = || Kept { sums: vec![0.0; queries * heads.size], states: vec![Softmax::EMPTY; queries] };
        let count = (segment.length + segment.rows).div_ceil(PART);
        Parts { kept: (0..count).map(|_| UnsafeCell::new(kept())).collect(), ended: AtomicUsize::new(0) }
    }

    /// Attends to part `index` of those in `range`, and merges them if it is the last to end.
    ///
    /// # Safety
    /// As [`super::Pass::layer`] says; each part of the range is attended to once in a layer.
    pub(super) unsafe fn attend<T: Element>(
        &self,
        heads: Heads,
        segment: &Segment,
        layer: &Layer,
        head: usize,
        index: usize,
        range: Range<usize>,
    ) {
        let keys = index * PART..((index + 1) * PART).min(segment.length + segment.rows);
        // SAFETY: no other task has this part, and none merges before it has ended.
        let Kept { sums, states } = unsafe { &mut *self.kept[index].get() };
        sums.fill(0.0);
        states.fill(Softmax::EMPTY);
        // SAFETY: as the caller vouches.
        unsafe { attend::<T>(heads, segment, layer, &Part { head, keys }, sums, states) };
        if self.ended.fetch_add(1, Ordering::AcqRel) + 1 < range.len() {
            return;
        }
        self.ended.store(0, Ordering::Relaxed);
        // SAFETY: all parts have ended.
        let Kept { sums, states } = unsafe { &mut *self.kept[range.start].get() };
        for later in &self.kept[range.start + 1..range.end] {
            // SAFETY: as above, and it is another cell.
            merge(heads.size, sums, states, unsafe { &*later.get() });
        }
        // SAFETY: as the caller vouches.
        unsafe { finish::<T>(heads, segment, layer, head, sums, states) };
    }
}

fn merge(size: usize, sums: &mut [f32], states: &mut [Softmax], later: &Kept) {
    let rows = sums.chunks_exact_mut(size).zip(later.sums.chunks_exact(size));
    for ((state, &other), (sums, theirs)) in states.iter_mut().zip(&later.states).zip(rows) {
        let (own, others) = state.merge(other);
        for (sum, &their) in sums.iter_mut().zip(theirs) {
            *sum = sum.mul_add(own, their * others);
        }
    }
}
