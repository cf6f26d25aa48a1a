use half::{bf16, f16};
use proptest::prelude::*;

use super::stored::LANES;
use super::*;
use crate::lanes::Portable;
use crate::workers::Alone;

fn numbers<T: Stored>(count: usize, seed: u32) -> Vec<T> {
    (0..count as u32)
        .map(|i| {
            let x = i.wrapping_add(seed).wrapping_mul(2_654_435_761);
            T::narrow((x ^ (x >> 15)).wrapping_mul(2_246_822_519) as f32 / 2_147_483_648.0 - 1.0)
        })
        .collect()
}

fn run<T: Stored>(weights: Matrix<'_, T>, x: &[T], start: Option<&[T]>) -> Vec<T> {
    let mut out = vec![T::narrow(f32::NAN); x.len() / weights.cols() * weights.rows()];
    HalfProduct::new(weights).run(x, start, &mut out, &Alone);
    out
}

/// Rows `stride` numbers apart; what is between them is not a number.
fn strided<T: Stored>(rows: usize, cols: usize, stride: usize, seed: u32) -> Vec<T> {
    let mut data = vec![T::narrow(f32::NAN); rows * stride];
    for (i, row) in data.chunks_exact_mut(stride).enumerate() {
        row[..cols].copy_from_slice(&numbers(cols, seed.wrapping_add((i * cols) as u32)));
    }
    data
}

fn equals_the_definition<T: Stored>(inner: usize, cols: usize, rows: usize, gap: usize, seed: u32, ulp: f64) {
    let data = strided::<T>(cols, inner, inner + gap, seed);
    let weights = Matrix::strided(&data, cols, inner, inner + gap);
    let x: Vec<T> = numbers(rows * inner, !seed);
    let start: Vec<T> = numbers(rows * cols, seed ^ 0x5555);
    for start in [None, Some(&start[..])] {
        let out = run(weights, &x, start);
        for row in 0..rows {
            for col in 0..cols {
                let products = weights.row(col).iter().zip(&x[row * inner..]);
                let (mut exact, mut size) = (0.0, 0.0);
                for (w, x) in products {
                    let product = f64::from(w.widen()) * f64::from(x.widen());
                    (exact, size) = (exact + product, size + product.abs());
                }
                exact += start.map_or(0.0, |start| f64::from(start[row * cols + col].widen()));
                let found = f64::from(out[row * cols + col].widen());
                let allowed = exact.abs() * ulp + size * 1e-6 + 1e-6;
                assert!((found - exact).abs() <= allowed, "row {row}, column {col}: {found}, not {exact}");
            }
        }
    }
}

proptest! {
    #[test]
    fn equals_the_definition_in_both_types(
        inner in 1usize..90, cols in 1usize..40, rows in 1usize..20, gap in 0usize..3, seed in any::<u32>()
    ) {
        // Half of the last place of what is stored.
        equals_the_definition::<bf16>(inner, cols, rows, gap, seed, 1.0 / 256.0);
        equals_the_definition::<f16>(inner, cols, rows, gap, seed, 1.0 / 2048.0);
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it(rows in 1usize..20, inner in 1usize..2500, seed in any::<u32>()) {
        let (cols, data) = (9, numbers::<bf16>(9 * inner, seed));
        let weights = Matrix::contiguous(&data, inner);
        let x: Vec<bf16> = numbers(rows * inner, !seed);
        let together = run(weights, &x, None);
        for (x, out) in x.chunks_exact(inner).zip(together.chunks_exact(cols)) {
            prop_assert_eq!(&run(weights, x, None)[..], out);
        }
    }

    #[test]
    fn every_processor_gives_the_same_bits(rows in 1usize..8, inner in 1usize..1300, seed in any::<u32>()) {
        fn both<T: Stored + PartialEq + std::fmt::Debug>(rows: usize, inner: usize, seed: u32) {
            let (cols, data) = (7, numbers::<T>(7 * inner, seed));
            let x: Vec<T> = numbers(rows * inner, !seed);
            let weights = Matrix::contiguous(&data, inner);
            let product = HalfProduct::new(weights);
            let mut portable = vec![T::narrow(0.0); rows * cols];
            product.with_job(&x, None, &mut portable, |job| {
                // SAFETY: `Portable` needs no instructions of its own, and nobody else uses the columns.
                unsafe { job.columns_with::<Portable<LANES>>(0..cols) };
            });
            assert_eq!(run(weights, &x, None), portable);
        }
        both::<bf16>(rows, inner, seed);
        both::<f16>(rows, inner, seed);
    }
}

#[test]
fn many_columns_and_tasks() {
    equals_the_definition::<bf16>(300, 700, 13, 0, 3, 1.0 / 256.0);
    equals_the_definition::<bf16>(5000, 30, 7, 1, 4, 1.0 / 256.0);
}

#[test]
fn what_is_not_a_number_stays_so_and_in_its_row() {
    let data = vec![bf16::ONE; 3 * 20];
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = vec![bf16::ONE; 2 * 20];
        x[25] = bf16::from_f32(bad);
        let out = run(Matrix::contiguous(&data, 20), &x, None);
        assert!(out[..3].iter().all(|&sum| sum == bf16::from_f32(20.0)));
        assert!(out[3..].iter().all(|sum| !sum.is_finite()));
    }
}

#[test]
fn no_rows_are_no_work() {
    let data = numbers::<f16>(12, 1);
    assert!(run(Matrix::contiguous(&data, 4), &[], None).is_empty());
}
