//! The search over the whole list whose budget comes from an earlier round.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use super::cost::CostTable;
use super::plan::{Survivals, best_prefix, causal};

/// The global search made sound (paper, section 5.2): how many tokens to verify comes from an earlier
/// round, which ones from the current round's order.
///
/// If the number of drafting requests has changed since that round, each of its tokens stands for "requests
/// now / requests then" tokens. Rounds that drafted nothing do not count as earlier rounds. Until there is
/// one that does, [`causal`] plans.
#[derive(Debug, Clone)]
pub struct DelayedSearch {
    lag: usize,
    earlier: VecDeque<Round>,
}

/// What is kept of a round.
#[derive(Debug, Clone)]
struct Round {
    drafting: usize,
    survivals: Vec<f64>,
}

impl DelayedSearch {
    /// Takes budgets from `lag` rounds ago: 1 if rounds run one after the other, 2 in the paper, where the
    /// next pass is laid out before the last one has ended.
    pub fn new(lag: NonZeroUsize) -> Self {
        Self { lag: lag.get(), earlier: VecDeque::new() }
    }

    /// Plans a round and remembers it. Call it once for each round, whatever the round does with the plan.
    pub fn plan(&mut self, current: &Survivals, cost: &CostTable) -> Vec<usize> {
        let is_due = current.drafting > 0 && self.earlier.len() == self.lag;
        let round = if is_due { self.earlier.pop_front() } else { None };
        let lengths = match round {
            Some(round) => current.admit(round.budget(current, cost)),
            None => causal(current, cost),
        };
        if current.drafting > 0 {
            let survivals = current.order.iter().map(|c| c.survival).collect();
            self.earlier.push_back(Round { drafting: current.drafting, survivals });
        }
        lengths
    }
}

impl Round {
    fn budget(&self, current: &Survivals, cost: &CostTable) -> usize {
        let scale = current.drafting as f64 / self.drafting as f64;
        let tokens = best_prefix(self.survivals.iter().copied(), current, scale, cost);
        (tokens as f64 * scale).round() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::survivals;
    use super::*;

    #[test]
    fn the_budget_of_the_delayed_search_is_old_and_its_order_new() {
        let steps = CostTable::new(&[(2, 1.0), (5, 1.3), (6, 10.0), (9, 40.0)]).unwrap();
        let mut search = DelayedSearch::new(NonZeroUsize::new(2).unwrap());
        let (sure, doubtful) = (vec![0.9; 3], vec![0.1; 3]);
        let first = survivals(&[sure.clone(), doubtful.clone()]);
        let second = survivals(&[doubtful.clone(), doubtful.clone()]);
        search.plan(&first, &steps);
        search.plan(&second, &steps);
        // Budget 3 of the first round, spent on request 1 that is sure now.
        assert_eq!(search.plan(&survivals(&[doubtful.clone(), sure.clone()]), &steps), [0, 3]);
        // Budget 0 of the second round.
        assert_eq!(search.plan(&survivals(&[sure.clone(), sure.clone()]), &steps), [0, 0]);
    }

    #[test]
    fn the_delayed_budget_follows_the_number_of_requests() {
        let flat = CostTable::new(&[(1, 1.0)]).unwrap();
        let mut search = DelayedSearch::new(NonZeroUsize::MIN);
        search.plan(&survivals(&[vec![0.9; 4], vec![0.9; 4]]), &flat);
        assert_eq!(search.plan(&survivals(&vec![vec![0.9; 4]; 4]), &flat), [4; 4]);
        assert_eq!(search.plan(&survivals(&[vec![0.9; 4]]), &flat), [4]);
        assert!(search.plan(&survivals(&[]), &flat).is_empty());
        assert_eq!(search.plan(&survivals(&[vec![0.5; 4]]), &flat), [4]);
    }
}
