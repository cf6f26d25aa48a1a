//! `cargo test --release --test product_timing -- --ignored --nocapture`
use dspark_core::product::Product;
use std::time::Instant;

#[test]
#[ignore = "prints times"]
fn times() {
    for (inner, cols) in [(96, 160), (96, 96), (96, 512), (256, 96)] {
        let weight = vec![0.5f32; inner * cols];
        let product = Product::pack(&weight, inner);
        for rows in [1, 2, 4, 5, 8, 16] {
            let x = vec![0.25f32; rows * inner];
            let mut out = vec![0.0; rows * cols];
            let mut best = f64::MAX;
            for _ in 0..50 {
                let start = Instant::now();
                for _ in 0..200 {
                    product.run(&x, None, &mut out);
                }
                best = best.min(start.elapsed().as_secs_f64() / 200.0);
            }
            println!("{inner:4} x {cols:4}, {rows:2} rows: {:6.2} us", best * 1e6);
        }
    }
}
