//! Some columns of a product: blocks of rows against tiles of columns.

use std::ops::Range;

use super::Stored;
use super::stored::{LANES, STEP, Widen};
use crate::lanes::Portable;
#[cfg(target_arch = "x86_64")]
use crate::lanes::x86::Avx2;
use crate::rows::Matrix;

/// The most rows whose sums the registers hold.
pub(super) const ROWS: usize = 6;

/// Steps over which the rows of a block stay in the first-level cache: 24 KB at six rows.
const STEPS: usize = 64;

/// The output, of which every task writes its own columns.
pub(super) struct Out<T>(pub *mut T);

// SAFETY: tasks write to different numbers, and nobody reads them before all have ended.
unsafe impl<T: Send> Sync for Out<T> {}

pub(super) struct Job<'a, T> {
    pub weights: Matrix<'a, T>,
    /// `[steps, rows]` of each block, one after the other.
    pub x: &'a [[f32; STEP]],
    /// The rows of each block.
    pub blocks: Vec<Range<usize>>,
    pub steps: usize,
    pub start: Option<&'a [T]>,
    pub out: Out<T>,
}

impl<T: Stored> Job<'_, T> {
    /// Some columns of all rows.
    ///
    /// # Safety
    /// `out` is `[rows, cols]`, and nobody else uses these columns meanwhile.
    pub unsafe fn columns(&self, columns: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            // SAFETY: the processor has the instructions; the rest is what the caller guarantees.
            return unsafe { self.columns_256(columns) };
        }
        // SAFETY: as the caller guarantees.
        unsafe { self.columns_with::<Portable<LANES>>(columns) }
    }

    /// # Safety
    /// As for `columns`, and the processor has these instructions.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn columns_256(&self, columns: Range<usize>) {
        // SAFETY: as the caller guarantees.
        unsafe { self.columns_with::<Avx2>(columns) }
    }

    /// # Safety
    /// As for `columns`, and the processor has the instructions of `V`.
    #[inline(always)]
    pub unsafe fn columns_with<V: Widen>(&self, columns: Range<usize>) {
        let mut sums = vec![[0.0; LANES]; columns.len() * ROWS];
        for rows in self.blocks.iter().cloned() {
            let sums = &mut sums[..columns.len() * rows.len()];
            sums.fill([0.0; LANES]);
            // SAFETY: as the caller guarantees.
            unsafe {
                match rows.len() {
                    6 => self.block::<V, 6>(rows.start, columns.clone(), sums),
                    5 => self.block::<V, 5>(rows.start, columns.clone(), sums),
                    4 => self.block::<V, 4>(rows.start, columns.clone(), sums),
                    3 => self.block::<V, 3>(rows.start, columns.clone(), sums),
                    2 => self.block::<V, 2>(rows.start, columns.clone(), sums),
                    _ => self.block::<V, 1>(rows.start, columns.clone(), sums),
                }
                self.finish(rows, columns.clone(), sums);
            }
        }
    }

    /// Adds the products of R rows to their sums `[columns, R]`.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn block<V: Widen, const R: usize>(
        &self,
        row: usize,
        columns: Range<usize>,
        sums: &mut [[f32; LANES]],
    ) {
        let (sums, _) = sums.as_chunks_mut::<R>();
        let (x, _) = self.x[row * self.steps..(row + R) * self.steps].as_chunks::<R>();
        let pieces = self.steps.div_ceil(STEPS);
        for piece in 0..pieces {
            let steps = piece * self.steps / pieces..(piece + 1) * self.steps / pieces;
            let mut done = 0;
            while done < columns.len() {
                let (col, sums) = (columns.start + done, &mut sums[done..]);
                // SAFETY: as the caller guarantees.
                done += unsafe {
                    if R <= 2 && sums.len() >= 4 {
                        self.tile::<V, R, 4>(x, col, steps.clone(), sums)
                    } else if sums.len() >= 2 {
                        self.tile::<V, R, 2>(x, col, steps.clone(), sums)
                    } else {
                        self.tile::<V, R, 1>(x, col, steps.clone(), sums)
                    }
                };
            }
        }
    }

    /// Some steps of R rows and C columns, whose sums are held in registers; returns C.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn tile<V: Widen, const R: usize, const C: usize>(
        &self,
        x: &[[[f32; STEP]; R]],
        col: usize,
        steps: Range<usize>,
        sums: &mut [[[f32; LANES]; R]],
    ) -> usize {
        let weights: [(&[[T; STEP]], &[T]); C] =
            std::array::from_fn(|c| self.weights.row(col + c).as_chunks::<STEP>());
        let whole = steps.end.min(weights[0].0.len());
        let ahead = C * self.weights.cols();
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let mut held = [[V::zero(); C]; R];
            for r in 0..R {
                for c in 0..C {
                    held[r][c] = V::load(&sums[c][r]);
                }
            }
            let runs: [&[[T; STEP]]; C] = std::array::from_fn(|c| &weights[c].0[steps.start..whole]);
            for (k, x) in x[steps.start..whole].iter().enumerate() {
                let run: [&[T; STEP]; C] = std::array::from_fn(|c| &runs[c][k]);
                // The same steps of later columns: pieces of columns are no stream that a processor foresees.
                for one in run {
                    prefetch(one.as_ptr().wrapping_add(ahead).cast());
                }
                // Half by half: there are registers for one half of the weights.
                add::<T, V, R, C, 0>(run, x, &mut held);
                add::<T, V, R, C, 1>(run, x, &mut held);
            }
            if whole < steps.end {
                let last: [[T; STEP]; C] = std::array::from_fn(|c| {
                    std::array::from_fn(|i| weights[c].1.get(i).copied().unwrap_or(T::narrow(0.0)))
                });
                add::<T, V, R, C, 0>(last.each_ref(), &x[whole], &mut held);
                add::<T, V, R, C, 1>(last.each_ref(), &x[whole], &mut held);
            }
            for r in 0..R {
                for c in 0..C {
                    held[r][c].store(&mut sums[c][r]);
                }
            }
        }
        C
    }

    /// Writes these rows and columns from their sums `[columns, rows]`.
    ///
    /// # Safety
    /// As for `columns`.
    #[inline(always)]
    unsafe fn finish(&self, rows: Range<usize>, columns: Range<usize>, sums: &[[f32; LANES]]) {
        let cols = self.weights.rows();
        for (sums, col) in sums.chunks_exact(rows.len()).zip(columns) {
            for (sum, row) in sums.iter().zip(rows.clone()) {
                let at = row * cols + col;
                let start = self.start.map_or(0.0, |start| start[at].widen());
                // SAFETY: one number of this task's columns.
                unsafe { *self.out.0.add(at) = T::narrow(total(sum) + start) };
            }
        }
    }
}

/// Adds the products of one half of a step.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn add<T: Stored, V: Widen, const R: usize, const C: usize, const HALF: usize>(
    weights: [&[T; STEP]; C],
    x: &[[f32; STEP]; R],
    sums: &mut [[V; C]; R],
) {
    // SAFETY: as the caller guarantees.
    unsafe {
        let run: [V; C] = std::array::from_fn(|c| T::load(weights[c], HALF));
        for r in 0..R {
            let (halves, _) = x[r].as_chunks::<LANES>();
            let x = V::load(&halves[HALF]);
            for c in 0..C {
                sums[r][c] = run[c].times_plus(x, sums[r][c]);
            }
        }
    }
}

/// Asks for a cache line; any address will do.
#[inline(always)]
fn prefetch(address: *const i8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has the instruction, and it reads nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[inline(always)]
fn total(lanes: &[f32; LANES]) -> f32 {
    let half: [f32; LANES / 2] = std::array::from_fn(|l| lanes[l] + lanes[l + LANES / 2]);
    (half[0] + half[2]) + (half[1] + half[3])
}
