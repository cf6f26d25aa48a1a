//! Passes over `f32` rows, compiled for the instruction sets that matter and chosen at run time.
//!
//! Every fused multiply-add is written out, and sums have a fixed number of lanes, so the results are the
//! same to the last bit on every machine (slower on one that cannot fuse).

use std::f32::consts::{LN_2, LOG2_E};

use half::{bf16, f16};
use multiversion::multiversion;

/// Running sums kept side by side.
const LANES: usize = 16;

/// Logits that share one entry of [`group_maxima`].
pub(super) const GROUP: usize = 64;

/// Below this, exp has no normal `f32`, so weights are zero. A token more than 41 below the largest logit
/// cannot win against noise of 53 bits anyway.
const LOWEST: f32 = -87.0;

/// exp(s) for s <= 0, to about one unit in the last place; exactly 1 at 0, and 0 below [`LOWEST`].
///
/// The usual reduction s = n ln 2 + r with |r| <= ln 2 / 2, and the polynomial of Cephes' `expf` for exp(r),
/// summed in pairs to shorten the chain of dependent steps.
#[inline(always)]
pub(crate) fn exp(s: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer; with the exponent's bias on top, the low bits of the
    // sum are the exponent field of 2^n.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN_2_REST: f32 = -1.904_654_3e-9;
    let biased = s.mul_add(LOG2_E, ROUND);
    let n = biased - ROUND;
    let r = n.mul_add(-LN_2_REST, n.mul_add(-LN_2, s));
    let r2 = r * r;
    let low = r.mul_add(1.666_666_5e-1, 0.5);
    let middle = r.mul_add(8.333_452e-3, 4.166_579_6e-2);
    let high = r.mul_add(1.987_569_1e-4, 1.398_199_9e-3);
    let p = r2.mul_add(r2.mul_add(high, middle), low);
    let y = r2.mul_add(p, r) + 1.0;
    let scale = f32::from_bits(biased.to_bits() << 23);
    // Not `s < LOWEST`: NaN has to get the weight 0, too.
    if s >= LOWEST { y * scale } else { 0.0 }
}

/// Weight of one logit.
#[inline(always)]
pub(super) fn weight(logit: f32, max: f32, inverse_temperature: f32) -> f64 {
    f64::from(exp((logit - max) * inverse_temperature))
}

/// Weights in single precision, so that they fill the widest registers.
#[inline(always)]
fn exps(logits: &[f32; LANES], max: f32, inverse_temperature: f32) -> [f32; LANES] {
    // A loop, since closures do not inherit the instruction set they are called with.
    let mut out = [0.0; LANES];
    for j in 0..LANES {
        out[j] = exp((logits[j] - max) * inverse_temperature);
    }
    out
}

/// The largest element, ignoring NaN, and whether there is a NaN.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn max(row: &[f32]) -> (f32, bool) {
    const WIDE: usize = 4 * LANES;
    let mut max = [f32::NEG_INFINITY; WIDE];
    let mut nan = [false; WIDE];
    let mut look = |j: usize, x: f32| {
        max[j] = larger(max[j], x);
        nan[j] |= x.is_nan();
    };
    let (groups, rest) = row.as_chunks::<WIDE>();
    for group in groups {
        for (j, &x) in group.iter().enumerate() {
            look(j, x);
        }
    }
    for (j, &x) in rest.iter().enumerate() {
        look(j, x);
    }
    (largest(&max), nan.contains(&true))
}

/// The larger of two numbers; the first if the second is NaN.
#[inline(always)]
fn larger(max: f32, x: f32) -> f32 {
    if x > max { x } else { max }
}

#[inline(always)]
fn largest(lanes: &[f32]) -> f32 {
    lanes.iter().copied().fold(f32::NEG_INFINITY, larger)
}

/// Weights of a run of logits, times a factor.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn weights(logits: &[f32], max: f32, inverse_temperature: f32, factor: f64, out: &mut [f64]) {
    let (groups, rest) = logits.as_chunks::<LANES>();
    let (outs, out_rest) = out[..logits.len()].as_chunks_mut::<LANES>();
    for (group, out) in groups.iter().zip(outs) {
        let weights = exps(group, max, inverse_temperature);
        for j in 0..LANES {
            out[j] = f64::from(weights[j]) * factor;
        }
    }
    for (&x, out) in rest.iter().zip(out_rest) {
        *out = weight(x, max, inverse_temperature) * factor;
    }
}

/// Sum of the weights of a run of logits.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn weight_sum(logits: &[f32], max: f32, inverse_temperature: f32) -> f64 {
    let mut sums = [0.0f64; LANES];
    let (groups, rest) = logits.as_chunks::<LANES>();
    for group in groups {
        let weights = exps(group, max, inverse_temperature);
        for j in 0..LANES {
            sums[j] += f64::from(weights[j]);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += weight(x, max, inverse_temperature);
    }
    sums.iter().sum()
}

/// Turns `p` into max(factor * p - q, 0) and returns the sum.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn excess(factor: f64, p: &mut [f64], q: &[f64]) -> f64 {
    let mut sums = [0.0f64; LANES];
    let (p_groups, p_rest) = p.as_chunks_mut::<LANES>();
    let (q_groups, q_rest) = q[..p_groups.len() * LANES + p_rest.len()].as_chunks::<LANES>();
    let step = |p: &mut f64, q: f64, sum: &mut f64| {
        let rest = factor * *p - q;
        *p = if rest > 0.0 { rest } else { 0.0 };
        *sum += *p;
    };
    for (p, q) in p_groups.iter_mut().zip(q_groups) {
        for j in 0..LANES {
            step(&mut p[j], q[j], &mut sums[j]);
        }
    }
    for ((p, q), sum) in p_rest.iter_mut().zip(q_rest).zip(&mut sums) {
        step(p, *q, sum);
    }
    sums.iter().sum()
}

/// Whether `bounds[i] <= limit * weights[i]` for any i.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn any_within(bounds: &[u32], weights: &[f64], limit: f64) -> bool {
    let mut any = false;
    for (&bound, &weight) in bounds.iter().zip(weights) {
        any |= f64::from(bound) <= limit * weight;
    }
    any
}

/// Index of the first element that equals `value`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn position(row: &[f32], value: f32) -> Option<usize> {
    const WIDE: usize = 8 * LANES;
    let holds = |run: &[f32]| run.iter().fold(false, |found, &x| found | (x == value));
    let run = row.chunks(WIDE).position(holds)?;
    let start = run * WIDE;
    row[start..].iter().position(|&x| x == value).map(|i| start + i)
}

/// The largest element of each run of `GROUP`, ignoring NaN.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn group_maxima(row: &[f32], out: &mut [f32]) {
    let (groups, rest) = row.as_chunks::<GROUP>();
    let rest = (!rest.is_empty()).then(|| largest(rest));
    let maxima = groups.iter().map(|group| {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for run in group.as_chunks::<LANES>().0 {
            for (max, &x) in lanes.iter_mut().zip(run) {
                *max = larger(*max, x);
            }
        }
        largest(&lanes)
    });
    for (out, max) in out.iter_mut().zip(maxima.chain(rest)) {
        *out = max;
    }
}

/// Widens bfloat16 numbers.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn widen_bf16(row: &[bf16], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(row) {
        *out = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

/// Widens half-precision numbers.
pub(super) fn widen_f16(row: &[f16], out: &mut [f32]) {
    half::slice::HalfFloatSliceExt::convert_to_f32_slice(row, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_to_the_last_place() {
        let mut worst: f64 = 0.0;
        for i in 0..=4_000_000 {
            let s = LOWEST * (i as f32 / 4e6);
            let exact = f64::from(s).exp();
            let found = exp(s);
            let unit = f64::from(found.next_up() - found);
            worst = worst.max((f64::from(found) - exact).abs() / unit);
        }
        assert!(worst < 1.5, "off by {worst} units in the last place");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        for s in [LOWEST.next_down(), -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(s), 0.0);
        }
    }

    #[test]
    fn sums_and_weights_agree_with_single_weights() {
        let logits: Vec<f32> = (0..1037).map(|i| ((i * 7919) % 1000) as f32 * -0.031).collect();
        let mut many = vec![0.0; logits.len()];
        weights(&logits, 0.5, 0.7, 1.0, &mut many);
        let single: Vec<f64> = logits.iter().map(|&x| weight(x, 0.5, 0.7)).collect();
        assert_eq!(many, single);
        let sum: f64 = single.iter().sum();
        assert!((weight_sum(&logits, 0.5, 0.7) - sum).abs() < 1e-12 * sum);
    }

    /// These hashes were the same with AVX-512, with AVX2 and FMA, and with neither.
    #[test]
    fn every_machine_has_the_same_bits() {
        // FNV-1a over the bits of numbers.
        let hash = |run: &[f64]| {
            let step = |hash: u64, x: &f64| (hash ^ x.to_bits()).wrapping_mul(0x0100_0000_01b3);
            run.iter().fold(0xcbf2_9ce4_8422_2325, step)
        };
        // Scattered over [-120, 0] so that some have weight 0; their number is no multiple of the lanes.
        let logits = |factor: u32| -> Vec<f32> {
            (0..100_003u32).map(|i| (i.wrapping_mul(factor) >> 8) as f32 * (-120.0 / 16_777_216.0)).collect()
        };
        let (a, b) = (logits(2_654_435_769), logits(2_246_822_519));
        let (mut p, mut q) = (vec![0.0; a.len()], vec![0.0; b.len()]);
        weights(&a, 0.25, 0.7, 1.0 / 3.0, &mut p);
        weights(&b, 0.01, 1.3, 0.3, &mut q);
        let (of_p, of_q) = (hash(&p), hash(&q));
        let sums = [weight_sum(&a, 0.25, 0.7), weight_sum(&b, 0.01, 1.3), excess(0.9, &mut p, &q)];
        let expected =
            [0x7ad3_046b_f54a_bf59, 0x259f_35d1_0b40_08ac, 0x2597_588d_0805_52bb, 0x509a_1290_8bc6_9232];
        assert_eq!([of_p, of_q, hash(&sums), hash(&p)], expected);
    }

    #[test]
    fn max_sees_every_element() {
        for n in [1, 63, 64, 65, 200] {
            for at in 0..n {
                let mut row = vec![-5.0f32; n];
                row[at] = -1.0;
                assert_eq!(max(&row), (-1.0, false));
                row[at] = f32::NAN;
                assert!(max(&row).1);
            }
        }
        assert_eq!(max(&[]), (f32::NEG_INFINITY, false));
    }
}
