//! The residual of two laws, max(factor * p - q, 0): what the target wants and the draft did not offer.

use std::ops::Range;

use super::cdf::{BLOCK, Block, find};
use super::kernels;
use super::parallel::fill;
use super::real::Real;
use super::soft::{Ids, Soft};
use super::workspace::Workspace;
use super::{Form, Law};

impl Law<'_> {
    /// Mass of the residual: the sum over all tokens of max(factor * p - q, 0), p being this law.
    pub fn residual_mass(&self, q: &Law<'_>, factor: f64, workspace: &mut Workspace) -> f64 {
        match &self.0 {
            Form::Point(token) => (factor - q.prob(*token)).max(0.0),
            Form::F32(p) => p.residual_mass(q, factor, workspace),
            Form::F64(p) => p.residual_mass(q, factor, workspace),
        }
    }

    /// Draws a token from the residual by inverting its cumulative distribution function at `u`, or from this
    /// law itself if the residual has no mass.
    pub fn draw_residual(&self, q: &Law<'_>, factor: f64, u: f64, workspace: &mut Workspace) -> u32 {
        match &self.0 {
            Form::Point(token) => *token,
            Form::F32(p) => p.draw_residual(q, factor, u, workspace),
            Form::F64(p) => p.draw_residual(q, factor, u, workspace),
        }
    }

    /// Probabilities of a run of tokens.
    fn probs(&self, tokens: Ids<'_>, out: &mut [f64]) {
        match &self.0 {
            Form::F32(soft) => soft.probs(tokens, out),
            Form::F64(soft) => soft.probs(tokens, out),
            Form::Point(token) => {
                out.fill(0.0);
                let place = match tokens {
                    Ids::From(first) => token.checked_sub(first).map(|i| i as usize),
                    Ids::Listed(tokens) => tokens.binary_search(token).ok(),
                };
                if let Some(out) = place.and_then(|i| out.get_mut(i)) {
                    *out = 1.0;
                }
            }
        }
    }
}

impl<F: Real> Soft<'_, F> {
    fn residual_mass(&self, q: &Law<'_>, factor: f64, workspace: &mut Workspace) -> f64 {
        let sums = self.residual_sums(q, factor, workspace);
        let mass = sums.iter().sum();
        workspace.doubles.push(sums);
        mass
    }

    fn draw_residual(&self, q: &Law<'_>, factor: f64, u: f64, workspace: &mut Workspace) -> u32 {
        let sums = self.residual_sums(q, factor, workspace);
        let mass: f64 = sums.iter().sum();
        let token = if mass > 0.0 {
            self.id(find(u * mass, &sums, |block, out| {
                self.residual_block(q, factor, block, out, &mut [0.0; BLOCK]);
            }))
        } else {
            self.draw(u)
        };
        workspace.doubles.push(sums);
        token
    }

    /// Sums of the residual by block.
    fn residual_sums(&self, q: &Law<'_>, factor: f64, workspace: &mut Workspace) -> Vec<f64> {
        let mut sums = workspace.take_doubles();
        sums.resize(self.blocks(), 0.0);
        fill(&mut sums, 0, &|blocks: Range<usize>, sums: &mut [f64]| {
            let (mut out, mut scratch) = ([0.0; BLOCK], [0.0; BLOCK]);
            for (i, sum) in blocks.zip(sums) {
                *sum = self.residual_block(q, factor, Block(i), &mut out, &mut scratch);
            }
        });
        sums
    }

    /// Writes the residual of the tokens of one block and returns its sum.
    fn residual_block(
        &self,
        q: &Law<'_>,
        factor: f64,
        block: Block,
        out: &mut [f64; BLOCK],
        scratch: &mut [f64; BLOCK],
    ) -> f64 {
        let (tokens, logits) = self.block(block);
        let (p_block, q_block) = (&mut out[..logits.len()], &mut scratch[..logits.len()]);
        F::weights(logits, self.shift, self.scale(), p_block);
        q.probs(tokens, q_block);
        kernels::excess(factor, p_block, q_block)
    }
}
