use std::num::NonZeroUsize;

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
