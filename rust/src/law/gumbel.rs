//! The token with the largest sum of log-probability and Gumbel noise, found without taking two logarithms
//! for every token.
//!
//! With u the uniform number behind a token's noise and w the token's weight, logit + noise is -ln(E / w) for
//! the race time E = -ln u. Since -ln u >= 1 - u, a token whose 1 - u exceeds w times the best E / w so far
//! cannot win. Only the few tokens that can win are scored by the formula itself: the bound never decides.

use std::ops::Range;

use super::cdf::{BLOCK, Block};
use super::kernels::{self, GROUP};
use super::parallel::fold;
use super::real::Real;
use super::soft::{Ids, Soft};
use crate::noise::RoundNoise;

/// Room for rounding between the bound and the formula, relative to the race times.
const SLACK: f64 = 1.0 + 1e-4;

/// Fewer tokens than this in a window of the vocabulary are cheaper to score than to bound.
const FEW: usize = 16;

/// Leader of the race so far.
#[derive(Clone, Copy)]
struct Leader {
    score: f64,
    token: u32,
}

impl Leader {
    /// The leader after one more token.
    fn after(self, score: f64, token: u32) -> Self {
        if score > self.score || (score == self.score && token < self.token) {
            Leader { score, token }
        } else {
            self
        }
    }

    /// A token can win only if its 1 - u, in units of 2^-32, is at most this times its weight.
    fn limit(&self) -> f64 {
        (-self.score).exp() * SLACK * 2f64.powi(32)
    }
}

impl<F: Real> Soft<'_, F> {
    /// argmax of log p + noise, ties to the lowest id.
    pub fn gumbel_argmax(&self, noise: &dyn RoundNoise, slot: usize) -> u32 {
        let score = |i: usize, token| self.logits[i].log_weight(self.shift) + noise.gumbel(slot, token);
        // The most probable token makes a strong first leader.
        let first = F::position(&self.logits, self.shift.max).unwrap_or_default();
        let token = self.id(first);
        let leader = Leader { score: score(first, token), token };
        let race = |blocks: Range<usize>| self.race(noise, slot, &score, blocks, leader);
        fold(0..self.blocks(), &race, &|a: Leader, b: Leader| a.after(b.score, b.token)).token
    }

    /// The leader after the tokens of some blocks.
    fn race(
        &self,
        noise: &dyn RoundNoise,
        slot: usize,
        score: &impl Fn(usize, u32) -> f64,
        blocks: Range<usize>,
        mut leader: Leader,
    ) -> Leader {
        let mut weights = [0.0; BLOCK];
        let mut bounds = [0; BLOCK];
        let mut window = [0; BLOCK];
        for block in blocks {
            let (ids, run) = self.block(Block(block));
            let (weights, bounds) = (&mut weights[..run.len()], &mut bounds[..run.len()]);
            F::weights(run, self.shift, 1.0, weights);
            match ids {
                Ids::From(first) => noise.gumbel_bounds(slot, first, bounds),
                Ids::Listed(ids) => gather_bounds(noise, slot, ids, &mut window, bounds),
            }
            for start in (0..run.len()).step_by(GROUP) {
                let group = start..(start + GROUP).min(run.len());
                let (weights, bounds) = (&weights[group.clone()], &bounds[group]);
                let limit = leader.limit();
                if !kernels::any_within(bounds, weights, limit) {
                    continue;
                }
                for (i, (&weight, &bound)) in weights.iter().zip(bounds).enumerate() {
                    if weight > 0.0 && f64::from(bound) <= limit * weight {
                        let index = block * BLOCK + start + i;
                        let token = self.id(index);
                        leader = leader.after(score(index, token), token);
                    }
                }
            }
        }
        leader
    }
}

/// Computes the bounds of listed tokens window by window of the vocabulary; sparse windows get the bound 0.
fn gather_bounds(
    noise: &dyn RoundNoise,
    slot: usize,
    ids: &[u32],
    window: &mut [u32; BLOCK],
    bounds: &mut [u32],
) {
    let same_window = |a: &u32, b: &u32| *a as usize / BLOCK == *b as usize / BLOCK;
    let mut rest = bounds;
    for run in ids.chunk_by(same_window) {
        let (bounds, behind) = rest.split_at_mut(run.len());
        rest = behind;
        if run.len() < FEW {
            bounds.fill(0);
            continue;
        }
        let first = run[0] / BLOCK as u32 * BLOCK as u32;
        noise.gumbel_bounds(slot, first, window);
        for (bound, &id) in bounds.iter_mut().zip(run) {
            *bound = window[(id - first) as usize];
        }
    }
}
