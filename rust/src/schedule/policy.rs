//! The policy of an engine, and the planner that applies it round by round.

use std::num::NonZeroUsize;

use super::cost::CostTable;
use super::plan::{self, DelayedSearch, Draft, Foresight, PlanError, Survivals};
use crate::accept::Rule;

/// How many drafted tokens a round verifies.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// All that were drafted.
    Fixed,
    /// All before the first confidence below this; the chain itself stops there, so all that were drafted.
    Threshold(f64),
    /// As many as raise the expected throughput of the batch.
    Throughput {
        /// What a pass costs.
        cost: CostTable,
        /// Where looking ahead would bias the output: `None` for Algorithm 1, else the delayed search
        /// with budgets from this many rounds ago.
        lag: Option<NonZeroUsize>,
    },
}

impl Policy {
    /// The confidence below which the chain stops drafting.
    pub fn threshold(&self) -> Option<f64> {
        match self {
            Policy::Threshold(threshold) => Some(*threshold),
            Policy::Fixed | Policy::Throughput { .. } => None,
        }
    }

    /// Whether every drafted token needs a confidence.
    pub fn needs_confidence(&self) -> bool {
        !matches!(self, Policy::Fixed)
    }
}

/// Applies a policy under a rule, and remembers what the delayed search needs of earlier rounds.
#[derive(Debug)]
pub struct Planner {
    policy: Policy,
    rule: Rule,
    delayed: Option<DelayedSearch>,
}

impl Planner {
    /// A planner that has seen no round.
    pub fn new(policy: Policy, rule: Rule) -> Self {
        let delayed = match &policy {
            Policy::Throughput { lag, .. } => lag.map(DelayedSearch::new),
            Policy::Fixed | Policy::Threshold(_) => None,
        };
        Self { policy, rule, delayed }
    }

    /// Verify lengths of a round, one for each draft. `all_greedy`: every request has temperature 0.
    ///
    /// # Errors
    /// [`PlanError`] if the throughput policy lacks a confidence.
    pub fn plan(&mut self, drafts: &[Draft], all_greedy: bool) -> Result<Vec<usize>, PlanError> {
        let Policy::Throughput { cost, .. } = &self.policy else {
            return Ok(plan::fixed(drafts, usize::MAX));
        };
        let current = Survivals::new(drafts)?;
        Ok(match (Foresight::allowed(self.rule, all_greedy), &mut self.delayed) {
            (Some(proof), _) => plan::global(&current, cost, proof),
            (None, Some(search)) => search.plan(&current, cost),
            (None, None) => plan::causal(&current, cost),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second token that costs more than it gives, and a third that is free.
    fn step() -> CostTable {
        CostTable::new(&[(1, 1.0), (2, 1.9), (3, 1.9), (4, 9.0)]).unwrap()
    }

    fn plans(rule: Rule, all_greedy: bool, lag: Option<NonZeroUsize>) -> Vec<usize> {
        let mut planner = Planner::new(Policy::Throughput { cost: step(), lag }, rule);
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
            assert_eq!(Planner::new(policy, Rule::Rejection).plan(&[draft], false), Ok(vec![2]));
        }
        assert_eq!(Policy::Threshold(0.4).threshold(), Some(0.4));
        assert_eq!(Policy::Fixed.threshold(), None);
    }

    #[test]
    fn throughput_without_confidences_is_refused() {
        let policy = Policy::Throughput { cost: step(), lag: None };
        let draft = Draft { drafted: 3, limit: 3, confidences: &[] };
        assert!(Planner::new(policy, Rule::Rejection).plan(&[draft], false).is_err());
    }
}
