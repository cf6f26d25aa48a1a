//! Where random numbers come from: every number is a function of the seed and of what it is for.
//!
//! Nothing depends on the order of calls, the batch, the thread or the device. The generator's key is
//! the 64-bit seed; its counter holds the position, the slot or token id, the purpose, and the index
//! of the sample within a request's `n`.

mod philox;

use philox::{even_words, philox};

use crate::mutant::{self, Mutant};

/// What a number is used for. Streams of different purposes never overlap: drawing the residual with the
/// noise of the draft or of the acceptance test would bias the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Drawing a drafted token.
    Draft = 0,
    /// The test that accepts or rejects it.
    Accept = 1,
    /// Drawing the corrected or bonus token.
    Resample = 2,
    /// Gumbel noise of a token at a position, shared by draft and target under `coupled`.
    Gumbel = 3,
}

/// The noise of one sample of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// The request's seed.
    pub seed: u64,
    /// Index of the sample within the request's `n`.
    pub sample: u32,
}

impl Noise {
    fn key(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    fn block(&self, position: u32, index: u32, purpose: Purpose) -> [u32; 4] {
        philox([position, index, purpose as u32, self.sample], self.key())
    }

    /// A number in [0, 1) with 53 bits.
    pub fn uniform(&self, position: u32, slot: u32, purpose: Purpose) -> f64 {
        let block = self.block(position, slot, purpose);
        (wide(block[0], block[1]) >> 11) as f64 * 2f64.powi(-53)
    }

    /// Standard Gumbel noise of `token` at `position`: -ln(-ln u), u = (k + 1/2) 2^-52, k of 52 bits.
    pub fn gumbel(&self, position: u32, token: u32) -> f64 {
        // One block serves two neighbouring tokens.
        let block = self.block(position, token >> 1, Purpose::Gumbel);
        let pair = if token & 1 == 0 { wide(block[0], block[1]) } else { wide(block[2], block[3]) };
        standard_gumbel(pair)
    }

    /// The 32 leading bits of the u behind [`Noise::gumbel`] for tokens `first`, `first + 1`, ...;
    /// `first` must be even.
    fn gumbel_leading_bits(&self, position: u32, first: u32, out: &mut [u32]) {
        debug_assert!(first.is_multiple_of(2));
        let counter = [position, first >> 1, Purpose::Gumbel as u32, self.sample];
        even_words(counter, self.key(), out);
    }
}

/// Standard Gumbel noise of 64 random bits, of which the 52 leading ones count.
fn standard_gumbel(bits: u64) -> f64 {
    let u = ((bits >> 12) as f64 + 0.5) * 2f64.powi(-52);
    -(-u.ln()).ln()
}

fn wide(high: u32, low: u32) -> u64 {
    (u64::from(high) << 32) | u64::from(low)
}

/// The numbers of one round of one request, by slot: slot `k` belongs to the `k`-th drafted token, counted
/// from 0, and the slot behind the last one to the bonus token.
pub trait RoundNoise: Sync {
    /// The number that draws the drafted token of a slot.
    fn draft(&self, slot: usize) -> f64;

    /// The number that tests the drafted token of a slot.
    fn accept(&self, slot: usize) -> f64;

    /// The number that draws the corrected or bonus token, if it falls into this slot.
    fn resample(&self, slot: usize) -> f64;

    /// Gumbel noise of a token at the slot's position.
    fn gumbel(&self, slot: usize, token: u32) -> f64;

    /// Writes, for tokens `first`, `first + 1`, ... (`first` even), a lower bound, in units of 2^-32, of
    /// 1 - exp(-exp(-g)), where g is the token's Gumbel noise. A search for the largest sum of logit and
    /// noise scores only tokens that can win by their bound; 0 excludes none and is always valid.
    fn gumbel_bounds(&self, slot: usize, first: u32, out: &mut [u32]) {
        let _ = (slot, first);
        out.fill(0);
    }
}

/// The noise of a round in production, whose counters derive from the round's anchor.
///
/// The counter of a number of the ratio rules holds (position of the anchor, slot, purpose). Each round has
/// its own anchor, so no number is used twice. If it held the token's own position alone, `block` would use
/// some numbers again in the next round, although its choices in this one depended on them. The counter of
/// Gumbel noise holds (position of the token, token id) alone, so that the noise is the same whatever round
/// the position falls into.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    noise: Noise,
    anchor: u32,
}

impl Counted {
    /// The noise of the round whose anchor, the last committed token, stands at absolute position
    /// `anchor`.
    pub fn new(noise: Noise, anchor: u32) -> Self {
        Self { noise, anchor }
    }

    /// The request's noise and the anchor's position: all that these numbers are a function of.
    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self) -> (Noise, u32) {
        (self.noise, self.anchor)
    }

    fn uniform(&self, slot: usize, purpose: Purpose) -> f64 {
        if mutant::on(Mutant::PositionKeys) {
            return self.noise.uniform(self.position(slot), 0, purpose);
        }
        self.noise.uniform(self.anchor, slot as u32, purpose)
    }

    /// Absolute position of the token of a slot.
    fn position(&self, slot: usize) -> u32 {
        self.anchor.wrapping_add(1).wrapping_add(slot as u32)
    }
}

impl RoundNoise for Counted {
    fn draft(&self, slot: usize) -> f64 {
        self.uniform(slot, Purpose::Draft)
    }

    fn accept(&self, slot: usize) -> f64 {
        self.uniform(slot, Purpose::Accept)
    }

    fn resample(&self, slot: usize) -> f64 {
        if mutant::on(Mutant::SharedStream) {
            return self.draft(slot);
        }
        self.uniform(slot, Purpose::Resample)
    }

    fn gumbel(&self, slot: usize, token: u32) -> f64 {
        self.noise.gumbel(self.position(slot), token)
    }

    fn gumbel_bounds(&self, slot: usize, first: u32, out: &mut [u32]) {
        self.noise.gumbel_leading_bits(self.position(slot), first, out);
        // 1 - u is at least the complement of u's leading bits.
        for bits in out {
            *bits = !*bits;
        }
    }
}

/// Numbers given by hand, for tests and for callers with a generator of their own.
///
/// Slots past the end of a list read 0.
#[derive(Clone, Debug, Default)]
pub struct Injected {
    /// Draws of the drafted tokens.
    pub draft: Vec<f64>,
    /// Acceptance tests.
    pub accept: Vec<f64>,
    /// Draws of the corrected or bonus token.
    pub resample: Vec<f64>,
    /// Gumbel noise, by slot and token.
    pub gumbel: Vec<Vec<f64>>,
}

impl RoundNoise for Injected {
    fn draft(&self, slot: usize) -> f64 {
        self.draft.get(slot).copied().unwrap_or(0.0)
    }

    fn accept(&self, slot: usize) -> f64 {
        self.accept.get(slot).copied().unwrap_or(0.0)
    }

    fn resample(&self, slot: usize) -> f64 {
        self.resample.get(slot).copied().unwrap_or(0.0)
    }

    fn gumbel(&self, slot: usize, token: u32) -> f64 {
        let row = self.gumbel.get(slot);
        row.and_then(|row| row.get(token as usize)).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOISE: Noise = Noise { seed: 0x1234_5678_9abc_def0, sample: 2 };

    #[test]
    fn counters_hold_what_they_say() {
        let key = [0x9abc_def0, 0x1234_5678];
        let block = philox([7, 3, Purpose::Accept as u32, 2], key);
        let bits = ((u64::from(block[0]) << 32) | u64::from(block[1])) >> 11;
        let round = Counted::new(NOISE, 7);
        assert_eq!(round.accept(3), bits as f64 / (1u64 << 53) as f64);
        assert_eq!(round.gumbel(3, 9), NOISE.gumbel(11, 9));
        let streams = [round.draft(3), round.accept(3), round.resample(3)];
        assert!(streams[0] != streams[1] && streams[1] != streams[2] && streams[0] != streams[2]);
    }

    /// Mean and variance of 2^17 numbers are within 5 standard errors of those of uniform and Gumbel laws.
    #[test]
    fn moments() {
        let n = 1 << 17;
        let moments = |f: &dyn Fn(u32) -> f64| {
            let (sum, squares) = (0..n).fold((0.0, 0.0), |(s, q), i| {
                let x = f(i);
                (s + x, q + x * x)
            });
            let mean = sum / f64::from(n);
            (mean, squares / f64::from(n) - mean * mean)
        };
        let close = |found: f64, expected: f64, deviation: f64| {
            let error = deviation / f64::from(n).sqrt();
            assert!((found - expected).abs() < 5.0 * error, "{found} is not {expected}");
        };
        let (mean, variance) = moments(&|i| NOISE.uniform(i / 8, i % 8, Purpose::Draft));
        close(mean, 0.5, (1.0f64 / 12.0).sqrt());
        close(variance, 1.0 / 12.0, (1.0f64 / 180.0).sqrt());
        // Gumbel: mean gamma, variance pi^2/6, excess kurtosis 12/5.
        let (mean, variance) = moments(&|i| NOISE.gumbel(5, i));
        let expected = std::f64::consts::PI.powi(2) / 6.0;
        close(mean, 0.577_215_664_901_532_9, expected.sqrt());
        close(variance, expected, expected * (2.0f64 + 2.4).sqrt());
    }

    #[test]
    fn gumbel_noise_reaches_neither_end() {
        let (low, high) = (standard_gumbel(0), standard_gumbel(u64::MAX));
        assert!((low + (53.0 * std::f64::consts::LN_2).ln()).abs() < 1e-12);
        assert!((high - 53.0 * std::f64::consts::LN_2).abs() < 1e-12);
    }

    #[test]
    fn bounds_never_exceed_what_they_bound() {
        let round = Counted::new(NOISE, 40);
        let mut bounds = vec![0; 4096];
        round.gumbel_bounds(2, 1000, &mut bounds);
        for (i, &bound) in bounds.iter().enumerate() {
            let u = (-(-round.gumbel(2, 1000 + i as u32)).exp()).exp();
            let bound = f64::from(bound) * 2f64.powi(-32);
            assert!(bound <= 1.0 - u + 1e-12 && bound + 1e-9 >= 1.0 - u);
        }
    }
}
