//! Products of a few rows with a small matrix, where a call into a BLAS costs more than the product.
//!
//! A pass of a small model over a verify block is a chain of such products: MKL takes 10 us for 8 rows times
//! 96 x 512, of which the arithmetic is 4. Here the weights are kept in panels of 32 columns, and each step
//! of the sum updates up to 8 rows by 32 columns held in registers.
//!
//! Each output is one sum in ascending order of the inner index, whatever the number of rows: a row's result
//! is the same to the last bit whatever rows are beside it.

/// Columns of a panel.
const PANEL: usize = 32;

/// A weight matrix `[inner, cols]`, ready to multiply.
#[derive(Debug, Clone)]
pub struct SmallProduct {
    inner: usize,
    cols: usize,
    /// `[panels, inner, PANEL]`, padded with zeros.
    panels: Vec<f32>,
}

impl SmallProduct {
    /// Packs `weight`, of which row j holds the `inner` factors of output column j (as `nn.Linear` stores it).
    ///
    /// # Panics
    /// Unless `weight` has a multiple of `inner` elements.
    pub fn pack(weight: &[f32], inner: usize) -> Self {
        assert!(inner > 0 && weight.len().is_multiple_of(inner), "the weight is not a matrix");
        let cols = weight.len() / inner;
        let mut panels = vec![0.0; cols.div_ceil(PANEL) * inner * PANEL];
        for (j, row) in weight.chunks_exact(inner).enumerate() {
            let panel = &mut panels[j / PANEL * inner * PANEL..];
            for (k, &w) in row.iter().enumerate() {
                panel[k * PANEL + j % PANEL] = w;
            }
        }
        SmallProduct { inner, cols, panels }
    }

    /// Inner size.
    pub fn inner(&self) -> usize {
        self.inner
    }

    /// Output columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// `out = start + x W^T`, where `x` is `[rows, inner]` and `out` is `[rows, cols]`; `start` has the shape
    /// of `out` and counts as 0 if absent.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn run(&self, x: &[f32], start: Option<&[f32]>, out: &mut [f32]) {
        let rows = x.len() / self.inner;
        assert_eq!((x.len(), out.len()), (rows * self.inner, rows * self.cols), "the shapes do not fit");
        if let Some(start) = start {
            out.copy_from_slice(start);
        } else {
            out.fill(0.0);
        }
        multiply(self, x, out);
    }
}

/// R rows times one panel, summed in registers.
trait Tile {
    /// Rows whose sums the registers hold.
    const ROWS: usize;

    fn tile<const R: usize>(panel: &[f32], x: [&[f32]; R]) -> [[f32; PANEL]; R];
}

fn multiply(product: &SmallProduct, x: &[f32], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return multiply_with::<x86::Avx512>(product, x, out);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return multiply_with::<x86::Avx2>(product, x, out);
        }
    }
    multiply_with::<Portable>(product, x, out);
}

fn multiply_with<T: Tile>(product: &SmallProduct, x: &[f32], out: &mut [f32]) {
    let (inner, cols) = (product.inner, product.cols);
    let rows = x.len() / inner;
    for (p, panel) in product.panels.chunks_exact(inner * PANEL).enumerate() {
        let first = p * PANEL;
        let mut row = 0;
        while row < rows {
            let x = &x[row * inner..];
            let out = &mut out[row * cols + first..];
            let left = cols - first;
            row += match (rows - row).min(T::ROWS) {
                8 => add::<T, 8>(panel, inner, x, out, cols, left),
                7 => add::<T, 7>(panel, inner, x, out, cols, left),
                6 => add::<T, 6>(panel, inner, x, out, cols, left),
                5 => add::<T, 5>(panel, inner, x, out, cols, left),
                4 => add::<T, 4>(panel, inner, x, out, cols, left),
                3 => add::<T, 3>(panel, inner, x, out, cols, left),
                2 => add::<T, 2>(panel, inner, x, out, cols, left),
                _ => add::<T, 1>(panel, inner, x, out, cols, left),
            };
        }
    }
}

/// Adds R rows times one panel to at most `left` columns at the start of each row of `out`; returns R.
fn add<T: Tile, const R: usize>(
    panel: &[f32],
    inner: usize,
    x: &[f32],
    out: &mut [f32],
    cols: usize,
    left: usize,
) -> usize {
    let sums = T::tile::<R>(panel, std::array::from_fn(|r| &x[r * inner..(r + 1) * inner]));
    for (r, sums) in sums.iter().enumerate() {
        for (o, s) in out[r * cols..].iter_mut().zip(&sums[..left.min(PANEL)]) {
            *o += s;
        }
    }
    R
}

/// For any processor; fused like the others, so that the bits are the same.
struct Portable;

impl Tile for Portable {
    const ROWS: usize = 1;

    fn tile<const R: usize>(panel: &[f32], x: [&[f32]; R]) -> [[f32; PANEL]; R] {
        x.map(|x| {
            let mut sums = [0.0f32; PANEL];
            for (w, &factor) in panel.as_chunks::<PANEL>().0.iter().zip(x) {
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = factor.mul_add(*w, *sum);
                }
            }
            sums
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{PANEL, Tile};
    use std::arch::x86_64::*;

    /// A tile for vectors of one width: loads, fused multiply-adds and stores of that width.
    macro_rules! tile {
        ($name:ident, $function:ident, $feature:literal, $rows:literal, $lanes:literal,
         $zero:ident, $load:ident, $splat:ident, $fma:ident, $store:ident) => {
            pub(super) struct $name;

            impl Tile for $name {
                const ROWS: usize = $rows;

                fn tile<const R: usize>(panel: &[f32], x: [&[f32]; R]) -> [[f32; PANEL]; R] {
                    // SAFETY: `multiply` picks this tile only where the processor has the feature.
                    unsafe { $function::<R>(panel, x) }
                }
            }

            #[target_feature(enable = $feature)]
            fn $function<const R: usize>(panel: &[f32], x: [&[f32]; R]) -> [[f32; PANEL]; R] {
                const VECTORS: usize = PANEL / $lanes;
                let mut sums = [[$zero(); VECTORS]; R];
                for (k, w) in panel.as_chunks::<PANEL>().0.iter().enumerate() {
                    let w: [_; VECTORS] = std::array::from_fn(|v| {
                        // SAFETY: the VECTORS loads read the PANEL numbers of `w`.
                        unsafe { $load(w.as_ptr().add(v * $lanes)) }
                    });
                    for r in 0..R {
                        let factor = $splat(x[r][k]);
                        for v in 0..VECTORS {
                            sums[r][v] = $fma(factor, w[v], sums[r][v]);
                        }
                    }
                }
                let mut out = [[0.0f32; PANEL]; R];
                for (out, sums) in out.iter_mut().zip(sums) {
                    for (v, sum) in sums.into_iter().enumerate() {
                        // SAFETY: the VECTORS stores fill the PANEL numbers of `out`.
                        unsafe { $store(out.as_mut_ptr().add(v * $lanes), sum) };
                    }
                }
                out
            }
        };
    }

    tile!(
        Avx512,
        tile_512,
        "avx512f",
        8,
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_storeu_ps
    );
    // Of sixteen registers: two rows of four vectors of sums, the weights and a factor.
    tile!(
        Avx2,
        tile_256,
        "avx2,fma",
        2,
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_storeu_ps
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_the_sums_whatever_rows_stand_beside(
            rows in 1usize..20, inner in 1usize..40, cols in 1usize..100, seed in any::<u32>()
        ) {
            let number = |i: usize| ((i as u32).wrapping_mul(2654435761).wrapping_add(seed) >> 8) as f32 / 8388608.0 - 1.0;
            let weight: Vec<f32> = (0..inner * cols).map(number).collect();
            let x: Vec<f32> = (0..rows * inner).map(|i| number(i + 77)).collect();
            let start: Vec<f32> = (0..rows * cols).map(|i| number(i + 5)).collect();
            let product = SmallProduct::pack(&weight, inner);
            let mut out = vec![f32::NAN; rows * cols];
            product.run(&x, Some(&start), &mut out);
            for r in 0..rows {
                let mut alone = vec![f32::NAN; cols];
                let range = r * cols..(r + 1) * cols;
                product.run(&x[r * inner..(r + 1) * inner], Some(&start[range.clone()]), &mut alone);
                prop_assert_eq!(&alone, &out[range]);
                for c in 0..cols {
                    let exact: f64 = (0..inner)
                        .map(|k| f64::from(x[r * inner + k]) * f64::from(weight[c * inner + k]))
                        .sum::<f64>() + f64::from(start[r * cols + c]);
                    prop_assert!((f64::from(out[r * cols + c]) - exact).abs() < 1e-5);
                }
            }
        }
    }
}
