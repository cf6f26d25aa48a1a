//! Products of a few vectors with matrices of a draft's heads, read in place in their own precision.
//!
//! Vectors are multiplied one at a time, so a product is as fast as its matrix can be read: the matrices here
//! (W2 above all, vocabulary x rank) are read once per drafted token. Sums run in a fixed number of lanes and
//! without fused operations, so a product is the same to the last bit on every machine, on one thread or on
//! several.

use half::{bf16, f16};
use multiversion::multiversion;
use rayon::prelude::*;

use crate::number::Number;
use crate::rows::{Matrix, Row, Rows};
use crate::threads;

/// Running sums kept side by side: one 512-bit register of f32.
const LANES: usize = 16;

/// Products of fewer elements stay on their thread. On two threads, a matrix that fits the caches (SmolLM2's
/// W2, 3 million elements) was read only a tenth faster, at the price of waking a thread; one of 39 million
/// elements was read 1.5 times as fast.
const PARALLEL: usize = 1 << 23;

/// The precision of a chain: f64 if anything it reads is f64, else f32.
pub(crate) trait Compute: Copy + Default + Send + Sync + 'static {
    /// Rounds to this precision.
    fn narrow(x: f64) -> Self;
    /// Exact.
    fn widen(self) -> f64;
    /// Appends a row.
    fn extend(row: Row<'_>, out: &mut Vec<Self>);
    /// `out[i] += weights[i] . x` for every row of `weights`, whose rows are as long as `x`.
    fn add_products(weights: Rows<'_>, x: &[Self], out: &mut [Self]);
    /// `out[j] += weights[ids[j]] . x`.
    fn add_products_at(weights: Rows<'_>, ids: &[u32], x: &[Self], out: &mut [Self]);
    /// `row . x`.
    fn dot(row: Row<'_>, x: &[Self]) -> Self;
}

/// Evaluates `$body` with `$m` bound to what a [`Row`] or [`Rows`] holds.
macro_rules! each {
    ($kind:ident, $value:expr, $m:ident => $body:expr) => {
        match $value {
            $kind::F64($m) => $body,
            $kind::F32($m) => $body,
            $kind::F16($m) => $body,
            $kind::Bf16($m) => $body,
        }
    };
}

macro_rules! compute {
    ($real:ty) => {
        impl Compute for $real {
            fn narrow(x: f64) -> Self {
                x as $real
            }
            fn widen(self) -> f64 {
                f64::from(self)
            }
            fn extend(row: Row<'_>, out: &mut Vec<Self>) {
                each!(Row, row, m => Element::<$real>::widen_all(m, out))
            }
            fn add_products(weights: Rows<'_>, x: &[Self], out: &mut [Self]) {
                each!(Rows, weights, m => add_products(m, x, out))
            }
            fn add_products_at(weights: Rows<'_>, ids: &[u32], x: &[Self], out: &mut [Self]) {
                each!(Rows, weights, m => {
                    for (out, &id) in out.iter_mut().zip(ids) {
                        *out += Element::<$real>::times(m.row(id as usize), x);
                    }
                })
            }
            fn dot(row: Row<'_>, x: &[Self]) -> Self {
                each!(Row, row, m => Element::<$real>::times(m, x))
            }
        }
    };
}
compute!(f32);
compute!(f64);

fn add_products<E: Element<R>, R: Compute>(weights: Matrix<'_, E>, x: &[R], out: &mut [R]) {
    if weights.rows() * x.len() < PARALLEL || !threads::are_ours() {
        return E::add_rows(weights, x, out);
    }
    let rows = PARALLEL.div_ceil(4 * x.len());
    out.par_chunks_mut(rows).enumerate().for_each(|(i, out)| {
        let start = i * rows;
        E::add_rows(weights.slice(start..start + out.len()), x, out);
    });
}

/// A stored number, and the loops over it that are compiled for each instruction set.
trait Element<R>: Copy + Send + Sync {
    fn widen_all(row: &[Self], out: &mut Vec<R>);
    fn add_rows(weights: Matrix<'_, Self>, x: &[R], out: &mut [R]);
    fn times(row: &[Self], x: &[R]) -> R;
}

/// Sum of products in [`LANES`] lanes, added up in pairs.
macro_rules! lanes {
    ($row:expr, $x:expr, $real:ty, $widen:expr) => {{
        let (row, x) = ($row, $x);
        let mut sums = [0.0 as $real; LANES];
        let (row_groups, row_rest) = row.as_chunks::<LANES>();
        let (x_groups, x_rest) = x.as_chunks::<LANES>();
        for (row, x) in row_groups.iter().zip(x_groups) {
            for j in 0..LANES {
                sums[j] += $widen(row[j]) * x[j];
            }
        }
        for ((sum, &w), &x) in sums.iter_mut().zip(row_rest).zip(x_rest) {
            *sum += $widen(w) * x;
        }
        let mut width = LANES / 2;
        while width > 0 {
            for j in 0..width {
                sums[j] += sums[j + width];
            }
            width /= 2;
        }
        sums[0]
    }};
}

macro_rules! element {
    ($name:ident, $stored:ty, $real:ty, $widen:expr) => {
        mod $name {
            use super::*;

            #[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl", "x86_64+avx2"))]
            fn widen_all(row: &[$stored], out: &mut Vec<$real>) {
                out.extend(row.iter().map(|&w| $widen(w)));
            }

            #[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl", "x86_64+avx2"))]
            fn add_rows(weights: Matrix<'_, $stored>, x: &[$real], out: &mut [$real]) {
                for (i, out) in out.iter_mut().enumerate() {
                    *out += lanes!(weights.row(i), x, $real, $widen);
                }
            }

            #[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl", "x86_64+avx2"))]
            fn times(row: &[$stored], x: &[$real]) -> $real {
                lanes!(row, x, $real, $widen)
            }

            impl Element<$real> for $stored {
                fn widen_all(row: &[Self], out: &mut Vec<$real>) {
                    widen_all(row, out);
                }
                fn add_rows(weights: Matrix<'_, Self>, x: &[$real], out: &mut [$real]) {
                    add_rows(weights, x, out);
                }
                fn times(row: &[Self], x: &[$real]) -> $real {
                    times(row, x)
                }
            }
        }
    };
}
element!(f32_as_f32, f32, f32, (|w: f32| w));
element!(bf16_as_f32, bf16, f32, Number::widen);
element!(f16_as_f32, f16, f32, Number::widen);
element!(f64_as_f32, f64, f32, (|w: f64| w as f32));
element!(f32_as_f64, f32, f64, f64::from);
element!(bf16_as_f64, bf16, f64, (|w: bf16| f64::from(w.widen())));
element!(f16_as_f64, f16, f64, (|w: f16| f64::from(w.widen())));
element!(f64_as_f64, f64, f64, (|w: f64| w));

#[cfg(test)]
#[path = "linear_tests.rs"]
mod tests;
