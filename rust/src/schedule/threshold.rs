//! The threshold policy: stop before the first token whose confidence is too low.

/// Whether a confidence is too low to continue. A threshold of 0 (or below) never cuts; otherwise a
/// confidence that is not a number cuts.
///
/// The comparison is in f32, as in the reference: there the threshold is rounded to the precision of the
/// confidences, and a confidence equal to it does not cut.
#[inline]
pub fn is_below(confidence: f32, threshold: f64) -> bool {
    if threshold <= 0.0 {
        return false;
    }
    confidence.is_nan() || confidence < threshold as f32
}

/// Number of leading tokens to keep: all those before the first confidence below `threshold`.
///
/// `confidences[k]` is c_k, the probability that token k is kept given that those before it were. It is
/// known before token k is drawn, so cutting here is causal (docs/design.md).
///
/// ```
/// use dspark_core::schedule::threshold_prefix;
/// assert_eq!(threshold_prefix(&[0.9, 0.4, 0.9], 0.5), 1);
/// assert_eq!(threshold_prefix(&[0.9, 0.4, 0.9], 0.0), 3);
/// ```
pub fn threshold_prefix(confidences: &[f32], threshold: f64) -> usize {
    confidences.iter().position(|&c| is_below(c, threshold)).unwrap_or(confidences.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_before_the_first_low_confidence() {
        assert_eq!(threshold_prefix(&[0.2, 0.9], 0.5), 0);
        assert_eq!(threshold_prefix(&[0.9, 0.6, 0.2, 0.9], 0.5), 2);
        assert_eq!(threshold_prefix(&[0.9, 0.9], 0.5), 2);
        assert_eq!(threshold_prefix(&[], 0.5), 0);
    }

    #[test]
    fn zero_keeps_everything_and_equality_goes_on() {
        assert_eq!(threshold_prefix(&[0.0, f32::NAN, 0.1], 0.0), 3);
        // 0.3 is not an f32: the threshold rounds as the confidences did.
        for t in [0.3, 0.5, 0.7, 0.9, 1.0] {
            assert_eq!(threshold_prefix(&[t as f32], t), 1, "threshold {t}");
        }
    }

    #[test]
    fn nan_is_no_confidence() {
        assert_eq!(threshold_prefix(&[0.9, f32::NAN], 0.1), 1);
    }
}
