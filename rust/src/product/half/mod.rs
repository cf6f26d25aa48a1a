//! Products of a few rows with a matrix in 16 bits, where the processor does not multiply such numbers.
//!
//! torch multiplies them in software there: six rows take several times as long as reading the weights
//! would (with AVX2, 576 x 1536: 0.65 ms instead of 0.12). Here the weights stay where they are, as `nn.Linear`
//! stores them; they are widened in registers, and multiplied and summed in f32.
//!
//! Each output is a sum over eight lanes in an order of the inner index that does not depend on the number of
//! rows: a row's result is the same to the last bit whatever rows are beside it, and on every processor.

mod job;
mod stored;

pub use stored::Stored;

use self::job::{Job, Out, ROWS};
use self::stored::STEP;
use crate::rows::Matrix;
use crate::workers::Workers;

/// About the number of weights in a task: few enough to stay in the second-level cache for the next block of
/// rows, and to make a task for every thread.
const TASK: usize = 1 << 15;

/// The least number of columns in a task: its first are read without having been asked for ahead.
const LEAST: usize = 8;

/// A product with weights `[cols, inner]`, row j of which holds the factors of output column j.
#[derive(Debug, Clone, Copy)]
pub struct HalfProduct<'a, T>(Matrix<'a, T>);

impl<'a, T: Stored> HalfProduct<'a, T> {
    /// A product with these weights.
    ///
    /// # Panics
    /// If there are none.
    pub fn new(weights: Matrix<'a, T>) -> Self {
        assert!(weights.rows() > 0 && weights.cols() > 0, "the weight is empty");
        HalfProduct(weights)
    }

    /// `out = start + x W^T`, rounded once, where `x` is `[rows, inner]` and `out` is `[rows, cols]`; `start`
    /// has the shape of `out` and counts as 0 if absent.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn run(&self, x: &[T], start: Option<&[T]>, out: &mut [T], workers: &impl Workers) {
        let (inner, cols) = (self.0.cols(), self.0.rows());
        let columns = (TASK / inner).max(LEAST).next_multiple_of(LEAST);
        self.with_job(x, start, out, |job| {
            workers.run(cols.div_ceil(columns), &|task| {
                let from = task * columns;
                // SAFETY: `out` has these columns, and no other task writes to them.
                unsafe { job.columns(from..cols.min(from + columns)) };
            });
        });
    }

    /// Prepares the rows for all columns.
    fn with_job(&self, x: &[T], start: Option<&[T]>, out: &mut [T], work: impl FnOnce(&Job<'_, T>)) {
        let (inner, cols) = (self.0.cols(), self.0.rows());
        let rows = x.len() / inner;
        assert_eq!((x.len(), out.len()), (rows * inner, rows * cols), "the shapes do not fit");
        assert!(start.is_none_or(|start| start.len() == out.len()), "the start has another shape");
        // Blocks of nearly the same size: eight rows as 4 + 4 rather than 6 + 2.
        let count = rows.div_ceil(ROWS);
        let blocks = (0..count).map(|block| block * rows / count..(block + 1) * rows / count);
        // Widened once, and the numbers of a step side by side; zeros fill the last one.
        let steps = inner.div_ceil(STEP);
        let mut wide = vec![[0.0f32; STEP]; rows * steps];
        for block in blocks.clone() {
            let part = &mut wide[block.start * steps..block.end * steps];
            for (r, x) in x[block.start * inner..block.end * inner].chunks_exact(inner).enumerate() {
                for (step, x) in x.chunks(STEP).enumerate() {
                    for (i, x) in x.iter().enumerate() {
                        part[step * block.len() + r][T::place(i)] = x.widen();
                    }
                }
            }
        }
        work(&Job {
            weights: self.0,
            x: &wide,
            blocks: blocks.collect(),
            steps,
            start,
            out: Out(out.as_mut_ptr()),
        });
    }
}

#[cfg(test)]
mod tests;
