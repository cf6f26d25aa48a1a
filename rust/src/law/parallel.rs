//! Spreads the work on a long row over several threads.
//!
//! A row is cut at fixed places and its parts are joined in order, so results do not depend on the number of
//! threads. Work is shared only within rayon's pool: from outside, handing over a single row costs more than
//! it saves (see `accept`, which enters the pool once for a whole block).

use std::ops::Range;

use super::cdf::BLOCK;
use super::real::{Real, Scan};

/// Number of blocks up to which a range stays on one thread.
const GRAIN: usize = 40;

/// Rows from this length on are worth sharing.
pub(crate) const LONG: usize = 2 * GRAIN * BLOCK;

/// Runs `part` on pieces of a range of blocks, and `join` on the results of neighbours.
pub(super) fn fold<T: Send>(
    blocks: Range<usize>,
    part: &(impl Fn(Range<usize>) -> T + Sync),
    join: &(impl Fn(T, T) -> T + Sync),
) -> T {
    if blocks.len() <= GRAIN || rayon::current_thread_index().is_none() {
        return part(blocks);
    }
    let middle = blocks.start + blocks.len() / 2;
    let (left, right) =
        rayon::join(|| fold(blocks.start..middle, part, join), || fold(middle..blocks.end, part, join));
    join(left, right)
}

/// Fills `out`, one entry per block from block `first` on, by calls of `value` on ranges of blocks.
pub(super) fn fill(out: &mut [f64], first: usize, value: &(impl Fn(Range<usize>, &mut [f64]) + Sync)) {
    if out.len() <= GRAIN || rayon::current_thread_index().is_none() {
        return value(first..first + out.len(), out);
    }
    let middle = out.len() / 2;
    let (left, right) = out.split_at_mut(middle);
    rayon::join(|| fill(left, first, value), || fill(right, first + middle, value));
}

/// The largest element of a row, and whether there is a NaN.
pub(super) fn scan<F: Real>(row: &[F]) -> Scan<F> {
    let blocks = 0..row.len().div_ceil(BLOCK);
    let part = |blocks: Range<usize>| F::scan(&row[blocks.start * BLOCK..row.len().min(blocks.end * BLOCK)]);
    let join = |a: Scan<F>, b: Scan<F>| Scan {
        max: if b.max > a.max { b.max } else { a.max },
        has_nan: a.has_nan | b.has_nan,
    };
    fold(blocks, &part, &join)
}
