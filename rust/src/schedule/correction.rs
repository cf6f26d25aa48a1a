//! Confidences corrected while the engine runs.

use super::track::Outcome;

/// One offset for each position of the block, added to the calibrated logit of the confidence there.
///
/// Learned from the outcomes of verified tokens, one small step down the log loss for each: an offset moves
/// until the confidences that it corrects are right on average, and stays there. It is a function of past
/// rounds, so a cut by corrected confidences is as causal as one by the head's own.
#[derive(Debug, Clone)]
pub(super) struct Correction {
    offsets: Vec<f64>,
    seen: Vec<u32>,
}

/// The largest offset; it changes odds by a factor of 400.
const LIMIT: f64 = 6.0;
/// Observations of a position after which it no longer follows the one before it.
const OWN: f64 = 8.0;
/// The first step, the smallest one, and after how many observations the first has halved.
const STEPS: (f64, f64, f64) = (0.3, 0.02, 15.0);

impl Correction {
    pub(super) fn new(gamma: usize) -> Self {
        Self { offsets: vec![0.0; gamma], seen: vec![0; gamma] }
    }

    pub(super) fn offsets(&self) -> &[f64] {
        &self.offsets
    }

    /// Learns from the positions whose prefix was kept and that the target checked.
    pub(super) fn add(&mut self, outcome: &Outcome<'_>) {
        let reached = outcome.verified.min(outcome.accepted + 1).min(self.offsets.len());
        for (slot, &c) in outcome.confidences.iter().enumerate().take(reached) {
            let kept = if slot < outcome.accepted { 1.0 } else { 0.0 };
            let (first, last, over) = STEPS;
            let step = (first / (1.0 + f64::from(self.seen[slot]) / over)).max(last);
            self.seen[slot] = self.seen[slot].saturating_add(1);
            self.offsets[slot] = (self.offsets[slot] + step * (kept - f64::from(c))).clamp(-LIMIT, LIMIT);
        }
        // A head that is off is off everywhere, so a position that was rarely judged follows the one before
        // it; otherwise it might never be found worth judging.
        for slot in 1..self.offsets.len() {
            let own = f64::from(self.seen[slot]) / OWN;
            if own < 1.0 {
                self.offsets[slot] = own * self.offsets[slot] + (1.0 - own) * self.offsets[slot - 1];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::sigmoid;

    /// Blocks of one token whose head is off by `bias` in its logit; returns the mean offset in the second
    /// half of `2 * rounds` rounds.
    fn converge(bias: f64, rounds: u32) -> f64 {
        let mut correction = Correction::new(1);
        let mut mean = 0.0;
        for i in 0..2 * rounds {
            // Logits from -2 to 2 and uniforms, both equidistributed.
            let logit = 4.0 * (f64::from(i) * 0.618_033_988).fract() - 2.0;
            let kept = (f64::from(i) * 0.754_877_666 + 0.5).fract() < sigmoid(logit);
            let c = sigmoid(logit + bias + correction.offsets()[0]) as f32;
            let accepted = usize::from(kept);
            correction.add(&Outcome { drafted: 1, confidences: &[c], verified: 1, accepted });
            if i >= rounds {
                mean += correction.offsets()[0] / f64::from(rounds);
            }
        }
        mean
    }

    #[test]
    fn a_head_that_is_off_is_corrected_and_one_that_is_right_stays() {
        for bias in [0.0, 1.5, -1.0, 2.5] {
            let offset = converge(bias, 500);
            assert!((offset + bias).abs() < 0.12, "bias {bias}: offset {offset}");
        }
        assert_eq!(converge(12.0, 2000).abs().clamp(5.99, 6.0), converge(12.0, 2000).abs());
    }

    #[test]
    fn positions_that_were_not_reached_teach_nothing_and_follow() {
        let mut correction = Correction::new(4);
        let outcome = Outcome { drafted: 4, confidences: &[0.5; 4], verified: 3, accepted: 1 };
        correction.add(&outcome);
        assert!(correction.offsets().iter().all(|&x| x > 0.0), "one observation of a position is hardly any");
        (0..20).for_each(|_| correction.add(&outcome));
        let signs: Vec<f64> = correction.offsets().iter().map(|x| x.signum()).collect();
        assert_eq!(signs, [1.0, -1.0, -1.0, -1.0]);
        assert_eq!(correction.seen, [21, 21, 0, 0]);
        let [_, judged, other, last] = correction.offsets() else { panic!("four positions") };
        assert!(judged == other && other == last, "what was never judged takes after the one before it");
    }
}
