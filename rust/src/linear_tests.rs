use super::*;
use proptest::prelude::*;

fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / 2f64.powi(23) - 1.0
    })
    .take(n)
    .collect()
}

/// Checks every product of one element type against a plain sum in f64.
macro_rules! check {
    ($kind:ident, $make:expr, $rows:expr, $cols:expr, $gap:expr) => {{
        let (rows, cols, stride) = ($rows, $cols, $cols + $gap);
        let make = $make;
        let stored: Vec<_> = numbers(rows * stride, 7).into_iter().map(make).collect();
        let matrix = Matrix::strided(&stored, rows, cols, stride);
        let x = numbers(cols, 8);
        let base = numbers(rows, 9);
        let expected: Vec<f64> = (0..rows)
            .map(|i| base[i] + matrix.row(i).iter().zip(&x).map(|(&w, &x)| f64::from(w) * x).sum::<f64>())
            .collect();

        let mut doubles = base.clone();
        f64::add_products(Rows::$kind(matrix), &x, &mut doubles);
        for (found, expected) in doubles.iter().zip(&expected) {
            prop_assert!((found - expected).abs() < 1e-13 * cols as f64);
        }
        let singles = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let x32 = singles(&x);
        let mut floats = singles(&base);
        f32::add_products(Rows::$kind(matrix), &x32, &mut floats);
        for (i, (found, expected)) in floats.iter().zip(&expected).enumerate() {
            prop_assert!((f64::from(*found) - expected).abs() < 1e-6 * (cols + 1) as f64);
            // The number is the same alone, by index, and in a whole product.
            prop_assert_eq!(*found, base[i] as f32 + f32::dot(Rows::$kind(matrix).row(i), &x32));
        }
        let ids: Vec<u32> = (0..rows as u32).rev().collect();
        let mut picked: Vec<f32> = ids.iter().map(|&i| base[i as usize] as f32).collect();
        f32::add_products_at(Rows::$kind(matrix), &ids, &x32, &mut picked);
        picked.reverse();
        prop_assert_eq!(picked, floats);
        let mut copy = Vec::new();
        f64::extend(Rows::$kind(matrix).row(rows - 1), &mut copy);
        prop_assert_eq!(copy, matrix.row(rows - 1).iter().map(|&w| f64::from(w)).collect::<Vec<f64>>());
    }};
}

proptest! {
    #[test]
    fn products_are_sums(rows in 1usize..20, cols in 1usize..70, gap in 0usize..3) {
        check!(F64, |x| x, rows, cols, gap);
        check!(F32, |x| x as f32, rows, cols, gap);
        check!(F16, f16::from_f64, rows, cols, gap);
        check!(Bf16, bf16::from_f64, rows, cols, gap);
    }
}

#[test]
fn a_large_product_is_the_same_divided_among_threads() {
    let (rows, cols) = (PARALLEL / 48 + 17, 48);
    let stored: Vec<f32> = numbers(rows * cols, 1).iter().map(|&x| x as f32).collect();
    let x: Vec<f32> = numbers(cols, 2).iter().map(|&x| x as f32).collect();
    let matrix = Matrix::contiguous(&stored, cols);
    let mut divided = vec![0.5; rows];
    f32::add_products(Rows::F32(matrix), &x, &mut divided);
    let alone: Vec<f32> = (0..rows).map(|i| 0.5 + f32::dot(Row::F32(matrix.row(i)), &x)).collect();
    assert_eq!(divided, alone);
}
