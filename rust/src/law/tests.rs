//! Checks laws against formulas written down a second time, plainly, and against transformers.

mod draws;
mod rows;
mod transforms;

use super::*;
use crate::noise::{Noise, Purpose};

/// Reproducible numbers for test data.
pub(super) struct Dice {
    noise: Noise,
    rolls: u32,
}

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice { noise: Noise { seed, sample: 77 }, rolls: 0 }
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        self.rolls += 1;
        self.noise.uniform(self.rolls, 0, Purpose::Draft)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    /// Logits of spread `scale`, some of them minus infinity, and some equal.
    pub fn logits(&mut self, n: usize, scale: f64) -> Vec<f64> {
        let mut row: Vec<f64> =
            (0..n).map(|_| (self.unit() + self.unit() + self.unit() - 1.5) * scale).collect();
        for _ in 0..n / 5 {
            let (a, b) = (self.below(n), self.below(n));
            row[a] = row[b];
        }
        for _ in 0..n / 10 {
            let a = self.below(n - 1);
            row[a] = f64::NEG_INFINITY;
        }
        row
    }
}

pub(super) fn law_of<'a>(row: Row<'a>, params: &SamplingParams) -> Law<'a> {
    Law::new(row, params, &History::default(), &mut Workspace::default()).unwrap()
}

/// The probabilities of the first `n` tokens.
pub(super) fn probs(law: &Law<'_>, n: usize) -> Vec<f64> {
    (0..n as u32).map(|token| law.prob(token)).collect()
}

#[track_caller]
pub(super) fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= tolerance, "entry {i}: {found} is not {expected}");
    }
}
