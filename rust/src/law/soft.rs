//! A law with more than one possible token: logits, and the sums of their weights by block.

use std::borrow::Cow;

use super::cdf::{BLOCK, Block, find};
use super::real::{Real, Shift};
use super::workspace::Workspace;

/// Probabilities proportional to the weights of `logits`.
#[derive(Debug)]
pub(super) struct Soft<'a, F: Real> {
    pub logits: Cow<'a, [F]>,
    /// Ascending ids of the logits; absent if the logit of token `i` is the `i`-th.
    pub ids: Option<Vec<u32>>,
    pub shift: Shift<F>,
    /// Sum of the weights of each run of `BLOCK` logits.
    sums: Vec<f64>,
    /// Sum of all weights.
    pub total: f64,
}

/// The tokens that a run of logits belongs to.
#[derive(Clone, Copy)]
pub(super) enum Ids<'a> {
    /// `first`, `first + 1`, ...
    From(u32),
    /// Ascending.
    Listed(&'a [u32]),
}

impl<'a, F: Real> Soft<'a, F> {
    /// `logits` has a finite largest element, `shift.max`, and no NaN.
    pub fn new(
        logits: Cow<'a, [F]>,
        ids: Option<Vec<u32>>,
        shift: Shift<F>,
        workspace: &mut Workspace,
    ) -> Self {
        let mut sums = workspace.take_doubles();
        sums.extend(logits.chunks(BLOCK).map(|run| F::weight_sum(run, shift)));
        let total = sums.iter().sum();
        Self { logits, ids, shift, sums, total }
    }

    pub fn recycle(self, workspace: &mut Workspace) {
        if let Cow::Owned(logits) = self.logits {
            F::pool(workspace).push(logits);
        }
        workspace.ids.extend(self.ids);
        workspace.doubles.push(self.sums);
    }

    /// What a weight is multiplied with to give a probability.
    pub fn scale(&self) -> f64 {
        1.0 / self.total
    }

    /// Where the logit of a token stands, if it has one.
    pub fn index(&self, token: u32) -> Option<usize> {
        match &self.ids {
            None => Some(token as usize).filter(|&i| i < self.logits.len()),
            Some(ids) => ids.binary_search(&token).ok(),
        }
    }

    /// The token that a logit belongs to.
    pub fn id(&self, index: usize) -> u32 {
        match &self.ids {
            None => index as u32,
            Some(ids) => ids[index],
        }
    }

    pub fn prob(&self, token: u32) -> f64 {
        let weight = self.index(token).map_or(0.0, |i| F::weight(self.logits[i], self.shift));
        weight * self.scale()
    }

    pub fn log_prob(&self, token: u32) -> f64 {
        match self.index(token) {
            Some(i) => self.logits[i].log_weight(self.shift) - self.total.ln(),
            None => f64::NEG_INFINITY,
        }
    }

    /// Inverse of the distribution function in ascending id.
    pub fn draw(&self, u: f64) -> u32 {
        let index = find(u * self.total, &self.sums, |block, weights| {
            let run = &self.logits[block.range(self.logits.len())];
            F::weights(run, self.shift, 1.0, &mut weights[..run.len()]);
        });
        self.id(index)
    }

    /// Runs of logits in order, with their tokens.
    pub fn block(&self, block: Block) -> (Ids<'_>, &[F]) {
        let range = block.range(self.logits.len());
        let ids = match &self.ids {
            None => Ids::From(range.start as u32),
            Some(ids) => Ids::Listed(&ids[range.clone()]),
        };
        (ids, &self.logits[range])
    }

    /// Number of runs that [`Soft::block`] gives.
    pub fn blocks(&self) -> usize {
        self.sums.len()
    }

    /// Probabilities of the tokens of a run.
    pub fn probs(&self, tokens: Ids<'_>, out: &mut [f64]) {
        match (tokens, &self.ids) {
            (Ids::From(first), None) => {
                // Tokens past the end of the vocabulary have no logit and no probability.
                let start = (first as usize).min(self.logits.len());
                let end = (start + out.len()).min(self.logits.len());
                let (inside, outside) = out.split_at_mut(end - start);
                F::weights(&self.logits[start..end], self.shift, self.scale(), inside);
                outside.fill(0.0);
            }
            (Ids::From(first), Some(ids)) => {
                out.fill(0.0);
                let start = ids.partition_point(|&id| id < first);
                for (&id, &logit) in ids[start..].iter().zip(&self.logits[start..]) {
                    let Some(out) = out.get_mut((id - first) as usize) else { break };
                    *out = F::weight(logit, self.shift) * self.scale();
                }
            }
            (Ids::Listed(tokens), _) => {
                for (out, &token) in out.iter_mut().zip(tokens) {
                    *out = self.prob(token);
                }
            }
        }
    }

    /// The same law without a borrowed row.
    pub fn into_owned(self) -> Soft<'static, F> {
        Soft {
            logits: Cow::Owned(self.logits.into_owned()),
            ids: self.ids,
            shift: self.shift,
            sums: self.sums,
            total: self.total,
        }
    }
}
