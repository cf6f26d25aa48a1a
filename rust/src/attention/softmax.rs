//! The running softmax of one query, with which attention takes a single pass over the keys.

use super::LANES;
use super::tile::TILE;
use crate::law::exp;

/// The largest score so far and the sum of exp(score - largest).
///
/// States over disjoint sets of keys merge into that of their union, in any order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    max: f32,
    sum: f32,
}

impl Softmax {
    /// The state over no keys.
    pub(super) const EMPTY: Softmax = Softmax { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Absorbs scores, turns them into weights relative to the new largest score, and returns the factor that
    /// brings earlier weights to the same scale.
    #[inline(always)]
    pub(super) fn absorb(&mut self, scores: &mut [f32; TILE]) -> f32 {
        let (runs, _) = scores.as_chunks_mut::<LANES>();
        let mut largest = [self.max; LANES];
        for run in runs.iter() {
            for (largest, &score) in largest.iter_mut().zip(run) {
                // Not `f32::max`: it skips NaN as this does, but costs more.
                *largest = if score > *largest { score } else { *largest };
            }
        }
        let mut max = f32::NEG_INFINITY;
        for lane in largest {
            max = if lane > max { lane } else { max };
        }
        if max == f32::NEG_INFINITY {
            // No key is visible yet, or no visible score is a number.
            if scores.iter().any(|score| score.is_nan()) {
                self.sum = f32::NAN;
            }
            scores.fill(0.0);
            return 1.0;
        }
        let mut sums = [0.0f32; LANES];
        for run in runs {
            for (sum, score) in sums.iter_mut().zip(run) {
                let below = *score - max;
                // `exp` turns NaN into the weight 0; here NaN has to show.
                *score = if below.is_nan() { below } else { exp(below) };
                *sum += *score;
            }
        }
        let mut sum = 0.0;
        for lane in sums {
            sum += lane;
        }
        let scale = exp(self.max - max);
        self.max = max;
        self.sum = self.sum.mul_add(scale, sum);
        scale
    }

    /// 1 / sum, the factor that turns the weighted sum of values into their mean. NaN scores make it NaN.
    #[inline(always)]
    pub(super) fn inverse_sum(&self) -> f32 {
        self.sum.recip()
    }

    /// Becomes the state over the keys of both, and returns the factors that bring the weights of either to
    /// the new scale.
    pub(super) fn merge(&mut self, other: Softmax) -> (f32, f32) {
        let max = if other.max > self.max { other.max } else { self.max };
        // Of a state over no keys nothing is left, whatever its scale; a sum that is not a number stays so.
        let (own, others) = (exp(self.max - max), exp(other.max - max));
        self.sum = self.sum.mul_add(own, other.sum * others);
        self.max = max;
        (own, others)
    }
}
