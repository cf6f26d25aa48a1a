//! Verify lengths of a batch: which drafted tokens are worth a place in the target pass.
//!
//! Everything here walks one list, the batch's drafted tokens by falling survival (the probability that
//! the token and all before it in its block are kept). For a fixed number of tokens the best choice is
//! always the head of that list (paper, section 3.2.2), so a plan is a number: how far to walk. What
//! differs is what that number may depend on:
//!
//! | function | walks until | sound |
//! |---|---|---|
//! | [`causal`] | the expected throughput stops rising (Algorithm 1) | always |
//! | [`patient`] | the same, but walks on through a step that past rounds say is worth it | always |
//! | [`DelayedSearch::plan`](super::DelayedSearch::plan) | a budget found by global search over an earlier round (section 5.2) | always |
//! | [`global`] | the best point of the whole list | with a [`Foresight`] only |

use thiserror::Error;

use super::cost::CostTable;
use crate::accept::Rule;

/// One request's drafted block, as the plan sees it.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// Drafted tokens.
    pub drafted: usize,
    /// The most that this request may verify: what is left of its budget and of its window.
    pub limit: usize,
    /// c_k of each drafted token, calibrated; [`fixed`] does not read them.
    pub confidences: &'a [f32],
}

/// Why a plan by survival cannot be made.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum PlanError {
    /// The draft has no confidence head, or its confidences are of another block.
    #[error("request {request} drafted {drafted} tokens but has {found} confidences")]
    Count {
        /// Position in the batch.
        request: usize,
        /// Drafted tokens.
        drafted: usize,
        /// Confidences given.
        found: usize,
    },
    /// A confidence is not a probability.
    #[error("confidence {slot} of request {request} must be between 0 and 1, found {found}")]
    Confidence {
        /// Position in the batch.
        request: usize,
        /// Position in the block, from 0.
        slot: usize,
        /// What was given.
        found: f32,
    },
}

/// Verifies what was drafted, at most `width` tokens of each request.
pub fn fixed(drafts: &[Draft], width: usize) -> Vec<usize> {
    drafts.iter().map(|d| d.drafted.min(d.limit).min(width)).collect()
}

/// The drafted tokens of a round by falling survival.
///
/// Ties go to the earlier slot, then to the earlier request, and never depend on the tokens: a token's place
/// must not depend on the token itself. As confidences are at most 1, a block's own order is kept.
#[derive(Debug, Clone)]
pub struct Survivals {
    requests: usize,
    /// Requests that drafted.
    pub(super) drafting: usize,
    /// What the round has cost already.
    paid: f64,
    pub(super) order: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) survival: f64,
    slot: u32,
    request: u32,
}

impl Survivals {
    /// Survival of every token that may be verified. Tokens that cannot survive are left out
    /// (Algorithm 1, line 4), and so are those beyond the request's limit.
    ///
    /// # Errors
    /// [`PlanError`] unless there is one confidence within [0, 1] for every drafted token.
    pub fn new(drafts: &[Draft]) -> Result<Self, PlanError> {
        let mut order = Vec::with_capacity(drafts.iter().map(|d| d.drafted.min(d.limit)).sum());
        for (request, draft) in drafts.iter().enumerate() {
            let (drafted, found) = (draft.drafted, draft.confidences.len());
            if found != drafted {
                return Err(PlanError::Count { request, drafted, found });
            }
            let mut survival = 1.0;
            for (slot, &found) in draft.confidences.iter().enumerate() {
                if !(0.0..=1.0).contains(&found) {
                    return Err(PlanError::Confidence { request, slot, found });
                }
                survival *= f64::from(found);
                if slot < draft.limit && survival > 0.0 {
                    order.push(Candidate { survival, slot: slot as u32, request: request as u32 });
                }
            }
        }
        order.sort_unstable_by(|a, b| {
            b.survival.total_cmp(&a.survival).then(a.slot.cmp(&b.slot)).then(a.request.cmp(&b.request))
        });
        let drafting = drafts.iter().filter(|draft| draft.drafted > 0).count();
        Ok(Self { requests: drafts.len(), drafting, paid: 0.0, order })
    }

    /// The same in a round that has cost `seconds` before its target pass: a round that was expensive to
    /// draft verifies more, because stopping early saves a smaller part of it.
    pub fn paid(mut self, seconds: f64) -> Self {
        self.paid = seconds;
        self
    }

    /// Lengths of the plan that admits the first `tokens` of the list.
    pub(super) fn admit(&self, tokens: usize) -> Vec<usize> {
        let mut lengths = vec![0; self.requests];
        for candidate in self.order.iter().take(tokens) {
            lengths[candidate.request as usize] += 1;
        }
        lengths
    }
}

/// The walk along the list: expected tokens and seconds of the best plan so far.
///
/// "More throughput" is decided on the increments, g / dt > tau / t, which is the same as comparing (tau + g)
/// / (t + dt) with tau / t, but does not lose a small gain beside a large tau: on a flat table every token
/// that can survive is verified.
struct Walk<F> {
    pass: F,
    /// What the round costs beside its tokens.
    fixed: f64,
    requests: usize,
    tokens_per_step: f64,
    expected: f64,
    seconds: f64,
}

/// Starts at the plan that verifies nothing: one token for each request.
fn walk(cost: &CostTable, current: &Survivals, tokens_per_step: f64) -> Walk<impl FnMut(f64) -> f64> {
    let requests = current.requests;
    let mut pass = cost.pass.walk();
    let fixed = cost.fixed_seconds + cost.request_seconds * requests as f64 + current.paid;
    let seconds = pass(requests as f64) + fixed;
    Walk { pass, fixed, requests, tokens_per_step, expected: requests as f64, seconds }
}

impl<F: FnMut(f64) -> f64> Walk<F> {
    /// Whether the plan of the first `steps` tokens, which expects `gain` more than the best so far,
    /// has a higher throughput; if so it becomes the best.
    fn improves(&mut self, steps: usize, gain: f64) -> bool {
        let tokens = self.requests + (steps as f64 * self.tokens_per_step).round() as usize;
        let seconds = (self.pass)(tokens as f64) + self.fixed;
        let better = gain * self.seconds > self.expected * (seconds - self.seconds);
        if better {
            self.expected += gain;
            self.seconds = seconds;
        }
        better
    }
}

/// The paper's Algorithm 1: admits tokens while each raises the expected throughput, stops at the first that
/// does not. Whether a token is admitted depends only on tokens before it in the list, so this is sound under
/// every rule; it finds the best plan if the throughput has one peak.
pub fn causal(current: &Survivals, cost: &CostTable) -> Vec<usize> {
    let mut walk = walk(cost, current, 1.0);
    let admitted = (1..).zip(&current.order).take_while(|&(k, c)| walk.improves(k, c.survival)).count();
    current.admit(admitted)
}

/// [`causal`] with the patience to walk through a step of the cost table.
///
/// `horizon[k]` is the gain that past rounds predict for the first k tokens of the list, to the end of the
/// plan made from them ([`super::Choice`]). If a token does not raise the throughput, the walk continues as
/// long as the rest of that plan would raise it, with its gain scaled by the ratio of the token's survival to
/// the expected one. Tokens passed in this hope stay admitted, whether or not it comes true: taking them back
/// would be looking ahead. Whether a token is admitted still depends only on past rounds and on tokens before
/// it in the list.
pub fn patient(current: &Survivals, cost: &CostTable, horizon: &[f64]) -> Vec<usize> {
    let end = horizon.len().saturating_sub(1);
    let mut walk = walk(cost, current, 1.0);
    let seconds_at_end = cost.pass.at((current.requests + end) as f64) + walk.fixed;
    let (mut admitted, mut gain) = (0, 0.0);
    for (k, candidate) in (1..).zip(&current.order) {
        gain += candidate.survival;
        if walk.improves(k, gain) {
            gain = 0.0;
        } else {
            if k >= end {
                break;
            }
            let expected = (horizon[k] - horizon[k - 1]).max(f64::MIN_POSITIVE);
            let rest = (horizon[end] - horizon[k]) * (candidate.survival / expected);
            let rest = rest.min(candidate.survival * (end - k) as f64);
            if (gain + rest) * walk.seconds <= walk.expected * (seconds_at_end - walk.seconds) {
                break;
            }
        }
        admitted = k;
    }
    current.admit(admitted)
}

/// Proof that looking ahead is harmless: the output is a function of the target alone.
///
/// Not `Clone`: ask again each round, because the requests of the batch change.
#[derive(Debug)]
pub struct Foresight(());

impl Foresight {
    /// Granted under [`Rule::Coupled`], where the text is a function of the seed, and if every request of the
    /// round has temperature 0, where each token is the argmax. Under the ratio rules a search that looks
    /// ahead changes the distribution of the output (paper, Appendix A).
    pub fn allowed(rule: Rule, all_greedy: bool) -> Option<Self> {
        (all_greedy || matches!(rule, Rule::Coupled)).then_some(Self(()))
    }
}

/// The plan of the highest expected throughput, found over the whole list: the search does not stop at
/// plateaus and steps of the cost table, but looks ahead at confidences of tokens that depend on the ones it
/// drops.
pub fn global(current: &Survivals, cost: &CostTable, _proof: Foresight) -> Vec<usize> {
    let survivals = current.order.iter().map(|c| c.survival);
    current.admit(best_prefix(survivals, current, 1.0, cost))
}

/// Number of tokens in the best plan, where each of the list's tokens stands for `scale` tokens.
pub(super) fn best_prefix(
    list: impl Iterator<Item = f64>,
    current: &Survivals,
    scale: f64,
    cost: &CostTable,
) -> usize {
    let mut walk = walk(cost, current, scale);
    let (mut best, mut gain) = (0, 0.0);
    for (k, survival) in (1..).zip(list) {
        gain += survival * scale;
        if walk.improves(k, gain) {
            (best, gain) = (k, 0.0);
        }
    }
    best
}

#[cfg(test)]
#[path = "plan_tests.rs"]
pub(super) mod tests;

#[cfg(test)]
#[path = "patient_tests.rs"]
mod patient_tests;
