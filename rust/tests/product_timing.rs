//! `cargo test --release --test product_timing -- --ignored --nocapture`
use std::time::Instant;

use dspark_core::product::{HalfProduct, SmallProduct};
use dspark_core::rows::Matrix;
use dspark_core::workers::Alone;
use half::bf16;

/// The least seconds that a call took.
fn best(calls: u32, mut call: impl FnMut()) -> f64 {
    (0..50).fold(f64::MAX, |best, _| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        best.min(start.elapsed().as_secs_f64() / f64::from(calls))
    })
}

#[test]
#[ignore = "prints times"]
fn small() {
    for (inner, cols) in [(96, 160), (96, 96), (96, 512), (256, 96)] {
        let weight = vec![0.5f32; inner * cols];
        let product = SmallProduct::pack(&weight, inner);
        for rows in [1, 2, 4, 5, 8, 16] {
            let x = vec![0.25f32; rows * inner];
            let mut out = vec![0.0; rows * cols];
            let seconds = best(200, || product.run(&x, None, &mut out));
            println!("{inner:4} x {cols:4}, {rows:2} rows: {:6.2} us", seconds * 1e6);
        }
    }
}

/// On one thread.
#[test]
#[ignore = "prints times"]
fn half() {
    for (inner, cols) in [(576, 3072), (1536, 576), (4096, 4096)] {
        let weight = vec![bf16::from_f32(0.5); inner * cols];
        let product = HalfProduct::new(Matrix::contiguous(&weight, inner));
        for rows in [1, 2, 3, 4, 6, 8, 12, 32, 64] {
            let x = vec![bf16::from_f32(0.25); rows * inner];
            let mut out = vec![bf16::ZERO; rows * cols];
            let seconds = best(2, || product.run(&x, None, &mut out, &Alone));
            let (bytes, macs) = (weight.len() * 2, weight.len() * rows);
            println!(
                "{inner:4} x {cols:4}, {rows:2} rows: {:7.0} us, {:5.1} GB/s, {:5.1} billion products/s",
                seconds * 1e6,
                bytes as f64 / seconds / 1e9,
                macs as f64 / seconds / 1e9
            );
        }
    }
}
