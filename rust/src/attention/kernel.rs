//! One request's rows against a piece of the keys of one head.
//!
//! Every query is summed in the same order whatever other rows the pass has, so a row's result is the same to
//! the last bit however many rows a pass verifies.

use half::bf16;

use super::softmax::Softmax;
use super::split::{Kept, Part};
use super::tile::{TILE, add_values, score};
use super::{Heads, LANES, Segment};
#[cfg(target_arch = "x86_64")]
use crate::lanes::Two;
#[cfg(target_arch = "x86_64")]
use crate::lanes::x86::{Avx2, Avx512};
use crate::lanes::{Lanes, Portable};
use crate::number::Number;

/// Number of queries that share one read of a tile's values.
const BLOCK: usize = 4;

/// The type of the numbers in which keys, values and heads are stored.
pub trait Element: Number {
    /// A run of stored numbers as `f32`: the run itself, or a copy in `space`.
    #[doc(hidden)]
    fn view<'a>(run: &'a [Self], space: &'a mut [f32]) -> &'a [f32];
}

impl Element for f32 {
    #[inline(always)]
    fn view<'a>(run: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        run
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn view<'a>(run: &'a [bf16], space: &'a mut [f32]) -> &'a [f32] {
        let space = &mut space[..run.len()];
        for i in 0..run.len() {
            space[i] = run[i].widen();
        }
        space
    }
}

/// One task: all queries of one key head of one segment, over the keys of `part`. Stores the new keys and
/// values among these, and adds to `kept`.
///
/// # Safety
/// As [`super::Pass::layer`] says.
pub(super) unsafe fn attend<T: Element>(part: &Part<'_>, kept: &mut Kept) {
    #[cfg(target_arch = "x86_64")]
    {
        let has_512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        if has_512 {
            // SAFETY: the processor has the instructions; the rest is what the caller vouches for.
            return unsafe { attend_512::<T>(part, kept) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has the instructions; the rest is what the caller vouches for.
            return unsafe { attend_256::<T>(part, kept) };
        }
    }
    // SAFETY: as the caller vouches.
    unsafe { attend_with::<T, Portable<LANES>>(part, &mut kept.sums, &mut kept.states) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn attend_512<T: Element>(part: &Part<'_>, kept: &mut Kept) {
    // SAFETY: as the caller vouches.
    unsafe { attend_with::<T, Avx512>(part, &mut kept.sums, &mut kept.states) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_256<T: Element>(part: &Part<'_>, kept: &mut Kept) {
    // SAFETY: as the caller vouches.
    unsafe { attend_with::<T, Two<Avx2>>(part, &mut kept.sums, &mut kept.states) }
}

/// `sums` and `states` are those of what is kept: as slices of their own the compiler knows them apart from
/// everything else (a quarter faster at 24 queries).
///
/// # Safety
/// As [`super::Pass::layer`] says, and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_with<T: Element, V: Lanes<LANES>>(
    part: &Part<'_>,
    sums: &mut [f32],
    states: &mut [Softmax],
) {
    let &Part { heads, segment, layer, head, ref keys } = part;
    let Heads { keys: key_heads, groups, size } = heads;
    let &Segment { length, rows, capacity, first, .. } = segment;
    let positions = keys.clone();
    let query_heads = key_heads * groups;
    let row = |i: usize, head: usize| {
        let offset = (first + i) * layer.row_stride + head * size;
        // SAFETY: a head of a row of the input.
        unsafe { std::slice::from_raw_parts((layer.input as *const T).add(offset), size) }
    };
    // Of the cache, a task touches its part alone: other tasks have the others.
    let stored = |head: usize| {
        let offset = ((layer.index * 2 * key_heads + head) * capacity + positions.start) * size;
        // SAFETY: these positions of a head of this layer are filled or about to be, and belong to this task.
        unsafe {
            std::slice::from_raw_parts_mut((segment.cache as *mut T).add(offset), positions.len() * size)
        }
    };
    let (keys, values) = (stored(head), stored(key_heads + head));
    for position in positions.start.max(length)..positions.end {
        let (i, at) = (position - length, position - positions.start);
        keys[at * size..(at + 1) * size].copy_from_slice(row(i, query_heads + head));
        values[at * size..(at + 1) * size].copy_from_slice(row(i, query_heads + key_heads + head));
    }

    let count = rows * groups;
    let mut space = vec![0.0f32; count * size + TILE * size + count * TILE];
    let (queries, rest) = space.split_at_mut(count * size);
    let (widened, weights) = rest.split_at_mut(TILE * size);
    let (weights, _) = weights.as_chunks_mut::<TILE>();
    for i in 0..rows {
        for g in 0..groups {
            let query = row(i, head * groups + g);
            for j in 0..size {
                queries[(i * groups + g) * size + j] = query[j].widen();
            }
        }
    }

    let seen = layer.reach.of_all(rows, length);
    // Tiles begin at multiples of their size, not at the window of the pass's first row: a row is the same to
    // the last bit whatever rows are before it.
    let (mut start, end) = ((seen.start / TILE * TILE).max(positions.start), seen.end.min(positions.end));
    while start < end {
        let stop = end.min(start + TILE);
        let at = (start - positions.start) * size..(stop - positions.start) * size;
        let tile = T::view(&keys[at.clone()], widened);
        for q in 0..count {
            let (from, to) = layer.reach.of(q / groups, rows, length);
            let to = to.min(stop);
            // SAFETY: as the caller vouches.
            unsafe { score::<V>(&queries[q * size..(q + 1) * size], tile, &mut weights[q]) };
            if from > start || to < start + TILE {
                for (k, weight) in weights[q].iter_mut().enumerate() {
                    if start + k < from || start + k >= to {
                        *weight = f32::NEG_INFINITY;
                    }
                }
            }
            let scale = states[q].absorb(&mut weights[q]);
            if scale != 1.0 {
                for j in 0..size {
                    sums[q * size + j] *= scale;
                }
            }
        }
        let tile = T::view(&values[at], widened);
        let mut q = 0;
        while q < count {
            let (sums, weights) = (&mut sums[q * size..], &weights[q..]);
            // SAFETY: as the caller vouches.
            unsafe {
                match (count - q).min(BLOCK) {
                    4 => add_values::<V, 4>(weights, tile, size, sums),
                    3 => add_values::<V, 3>(weights, tile, size, sums),
                    2 => add_values::<V, 2>(weights, tile, size, sums),
                    _ => add_values::<V, 1>(weights, tile, size, sums),
                }
            }
            q += BLOCK;
        }
        start = stop;
    }
}

/// Writes the output of all queries of the part's head, of which `kept` has all parts.
///
/// # Safety
/// As [`super::Pass::layer`] says.
pub(super) unsafe fn finish<T: Element>(part: &Part<'_>, kept: &Kept) {
    let &Part { heads: Heads { keys: key_heads, groups, size }, segment, layer, head, .. } = part;
    for (q, (sums, state)) in kept.sums.chunks_exact(size).zip(&kept.states).enumerate() {
        let (i, g) = (q / groups, q % groups);
        let offset = ((segment.first + i) * key_heads * groups + head * groups + g) * size;
        // SAFETY: one head of one row of the output, which belongs to this task.
        let out = unsafe { std::slice::from_raw_parts_mut((layer.output as *mut T).add(offset), size) };
        let factor = state.inverse_sum();
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::narrow(sum * factor);
        }
    }
}
