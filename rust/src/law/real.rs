//! The two precisions in which rows are transformed, and how a logit becomes a weight in each.

use std::ops::{Add, Div, Mul, Sub};

use super::kernels::{self, GROUP};
use super::workspace::Workspace;

/// Origin and scale of a row: the logit `x` has the weight `exp((x - max) / temperature)`, at most 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shift<F> {
    pub max: F,
    pub inverse_temperature: F,
}

/// What one pass over a row finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scan<F> {
    /// The largest logit, ignoring NaN; minus infinity for an empty row.
    pub max: F,
    pub has_nan: bool,
}

/// `f64` or `f32`.
///
/// A token's weight is the same number wherever it is computed: alone, in a sum, in a ratio or in a residual.
/// All rules depend on that.
pub(crate) trait Real:
    Copy
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + 'static
{
    const NEG_INFINITY: Self;
    const INFINITY: Self;
    const ZERO: Self;
    const MAX: Self;

    /// Rounds to this precision.
    fn narrow(x: f64) -> Self;
    /// Widens exactly.
    fn widen(self) -> f64;

    /// Largest element and whether any is NaN.
    fn scan(row: &[Self]) -> Scan<Self>;
    /// Index of the first element that equals `value`.
    fn position(row: &[Self], value: Self) -> Option<usize>;
    /// Largest element of each run of `GROUP`.
    fn group_maxima(row: &[Self], out: &mut [Self]);
    /// Weights of a run of logits, times a factor.
    fn weights(logits: &[Self], shift: Shift<Self>, factor: f64, out: &mut [f64]);
    /// Sum of the weights of a run of logits, added in a fixed order.
    fn weight_sum(logits: &[Self], shift: Shift<Self>) -> f64;
    /// Weight of one logit.
    fn weight(logit: Self, shift: Shift<Self>) -> f64;

    /// Spare buffers of this type.
    fn pool(workspace: &mut Workspace) -> &mut Vec<Vec<Self>>;

    /// A spare buffer, emptied.
    fn take(workspace: &mut Workspace) -> Vec<Self> {
        let mut buffer = Self::pool(workspace).pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Logarithm of the weight.
    #[inline(always)]
    fn log_weight(self, shift: Shift<Self>) -> f64 {
        ((self - shift.max) * shift.inverse_temperature).widen()
    }
}

impl<F: Real> Shift<F> {
    /// Caps the inverse of a tiny temperature at the largest number, so that the largest logit, at distance
    /// zero from itself, keeps the weight 1.
    pub fn new(max: F, temperature: f64) -> Self {
        let inverse = F::narrow(1.0 / temperature);
        Self { max, inverse_temperature: if inverse < F::MAX { inverse } else { F::MAX } }
    }
}

impl Real for f32 {
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    const INFINITY: f32 = f32::INFINITY;
    const ZERO: f32 = 0.0;
    const MAX: f32 = f32::MAX;

    fn narrow(x: f64) -> f32 {
        x as f32
    }
    #[inline(always)]
    fn widen(self) -> f64 {
        f64::from(self)
    }
    fn scan(row: &[f32]) -> Scan<f32> {
        let (max, has_nan) = kernels::max(row);
        Scan { max, has_nan }
    }
    fn position(row: &[f32], value: f32) -> Option<usize> {
        kernels::position(row, value)
    }
    fn group_maxima(row: &[f32], out: &mut [f32]) {
        kernels::group_maxima(row, out);
    }
    fn weights(logits: &[f32], shift: Shift<f32>, factor: f64, out: &mut [f64]) {
        kernels::weights(logits, shift.max, shift.inverse_temperature, factor, out);
    }
    fn weight_sum(logits: &[f32], shift: Shift<f32>) -> f64 {
        kernels::weight_sum(logits, shift.max, shift.inverse_temperature)
    }
    #[inline(always)]
    fn weight(logit: f32, shift: Shift<f32>) -> f64 {
        kernels::weight(logit, shift.max, shift.inverse_temperature)
    }
    fn pool(workspace: &mut Workspace) -> &mut Vec<Vec<f32>> {
        &mut workspace.singles
    }
}

impl Real for f64 {
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    const INFINITY: f64 = f64::INFINITY;
    const ZERO: f64 = 0.0;
    const MAX: f64 = f64::MAX;

    fn narrow(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }
    fn scan(row: &[f64]) -> Scan<f64> {
        row.iter().fold(Scan { max: f64::NEG_INFINITY, has_nan: false }, |scan, &x| Scan {
            max: scan.max.max(x),
            has_nan: scan.has_nan | x.is_nan(),
        })
    }
    fn position(row: &[f64], value: f64) -> Option<usize> {
        row.iter().position(|&x| x == value)
    }
    fn group_maxima(row: &[f64], out: &mut [f64]) {
        for (group, out) in row.chunks(GROUP).zip(out) {
            *out = group.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        }
    }
    fn weights(logits: &[f64], shift: Shift<f64>, factor: f64, out: &mut [f64]) {
        for (out, &x) in out.iter_mut().zip(logits) {
            *out = Self::weight(x, shift) * factor;
        }
    }
    fn weight_sum(logits: &[f64], shift: Shift<f64>) -> f64 {
        logits.iter().map(|&x| Self::weight(x, shift)).sum()
    }
    #[inline(always)]
    fn weight(logit: f64, shift: Shift<f64>) -> f64 {
        logit.log_weight(shift).exp()
    }
    fn pool(workspace: &mut Workspace) -> &mut Vec<Vec<f64>> {
        &mut workspace.doubles
    }
}
