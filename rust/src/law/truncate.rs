//! top-k, top-p and min-p: which tokens of a row stay possible.

use std::cmp::Ordering;

use super::cdf::BLOCK;
use super::kernels::GROUP;
use super::real::{Real, Shift};
use super::workspace::Workspace;
use crate::params::SamplingParams;

/// How much of the top of a row is kept.
#[derive(Clone, Copy)]
pub(super) enum Budget {
    /// This many tokens.
    Tokens(usize),
    /// The tokens that reach this share of the row's mass, below 1.
    Share(f64),
}

/// What a token takes from a budget: one, or its weight.
#[derive(Clone, Copy)]
enum Measure {
    Tokens,
    Weight,
}

/// Whether top-k, top-p or min-p is switched on for a row of `len` tokens.
pub(super) fn truncates(params: &SamplingParams, len: usize) -> bool {
    cuts_tokens(params, len) || params.top_p < 1.0 || params.min_p > 0.0
}

fn cuts_tokens(params: &SamplingParams, len: usize) -> bool {
    params.top_k > 0 && (params.top_k as usize) < len
}

/// Ascending indices of the logits that stay; the largest is always among them.
///
/// Each step sees only what the previous one kept. Among equal logits the lower ids stay, so `top_k` keeps no
/// more than `k` tokens, and `top_k = 1` is greedy.
pub(super) fn truncate<F: Real>(
    logits: &[F],
    shift: Shift<F>,
    params: &SamplingParams,
    workspace: &mut Workspace,
) -> Vec<u32> {
    let mut kept = None;
    if cuts_tokens(params, logits.len()) {
        let budget = Budget::Tokens(params.top_k as usize);
        kept = Some(keep_top(logits, shift, budget, workspace));
    }
    if params.top_p < 1.0 {
        let budget = Budget::Share(params.top_p);
        kept = Some(match kept {
            None => keep_top(logits, shift, budget, workspace),
            Some(indices) => keep_top_among(logits, shift, indices, budget, workspace),
        });
    }
    if params.min_p > 0.0 {
        // The largest weight is 1. The floor is a little too low on purpose: the weights themselves decide.
        let mut stay = kept.unwrap_or_else(|| at_least(logits, shift, params.min_p.ln() - SLACK, workspace));
        stay.retain(|&i| F::weight(logits[i as usize], shift) >= params.min_p);
        kept = Some(stay);
    }
    kept.unwrap_or_default()
}

/// [`keep_top`] of some logits only, given by ascending indices.
fn keep_top_among<F: Real>(
    logits: &[F],
    shift: Shift<F>,
    indices: Vec<u32>,
    budget: Budget,
    workspace: &mut Workspace,
) -> Vec<u32> {
    let mut among = F::take(workspace);
    among.extend(indices.iter().map(|&i| logits[i as usize]));
    let mut kept = keep_top(&among, shift, budget, workspace);
    for place in &mut kept {
        *place = indices[*place as usize];
    }
    F::pool(workspace).push(among);
    workspace.ids.push(indices);
    kept
}

/// Room for rounding where a logarithm of a weight is compared with a floor.
const SLACK: f64 = 1e-3;

/// Ascending indices of the largest logits. In the order of falling logits and rising index, a logit stays if
/// those ahead of it measure less than the budget. The first always stays, minus infinity never.
pub(super) fn keep_top<F: Real>(
    logits: &[F],
    shift: Shift<F>,
    budget: Budget,
    workspace: &mut Workspace,
) -> Vec<u32> {
    let (floor, measure, budget) = match budget {
        Budget::Tokens(count) => {
            (floor_of_count(logits, shift, count, workspace), Measure::Tokens, count as f64)
        }
        Budget::Share(share) => {
            let total: f64 = logits.chunks(BLOCK).map(|run| F::weight_sum(run, shift)).sum();
            // All tokens below this floor together weigh less than what may be left out.
            let left_out = (1.0 - share) * total;
            let floor = (left_out / logits.len() as f64).ln() - SLACK;
            (floor, Measure::Weight, share * total)
        }
    };
    let mut kept = at_least(logits, shift, floor, workspace);
    let mut among = F::take(workspace);
    among.extend(kept.iter().map(|&i| logits[i as usize]));
    if let Some(last) = last_within(&among, shift, measure, budget, workspace) {
        let least = among[last];
        let mut n = 0;
        for (place, &logit) in among.iter().enumerate() {
            kept[n] = kept[place];
            n += usize::from(logit > least || (logit == least && place <= last));
        }
        kept.truncate(n);
    }
    F::pool(workspace).push(among);
    kept
}

/// A log weight that at least `count` tokens reach: the `count`-th largest among the maxima of groups.
fn floor_of_count<F: Real>(logits: &[F], shift: Shift<F>, count: usize, workspace: &mut Workspace) -> f64 {
    let groups = logits.len().div_ceil(GROUP);
    if count == 0 || count > groups {
        return f64::NEG_INFINITY;
    }
    let mut maxima = group_maxima(logits, workspace);
    let falling = |a: &F, b: &F| b.partial_cmp(a).unwrap_or(Ordering::Equal);
    let (_, least, _) = maxima.select_nth_unstable_by(count - 1, falling);
    let floor = least.log_weight(shift);
    F::pool(workspace).push(maxima);
    floor
}

fn group_maxima<F: Real>(logits: &[F], workspace: &mut Workspace) -> Vec<F> {
    let mut maxima = F::take(workspace);
    maxima.resize(logits.len().div_ceil(GROUP), F::ZERO);
    F::group_maxima(logits, &mut maxima);
    maxima
}

/// Ascending indices of the logits above minus infinity whose log weight reaches `floor`.
fn at_least<F: Real>(logits: &[F], shift: Shift<F>, floor: f64, workspace: &mut Workspace) -> Vec<u32> {
    let mut found = workspace.take_ids();
    let maxima = group_maxima(logits, workspace);
    for (group, (run, max)) in logits.chunks(GROUP).zip(&maxima).enumerate() {
        if max.log_weight(shift) < floor {
            continue;
        }
        // Without branches: which logits are found cannot be predicted.
        let (mut hits, mut n) = ([0; GROUP], 0);
        for (x, i) in run.iter().zip((group * GROUP) as u32..) {
            hits[n] = i;
            n += usize::from(x.log_weight(shift) >= floor && *x > F::NEG_INFINITY);
        }
        found.extend_from_slice(&hits[..n]);
    }
    F::pool(workspace).push(maxima);
    found
}

/// Buckets of `1 / PER_NAT` nats, down from the largest logit; the last holds everything farther down.
const PER_NAT: f64 = 64.0;
const BUCKETS: usize = 64 * 40;

fn bucket(log_weight: f64) -> usize {
    ((-log_weight * PER_NAT) as usize).min(BUCKETS - 1)
}

/// Index in `among` of the last logit that stays; none if all stay.
///
/// First finds the bucket in which the budget runs out, so that only this one has to be sorted.
fn last_within<F: Real>(
    among: &[F],
    shift: Shift<F>,
    measure: Measure,
    budget: f64,
    workspace: &mut Workspace,
) -> Option<usize> {
    let bucket = |logit: F| bucket(logit.log_weight(shift));
    let mut buckets = workspace.take_doubles();
    buckets.resize(BUCKETS, 0.0);
    let mut measured = [1.0; BLOCK];
    for run in among.chunks(BLOCK) {
        if let Measure::Weight = measure {
            F::weights(run, shift, 1.0, &mut measured[..run.len()]);
        }
        for (&logit, measured) in run.iter().zip(&measured) {
            buckets[bucket(logit)] += measured;
        }
    }
    let mut ahead = 0.0;
    let border = buckets.iter().position(|&sum| {
        let runs_out = ahead + sum >= budget;
        if !runs_out {
            ahead += sum;
        }
        runs_out
    });
    workspace.doubles.push(buckets);
    let border = border?;

    let mut order = workspace.take_ids();
    order.extend((0..among.len() as u32).filter(|&i| bucket(among[i as usize]) == border));
    // The sort is stable, indices ascend before it, and the two zeros compare as equal.
    let logit = |i: &u32| among[*i as usize];
    order.sort_by(|a, b| logit(b).partial_cmp(&logit(a)).unwrap_or(Ordering::Equal));
    let within = order.iter().position(|i| {
        ahead += match measure {
            Measure::Tokens => 1.0,
            Measure::Weight => F::weight(logit(i), shift),
        };
        ahead >= budget
    });
    // Added in another order, the sum may fall short of the bucket's by a rounding error.
    let last = within.map_or(order.last(), |n| order.get(n)).map(|&i| i as usize);
    workspace.ids.push(order);
    last
}
