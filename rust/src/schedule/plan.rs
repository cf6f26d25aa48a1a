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
//! | [`DelayedSearch::plan`] | a budget found by global search over an earlier round (section 5.2) | always |
//! | [`global`] | the best point of the whole list | with a [`Foresight`] only |

use std::collections::VecDeque;
use std::num::NonZeroUsize;

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
    /// A confidence is a probability.
    #[error("confidence {slot} of request {request} must be within 0 and 1, found {found}")]
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
/// Ties go to the earlier slot, then to the earlier request, never by the token: the order of a
/// token must not depend on the token. As confidences are at most 1, a block's own order is kept.
#[derive(Debug, Clone)]
pub struct Survivals {
    requests: usize,
    order: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    survival: f64,
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
        Ok(Self { requests: drafts.len(), order })
    }

    /// Lengths of the plan that admits the first `tokens` of the list.
    fn admit(&self, tokens: usize) -> Vec<usize> {
        let mut lengths = vec![0; self.requests];
        for candidate in self.order.iter().take(tokens) {
            lengths[candidate.request as usize] += 1;
        }
        lengths
    }
}

/// The walk along the list: expected tokens and seconds of the best plan so far.
///
/// "More throughput" is decided on the increments, g / dt > tau / t, which is the same as comparing
/// (tau + g) / (t + dt) with tau / t, but does not lose a small gain beside a large tau: on a flat table every
/// token that can survive is verified.
struct Walk<'a> {
    cost: &'a CostTable,
    requests: usize,
    tokens_per_step: f64,
    expected: f64,
    seconds: f64,
}

impl<'a> Walk<'a> {
    /// Starts at the plan that verifies nothing: one token for each request.
    fn new(cost: &'a CostTable, requests: usize, tokens_per_step: f64) -> Self {
        let seconds = cost.round_seconds(requests, requests);
        Self { cost, requests, tokens_per_step, expected: requests as f64, seconds }
    }

    /// Whether the plan of the first `steps` tokens, which expects `gain` more than the best so far,
    /// has a higher throughput; if so it becomes the best.
    fn improves(&mut self, steps: usize, gain: f64) -> bool {
        let tokens = self.requests + (steps as f64 * self.tokens_per_step).round() as usize;
        let seconds = self.cost.round_seconds(tokens, self.requests);
        let better = gain * self.seconds > self.expected * (seconds - self.seconds);
        if better {
            self.expected += gain;
            self.seconds = seconds;
        }
        better
    }
}

/// The paper's Algorithm 1: admits tokens while each raises the expected throughput, stops at the first
/// that does not. Whether a token is admitted depends on tokens before it in the list only, so this is
/// sound under every rule; it finds the best plan where the throughput has one peak.
pub fn causal(current: &Survivals, cost: &CostTable) -> Vec<usize> {
    let mut walk = Walk::new(cost, current.requests, 1.0);
    let admitted = (1..).zip(&current.order).take_while(|&(k, c)| walk.improves(k, c.survival)).count();
    current.admit(admitted)
}

/// Proof that looking ahead is harmless: the output is a function of the target alone.
///
/// Not `Clone`: ask again each round, because the requests of the batch change.
#[derive(Debug)]
pub struct Foresight(());

impl Foresight {
    /// Granted under [`Rule::Coupled`], where the text is a function of the seed, and where every request
    /// of the round has temperature 0, where it is the argmax. Under the ratio rules a search that looks
    /// ahead changes the distribution of the output (paper, Appendix A).
    pub fn allowed(rule: Rule, all_greedy: bool) -> Option<Self> {
        (all_greedy || matches!(rule, Rule::Coupled)).then_some(Self(()))
    }
}

/// The plan of the highest expected throughput, found over the whole list: it sees through plateaus and
/// steps of the cost table, and looks ahead at confidences of tokens that depend on the ones it drops.
pub fn global(current: &Survivals, cost: &CostTable, _proof: Foresight) -> Vec<usize> {
    let survivals = current.order.iter().map(|c| c.survival);
    current.admit(best_prefix(survivals, current.requests, 1.0, cost))
}

/// Number of tokens of the best plan, each of the list's tokens standing for `scale` tokens.
fn best_prefix(list: impl Iterator<Item = f64>, requests: usize, scale: f64, cost: &CostTable) -> usize {
    let mut walk = Walk::new(cost, requests, scale);
    let (mut best, mut gain) = (0, 0.0);
    for (k, survival) in (1..).zip(list) {
        gain += survival * scale;
        if walk.improves(k, gain) {
            (best, gain) = (k, 0.0);
        }
    }
    best
}

/// The global search made sound (paper, section 5.2): how many tokens to verify comes from an earlier
/// round, which ones from the current round's order.
///
/// Where the number of requests has changed since that round, each of its tokens stands for
/// "requests now / requests then" tokens. Until there is an earlier round, [`causal`] plans.
#[derive(Debug)]
pub struct DelayedSearch {
    lag: usize,
    earlier: VecDeque<Round>,
}

/// What is kept of a round.
#[derive(Debug)]
struct Round {
    requests: usize,
    survivals: Vec<f64>,
}

impl DelayedSearch {
    /// Budgets from `lag` rounds ago: 1 where the rounds run one after the other, 2 in the paper, whose
    /// next pass is laid out before the last one has ended.
    pub fn new(lag: NonZeroUsize) -> Self {
        Self { lag: lag.get(), earlier: VecDeque::with_capacity(lag.get() + 1) }
    }

    /// Plans a round and remembers it. Call it once for each round, whatever the round does with the plan.
    pub fn plan(&mut self, current: &Survivals, cost: &CostTable) -> Vec<usize> {
        let round = if self.earlier.len() == self.lag { self.earlier.pop_front() } else { None };
        let lengths = match round {
            Some(round) => current.admit(round.budget(current.requests, cost)),
            None => causal(current, cost),
        };
        if current.requests > 0 {
            let survivals = current.order.iter().map(|c| c.survival).collect();
            self.earlier.push_back(Round { requests: current.requests, survivals });
        }
        lengths
    }
}

impl Round {
    fn budget(&self, requests_now: usize, cost: &CostTable) -> usize {
        let scale = requests_now as f64 / self.requests as f64;
        let tokens = best_prefix(self.survivals.iter().copied(), requests_now, scale, cost);
        (tokens as f64 * scale).round() as usize
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
