//! The arithmetic of a tile: keys into scores, weighted values into sums.

use super::LANES;
use crate::lanes::Lanes;

/// Keys that are scored before their values are added up: few enough that both stay in the first-level cache.
pub(super) const TILE: usize = 64;

/// Products of a query with the keys of a tile.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn score<V: Lanes<LANES>>(query: &[f32], keys: &[f32], out: &mut [f32; TILE]) {
    let (query, _) = query.as_chunks::<LANES>();
    let (keys, _) = keys.as_chunks::<LANES>();
    let width = query.len();
    let count = keys.len() / width;
    let mut k = 0;
    while k + 4 <= count {
        // SAFETY: as the caller vouches.
        unsafe { products::<V, 4>(query, &keys[k * width..(k + 4) * width], &mut out[k..k + 4]) };
        k += 4;
    }
    while k < count {
        // SAFETY: as the caller vouches.
        unsafe { products::<V, 1>(query, &keys[k * width..(k + 1) * width], &mut out[k..k + 1]) };
        k += 1;
    }
}

/// Products of a query with N keys: each the sum over sixteen lanes, in a fixed order.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn products<V: Lanes<LANES>, const N: usize>(
    query: &[[f32; LANES]],
    keys: &[[f32; LANES]],
    out: &mut [f32],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [V::zero(); N];
        for c in 0..query.len() {
            let numbers = V::load(&query[c]);
            for k in 0..N {
                sums[k] = numbers.times_plus(V::load(&keys[k * query.len() + c]), sums[k]);
            }
        }
        for k in 0..N {
            let mut lanes = [0.0; LANES];
            sums[k].store(&mut lanes);
            out[k] = total(&lanes);
        }
    }
}

#[inline(always)]
fn total(lanes: &[f32; LANES]) -> f32 {
    let mut half = [0.0f32; LANES / 2];
    for l in 0..LANES / 2 {
        half[l] = lanes[l] + lanes[l + LANES / 2];
    }
    let mut quarter = [0.0f32; LANES / 4];
    for l in 0..LANES / 4 {
        quarter[l] = half[l] + half[l + LANES / 4];
    }
    (quarter[0] + quarter[2]) + (quarter[1] + quarter[3])
}

/// Adds the weighted values of a tile to the sums of R queries.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn add_values<V: Lanes<LANES>, const R: usize>(
    weights: &[[f32; TILE]],
    values: &[f32],
    size: usize,
    sums: &mut [f32],
) {
    let width = size / LANES;
    let (values, _) = values.as_chunks::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let mut column = 0;
    while column < width {
        // SAFETY: as the caller vouches.
        unsafe {
            if column + 2 <= width {
                add_columns::<V, R, 2>(weights, values, width, column, sums);
                column += 2;
            } else {
                add_columns::<V, R, 1>(weights, values, width, column, sums);
                column += 1;
            }
        }
    }
}

/// The same for C columns of sixteen numbers, whose sums are held in registers.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn add_columns<V: Lanes<LANES>, const R: usize, const C: usize>(
    weights: &[[f32; TILE]],
    values: &[[f32; LANES]],
    width: usize,
    column: usize,
    sums: &mut [[f32; LANES]],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut held = [[V::zero(); C]; R];
        for r in 0..R {
            for c in 0..C {
                held[r][c] = V::load(&sums[r * width + column + c]);
            }
        }
        for (k, value) in values.chunks_exact(width).enumerate() {
            for r in 0..R {
                let weight = V::splat(weights[r][k]);
                for c in 0..C {
                    held[r][c] = weight.times_plus(V::load(&value[column + c]), held[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                held[r][c].store(&mut sums[r * width + column + c]);
            }
        }
    }
}
