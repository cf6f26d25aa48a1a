//! A law with more than one possible token: logits, and the sums of their weights by block.

use std::borrow::Cow;
use std::ops::Range;

use super::cdf::{BLOCK, Block, find};
use super::parallel::fill;
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
        sums.resize(logits.len().div_ceil(BLOCK), 0.0);
        fill(&mut sums, 0, &|blocks: Range<usize>, sums: &mut [f64]| {
            for (i, sum) in blocks.zip(sums) {
                *sum = F::weight_sum(&logits[Block(i).range(logits.len())], shift);
            }
        });
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

    /// The factor that turns a weight into a probability.
    pub fn scale(&self) -> f64 {
        1.0 / self.total
    }

    /// Index of a token's logit, if it has one.
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

    /// Inverts the cumulative distribution function, in ascending id.
    pub fn draw(&self, u: f64) -> u32 {
        let index = find(u * self.total, &self.sums, |block, weights| {
            let run = &self.logits[block.range(self.logits.len())];
            F::weights(run, self.shift, 1.0, &mut weights[..run.len()]);
        });
        self.id(index)
    }

    /// The logits of one block, with their tokens.
    pub fn block(&self, block: Block) -> (Ids<'_>, &[F]) {
        let range = block.range(self.logits.len());
        let ids = match &self.ids {
            None => Ids::From(range.start as u32),
            Some(ids) => Ids::Listed(&ids[range.clone()]),
        };
        (ids, &self.logits[range])
    }

    /// Number of blocks for [`Soft::block`].
    pub fn blocks(&self) -> usize {
        self.sums.len()
    }

    /// Probabilities of the tokens of a run of at most `BLOCK`.
    pub fn probs(&self, tokens: Ids<'_>, out: &mut [f64]) {
        if let (Ids::From(first), None) = (tokens, &self.ids)
            && let Some(logits) = self.logits.get(first as usize..first as usize + out.len())
        {
            return F::weights(logits, self.shift, self.scale(), out);
        }
        let mut logits = [F::NEG_INFINITY; BLOCK];
        let logits = &mut logits[..out.len()];
        self.gather(tokens, logits);
        F::weights(logits, self.shift, self.scale(), out);
    }

    /// Writes the logits of the tokens that have one; the entries of the others stay as they are.
    fn gather(&self, tokens: Ids<'_>, out: &mut [F]) {
        match (tokens, &self.ids) {
            (Ids::From(first), None) => {
                let behind = self.logits.iter().skip(first as usize);
                out.iter_mut().zip(behind).for_each(|(out, logit)| *out = *logit);
            }
            (Ids::Listed(tokens), None) => {
                for (out, &token) in out.iter_mut().zip(tokens) {
                    *out = self.logits.get(token as usize).copied().unwrap_or(*out);
                }
            }
            (Ids::From(first), Some(ids)) => {
                let start = ids.partition_point(|&id| id < first);
                for (&id, &logit) in ids[start..].iter().zip(&self.logits[start..]) {
                    let Some(out) = out.get_mut((id - first) as usize) else { break };
                    *out = logit;
                }
            }
            (Ids::Listed(tokens), Some(ids)) => {
                let first = tokens.first().copied().unwrap_or_default();
                let mut at = ids.partition_point(|&id| id < first);
                for (out, token) in out.iter_mut().zip(tokens) {
                    at += ids[at..].iter().take_while(|id| *id < token).count();
                    if ids.get(at) == Some(token) {
                        *out = self.logits[at];
                    }
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
