use std::num::NonZeroUsize;

use super::super::*;
use super::*;

/// A second token that costs more than it gives, and a third that is free.
fn step() -> CostTable {
    CostTable::new(&[(1, 1.0), (2, 1.9), (3, 1.9), (4, 9.0)]).unwrap()
}

fn plans(rule: Rule, all_greedy: bool, lag: Option<NonZeroUsize>) -> Vec<usize> {
    let mut planner = Planner::new(Policy::Throughput { cost: step(), lag }, rule, 7);
    let confidences = [0.8, 0.9, 0.9];
    let draft = Draft { drafted: 3, limit: 3, confidences: &confidences };
    (0..2).map(|_| planner.plan(&[draft], all_greedy).unwrap()[0]).collect()
}

#[test]
fn looks_ahead_only_where_it_may() {
    assert_eq!(plans(Rule::Rejection, false, None), [0, 0]);
    assert_eq!(plans(Rule::Block, false, None), [0, 0]);
    assert_eq!(plans(Rule::Rejection, true, None), [2, 2]);
    assert_eq!(plans(Rule::Coupled, false, None), [2, 2]);
    // The first round has no earlier one.
    assert_eq!(plans(Rule::Rejection, false, Some(NonZeroUsize::MIN)), [0, 2]);
}

/// Tokens that the very first round drafts.
fn first_depth(acceptance: &[f64]) -> usize {
    let cost = CostTable::new(&[(1, 1.0), (2, 1.4), (3, 1.8), (4, 2.2)]).unwrap();
    let mut planner = Planner::new(Policy::Throughput { cost, lag: None }, Rule::Rejection, 3);
    planner.expect(false, acceptance);
    let mut track = Track::default();
    planner.depths(&mut [Prospect { room: 3, greedy: false, track: &mut track }])[0].tokens
}

#[test]
fn a_calibration_says_what_the_first_rounds_expect() {
    assert_eq!(first_depth(&[]), 2, "not knowing, it hopes");
    assert_eq!(first_depth(&[0.3]), 0);
    assert_eq!(first_depth(&[0.7, 0.2]), 1);
    assert_eq!(first_depth(&[0.9]), 3);
}

#[test]
fn other_policies_verify_what_was_drafted() {
    for policy in [Policy::Fixed, Policy::Threshold(0.9)] {
        let draft = Draft { drafted: 3, limit: 2, confidences: &[] };
        assert_eq!(Planner::new(policy, Rule::Rejection, 7).plan(&[draft], false), Ok(vec![2]));
    }
    assert_eq!(Policy::Threshold(0.4).threshold(), Some(0.4));
    assert_eq!(Policy::Fixed.threshold(), None);
}

#[test]
fn throughput_without_confidences_is_refused() {
    let policy = Policy::Throughput { cost: step(), lag: None };
    let draft = Draft { drafted: 3, limit: 3, confidences: &[] };
    assert!(Planner::new(policy, Rule::Rejection, 7).plan(&[draft], false).is_err());
}

#[test]
fn without_a_confidence_head_the_record_stands_in() {
    let cost = CostTable::new(&[(1, 1.0), (8, 1.1)]).unwrap();
    let mut planner = Planner::new(Policy::Throughput { cost, lag: None }, Rule::Rejection, 3);
    let mut track = Track::default();
    let mut round = |planner: &mut Planner, accepted: usize| {
        let depth = planner.depths(&mut [Prospect { room: 3, greedy: false, track: &mut track }])[0];
        let draft = Draft { drafted: depth.tokens, limit: depth.tokens, confidences: &[] };
        let verified = planner.plan(&[draft], false).unwrap()[0];
        let outcome =
            Outcome { drafted: depth.tokens, confidences: &[], verified, accepted: accepted.min(verified) };
        planner.learn([Lesson { track: &mut track, greedy: false, outcome }]);
        (depth.tokens, verified)
    };
    assert_eq!(round(&mut planner, 1), (3, 3));
    (0..60).for_each(|_| _ = round(&mut planner, 1));
    // The second is always refused.
    assert_eq!(round(&mut planner, 1), (1, 1));
}

#[test]
fn only_the_throughput_policy_learns() {
    for policy in [Policy::Fixed, Policy::Threshold(0.5)] {
        let mut planner = Planner::new(policy, Rule::Rejection, 2);
        let mut track = Track::default();
        for _ in 0..50 {
            let depth = planner.depths(&mut [Prospect { room: 2, greedy: true, track: &mut track }])[0];
            assert_eq!(depth, Depth { tokens: 2, skipped: None });
            let outcome = Outcome { drafted: 2, confidences: &[0.9, 0.9], verified: 2, accepted: 0 };
            planner.learn([Lesson { track: &mut track, greedy: true, outcome }]);
        }
        assert_eq!(planner.offsets(true), None);
        assert_eq!(planner.acceptance().collect::<Vec<_>>(), [0.0]);
    }
}

#[test]
fn another_policy_takes_effect_at_once_and_what_was_learned_stays() {
    let mut planner = Planner::new(Policy::Throughput { cost: step(), lag: None }, Rule::Rejection, 3);
    let mut track = Track::default();
    let outcome = Outcome { drafted: 3, confidences: &[0.9; 3], verified: 3, accepted: 0 };
    planner.learn([Lesson { track: &mut track, greedy: false, outcome }]);
    let learned = planner.offsets(false).unwrap().to_vec();
    assert!(learned[0] < 0.0 && planner.offsets(true).unwrap() == [0.0; 3]);
    planner.set_policy(Policy::Fixed);
    assert_eq!(planner.offsets(false), None);
    planner.set_policy(Policy::Throughput { cost: step(), lag: None });
    assert_eq!(planner.offsets(false).unwrap(), learned);
    assert_eq!(planner.cost_table(), Some(&step()));
}

/// Rounds between two tries of a draft that never pays; if `anew`, the policy is set again before each round.
fn waits(anew: bool) -> Vec<usize> {
    // Every drafted token costs as much as a whole round of plain decoding.
    let cost = CostTable::new(&[(1, 1.0), (64, 64.0)]).unwrap();
    let policy = || Policy::Throughput { cost: cost.clone(), lag: None };
    let mut planner = Planner::new(policy(), Rule::Rejection, 3);
    let mut track = Track::default();
    let mut tries = Vec::new();
    for round in 0..2_000 {
        if anew {
            planner.set_policy(policy());
        }
        let depth = planner.depths(&mut [Prospect { room: 3, greedy: true, track: &mut track }])[0];
        if depth.tokens > 0 {
            tries.push(round);
            let drafted = depth.tokens;
            let outcome = Outcome { drafted, confidences: &[], verified: drafted, accepted: 0 };
            planner.learn([Lesson { track: &mut track, greedy: true, outcome }]);
        }
    }
    tries.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[test]
fn tries_that_do_not_pay_become_rare_whatever_policies_are_given() {
    let waits = waits(false);
    assert!(waits.is_sorted() && waits.last() == Some(&65), "{waits:?}");
    assert_eq!(self::waits(true), waits);
}
