use std::num::NonZeroUsize;

use super::super::delayed::DelayedSearch;
use super::*;
use proptest::prelude::*;

fn drafts(confidences: &[Vec<f32>]) -> Vec<Draft<'_>> {
    confidences.iter().map(|c| Draft { drafted: c.len(), limit: c.len(), confidences: c }).collect()
}

pub(in crate::schedule) fn survivals(confidences: &[Vec<f32>]) -> Survivals {
    Survivals::new(&drafts(confidences)).unwrap()
}

/// Expected tokens per second of a plan, written down again from the paper.
pub(super) fn throughput(confidences: &[Vec<f32>], lengths: &[usize], cost: &CostTable) -> f64 {
    let survival = |c: &[f32], slot: usize| c[..=slot].iter().map(|&c| f64::from(c)).product::<f64>();
    let tau: f64 = confidences
        .iter()
        .zip(lengths)
        .map(|(c, &length)| 1.0 + (0..length).map(|slot| survival(c, slot)).sum::<f64>())
        .sum();
    let tokens = lengths.iter().map(|l| 1 + l).sum();
    tau / cost.round_seconds(tokens, lengths.len())
}

/// The best throughput over all combinations of lengths.
pub(super) fn brute_force(confidences: &[Vec<f32>], cost: &CostTable) -> f64 {
    let mut best = 0.0f64;
    let mut lengths = vec![0; confidences.len()];
    loop {
        best = best.max(throughput(confidences, &lengths, cost));
        let Some(r) = (0..lengths.len()).find(|&r| lengths[r] < confidences[r].len()) else { return best };
        lengths[..r].fill(0);
        lengths[r] += 1;
    }
}

/// The paper's Appendix A: one request, two drafted tokens, SPS 1, 0.5 and 0.45.
fn appendix_a() -> CostTable {
    CostTable::new(&[(1, 1.0), (2, 1.0 / 0.5), (3, 1.0 / 0.45)]).unwrap()
}

/// Law of the first output token in Appendix A under a plan: the draft proposes A or B with probability
/// 1/2; a verified token is accepted with min(1, p/q) or replaced from max(p - q, 0), which is all on A;
/// where nothing is verified the target draws from p.
fn appendix_a_law(plan: impl Fn(&Survivals, &CostTable) -> Vec<usize>) -> [f64; 2] {
    let (p, q) = ([0.7, 0.3], [0.5, 0.5]);
    let second_confidence = [0.9, 0.0];
    let mut law = [0.0; 2];
    for drafted in 0..2 {
        let block = survivals(&[vec![0.8, second_confidence[drafted]]]);
        if plan(&block, &appendix_a())[0] == 0 {
            law[0] += q[drafted] * p[0];
            law[1] += q[drafted] * p[1];
        } else {
            let accepted = f64::min(1.0, p[drafted] / q[drafted]);
            law[drafted] += q[drafted] * accepted;
            law[0] += q[drafted] * (1.0 - accepted);
        }
    }
    law
}

#[test]
fn appendix_a_is_exact_without_foresight_and_biased_with_it() {
    let close =
        |law: [f64; 2], expected: [f64; 2]| law.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
    let law = appendix_a_law(causal);
    assert!(close(law, [0.70, 0.30]), "{law:?}");
    for budget_round in [0.9, 0.0] {
        let law = appendix_a_law(|block, cost| {
            let mut search = DelayedSearch::new(NonZeroUsize::MIN);
            search.plan(&survivals(&[vec![0.8, budget_round]]), cost);
            search.plan(block, cost)
        });
        assert!(close(law, [0.70, 0.30]), "{law:?}");
    }
    // What the type forbids: the search that looks ahead under a ratio rule.
    let law = appendix_a_law(|block, cost| global(block, cost, Foresight(())));
    assert!(close(law, [0.85, 0.15]), "{law:?}");
}

#[test]
fn foresight_is_granted_only_where_the_output_cannot_feel_it() {
    assert!(Foresight::allowed(Rule::Rejection, false).is_none());
    assert!(Foresight::allowed(Rule::Block, false).is_none());
    assert!(Foresight::allowed(Rule::Coupled, false).is_some());
    assert!(Foresight::allowed(Rule::Rejection, true).is_some());
    assert!(Foresight::allowed(Rule::Block, true).is_some());
}

#[test]
fn a_flat_table_verifies_everything_that_can_survive() {
    let flat = CostTable::new(&[(1, 0.01)]).unwrap();
    // 1e-30 is lost beside tau = 64 in f64, and still worth a free place.
    let mut block = vec![vec![0.9, 0.5, 0.01]; 64];
    block[3] = vec![1e-15, 1e-15, 0.9];
    block[5] = vec![0.9, 0.0, 0.9];
    let mut expected = vec![3; 64];
    expected[5] = 1;
    assert_eq!(causal(&survivals(&block), &flat), expected);
    assert_eq!(global(&survivals(&block), &flat, Foresight(())), expected);
}

#[test]
fn a_pass_that_costs_its_tokens_verifies_nothing_doubtful() {
    let steep = CostTable::new(&[(1, 1.0), (2, 2.0), (100, 100.0)]).unwrap();
    assert_eq!(causal(&survivals(&[vec![0.99; 7], vec![0.5; 7]]), &steep), [0, 0]);
}

#[test]
fn ties_go_to_the_earlier_slot_then_the_earlier_request() {
    // Three places are free: survivals 0.5 at (request 0, slot 1), (1, 0), (2, 0), (1, 1), (2, 1).
    let cliff = CostTable::new(&[(3, 1.0), (6, 1.0), (7, 1000.0), (8, 2000.0)]).unwrap();
    let block = survivals(&[vec![1.0, 0.5], vec![0.5, 1.0], vec![0.5, 1.0]]);
    assert_eq!(causal(&block, &cliff), [1, 1, 1]);
    let block = survivals(&[vec![0.5, 1.0], vec![0.5, 1.0]]);
    let three = CostTable::new(&[(2, 1.0), (5, 1.0), (6, 1000.0)]).unwrap();
    assert_eq!(causal(&block, &three), [2, 1]);
}

#[test]
fn a_step_of_the_table_stops_algorithm_1_but_not_the_global_search() {
    // Kernels of width 4: the second token raises the cost, the next two come for nothing.
    let steps = CostTable::new(&[(1, 1.0), (2, 1.9), (4, 1.9), (5, 4.0)]).unwrap();
    let block = survivals(&[vec![0.8, 0.9, 0.9, 0.9]]);
    assert_eq!(causal(&block, &steps), [0]);
    assert_eq!(global(&block, &steps, Foresight(())), [3]);
}

#[test]
fn a_limit_caps_its_own_request_only() {
    let flat = CostTable::new(&[(1, 1.0)]).unwrap();
    let sure = [0.9f32; 7];
    let draft = |limit| Draft { drafted: 7, limit, confidences: &sure };
    let block = [draft(0), draft(2), draft(9)];
    assert_eq!(causal(&Survivals::new(&block).unwrap(), &flat), [0, 2, 7]);
    assert_eq!(fixed(&block, 5), [0, 2, 5]);
    assert_eq!(fixed(&[Draft { drafted: 3, limit: 9, confidences: &[] }], 7), [3]);
}

#[test]
fn confidences_that_are_none_are_refused() {
    let none = Survivals::new(&[Draft { drafted: 2, limit: 2, confidences: &[] }]).unwrap_err();
    assert_eq!(none, PlanError::Count { request: 0, drafted: 2, found: 0 });
    for bad in [f32::NAN, -0.1, 1.5] {
        let error = Survivals::new(&drafts(&[vec![0.5], vec![0.5, bad]])).unwrap_err();
        assert!(matches!(error, PlanError::Confidence { request: 1, slot: 1, .. }), "{error}");
    }
}

/// A table whose seconds rise ever faster: the throughput then has one peak.
fn convex(increments: &[f64]) -> CostTable {
    let mut slopes = increments.to_vec();
    slopes.sort_by(f64::total_cmp);
    let mut seconds = 1.0;
    let points: Vec<(usize, f64)> = (1..)
        .zip(&slopes)
        .map(|(t, s)| {
            seconds += s;
            (t, seconds)
        })
        .collect();
    CostTable::new(&points).unwrap()
}

pub(super) fn blocks() -> impl Strategy<Value = Vec<Vec<f32>>> {
    prop::collection::vec(prop::collection::vec(0.0f32..=1.0, 0..=4), 1..=4)
}

proptest! {
    #[test]
    fn algorithm_1_is_optimal_on_a_curve_with_one_peak(
        block in blocks(), increments in prop::collection::vec(0.0f64..0.5, 20)
    ) {
        let cost = convex(&increments);
        let plan = causal(&survivals(&block), &cost);
        let best = brute_force(&block, &cost);
        prop_assert!((throughput(&block, &plan, &cost) - best).abs() <= 1e-12 * best);
    }

    #[test]
    fn the_global_search_is_optimal_on_every_curve(
        block in blocks(), seconds in prop::collection::vec(0.2f64..2.0, 20), fixed in 0.0f64..1.0
    ) {
        let point = |(i, s): (usize, &f64)| (i + 1, s * (1 + i / 4) as f64);
        let points: Vec<(usize, f64)> = seconds.iter().enumerate().map(point).collect();
        let cost = CostTable::new(&points).unwrap().with_fixed_seconds(fixed).unwrap();
        let plan = global(&survivals(&block), &cost, Foresight(()));
        let best = brute_force(&block, &cost);
        prop_assert!((throughput(&block, &plan, &cost) - best).abs() <= 1e-12 * best);
    }

    /// Non-anticipation: whatever the confidences after slot k turn into, token k is admitted or not all the
    /// same.
    #[test]
    fn sound_searches_never_look_ahead(
        block in blocks(), other in prop::collection::vec(0.0f32..=1.0, 4),
        request in 0usize..4, slot in 0usize..4,
        seconds in prop::collection::vec(0.2f64..2.0, 20), earlier in blocks()
    ) {
        let points: Vec<(usize, f64)> = (1..).zip(seconds).collect();
        let cost = CostTable::new(&points).unwrap();
        let request = request % block.len();
        let mut changed = block.clone();
        for (k, c) in changed[request].iter_mut().enumerate().skip(slot + 1) {
            *c = other[k];
        }
        let delayed = |current: &[Vec<f32>]| {
            let mut search = DelayedSearch::new(NonZeroUsize::MIN);
            search.plan(&survivals(&earlier), &cost);
            search.plan(&survivals(current), &cost)
        };
        prop_assert_eq!(
            causal(&survivals(&block), &cost)[request] > slot,
            causal(&survivals(&changed), &cost)[request] > slot
        );
        prop_assert_eq!(delayed(&block)[request] > slot, delayed(&changed)[request] > slot);
    }
}
