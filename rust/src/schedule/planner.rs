//! The planner: applies a policy round by round, and learns from what came of it.
//!
//! A round calls [`Planner::depths`] before the draft, [`Planner::plan`] after it, [`Planner::learn`] once
//! the target has judged, and [`Planner::timed`] at its end. Only the throughput policy learns; the others
//! draft whenever there is room, and change no confidence.

use super::correction::Correction;
use super::cost::CostTable;
use super::delayed::DelayedSearch;
use super::live::{LiveCosts, RoundTime};
use super::plan::{self, Draft, Foresight, PlanError, Survivals};
use super::policy::Policy;
use super::track::{Outcome, Pause, Record, Track};
use crate::accept::Rule;
use crate::mutant::{self, Mutant};

/// A request after a round.
#[derive(Debug)]
pub struct Lesson<'a> {
    /// Its record.
    pub track: &'a mut Track,
    /// Whether its temperature is 0.
    pub greedy: bool,
    /// What became of its draft.
    pub outcome: Outcome<'a>,
}

/// Applies a policy under a rule. Its decisions before and within a round depend on past rounds, and on the
/// round's own tokens only as far as [`plan`] allows.
#[derive(Debug, Clone)]
pub struct Planner {
    pub(super) policy: Policy,
    rule: Rule,
    pub(super) gamma: usize,
    delayed: Option<DelayedSearch>,
    /// What rounds cost, once a policy has given a table.
    pub(super) costs: Option<LiveCosts>,
    /// The records of greedy and of sampled requests.
    pub(super) records: [Record; 2],
    corrections: [Correction; 2],
    /// When the engine tries a draft again after it stopped drafting, by [`size`]: that drafting pays for
    /// four requests says nothing about sixteen, and requests come and go.
    pub(super) pauses: [Pause; SIZES],
    pub(super) has_confidence: bool,
    /// Of the current round: requests that draft, and tokens that they were to draft. Not what they drafted,
    /// since a chain may end because of what it drew.
    pub(super) planned: (usize, usize),
    /// Of the current round: drafted tokens to verify whatever the plan says, by request.
    pub(super) forced: Vec<usize>,
    /// Of the current round: acceptance by position, gamma for each request.
    pub(super) expected: Vec<f32>,
    /// Of the current round: see [`plan::patient`].
    pub(super) horizon: Vec<f64>,
    /// Since the start: how often a position was kept, and how often judged.
    judged: Vec<(u64, u64)>,
}

impl Planner {
    /// A planner that has seen no round, for blocks of up to `gamma` tokens.
    pub fn new(policy: Policy, rule: Rule, gamma: usize) -> Self {
        let mut planner = Self {
            policy: Policy::Fixed,
            rule,
            gamma,
            delayed: None,
            costs: None,
            records: [Record::new(gamma), Record::new(gamma)],
            corrections: [Correction::new(gamma), Correction::new(gamma)],
            pauses: Default::default(),
            has_confidence: true,
            planned: (0, 0),
            forced: Vec::new(),
            expected: Vec::new(),
            horizon: Vec::new(),
            judged: vec![(0, 0); gamma],
        };
        planner.set_policy(policy);
        planner
    }

    /// Sets, before the first round, how often a calibration found positions of greedy or of sampled requests
    /// to be kept if the ones before them are.
    pub fn expect(&mut self, greedy: bool, acceptance: &[f64]) {
        self.records[kind(greedy)].expect(acceptance);
    }

    /// Continues with another policy. What is known about drafts stays, as does the wait until the next try;
    /// costs start from the policy's table.
    pub fn set_policy(&mut self, policy: Policy) {
        self.delayed = None;
        if let Policy::Throughput { cost, lag } = &policy {
            self.costs = Some(LiveCosts::new(cost.clone()));
            self.delayed = lag.map(DelayedSearch::new);
        }
        self.policy = policy;
    }

    /// The policy in force.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The cost table as of now, if one was ever given.
    pub fn cost_table(&self) -> Option<&CostTable> {
        self.costs.as_ref().map(LiveCosts::table)
    }

    /// What to add to calibrated logits of confidences, by position; learned from past rounds.
    pub fn offsets(&self, greedy: bool) -> Option<&[f64]> {
        self.is_adaptive().then(|| self.corrections[kind(greedy)].offsets())
    }

    /// How often each position was kept if the one before it was, since the start; ends before the first
    /// position that was never judged.
    pub fn acceptance(&self) -> impl Iterator<Item = f64> + '_ {
        let judged = self.judged.iter().take_while(|(_, judged)| *judged > 0);
        judged.map(|(kept, judged)| *kept as f64 / *judged as f64)
    }

    /// Whether decisions depend on past rounds.
    pub(super) fn is_adaptive(&self) -> bool {
        matches!(self.policy, Policy::Throughput { .. })
    }

    /// Verify lengths of a round, one for each draft. `all_greedy`: every request has temperature 0.
    ///
    /// If the draft has no confidence head, its acceptance in past rounds takes the place of confidences.
    ///
    /// # Errors
    /// [`PlanError`] if, under the throughput policy, there are not as many confidences as tokens, or one is
    /// not a probability.
    pub fn plan(&mut self, drafts: &[Draft], all_greedy: bool) -> Result<Vec<usize>, PlanError> {
        let Some(cost) = self.costs.as_ref().map(LiveCosts::table).filter(|_| self.is_adaptive()) else {
            return Ok(plan::fixed(drafts, usize::MAX));
        };
        let expected = |r: usize, count: usize| self.expected.get(r * self.gamma..r * self.gamma + count);
        let known: Vec<Draft> = drafts
            .iter()
            .enumerate()
            .map(|(r, draft)| match expected(r, draft.drafted) {
                Some(confidences) if draft.confidences.is_empty() => Draft { confidences, ..*draft },
                _ => *draft,
            })
            .collect();
        let (requests, tokens) = self.planned;
        let current = Survivals::new(&known)?.paid(cost.draft_seconds(requests, tokens));
        let proof = if mutant::on(Mutant::PlanLooksAhead) {
            Foresight::allowed(Rule::Coupled, true)
        } else {
            Foresight::allowed(self.rule, all_greedy)
        };
        let mut lengths = match (proof, &mut self.delayed) {
            (Some(proof), _) => plan::global(&current, cost, proof),
            (None, Some(search)) => search.plan(&current, cost),
            (None, None) => plan::patient(&current, cost, &self.horizon),
        };
        for ((length, forced), draft) in lengths.iter_mut().zip(&self.forced).zip(drafts) {
            *length = (*length).max(*forced).min(draft.drafted).min(draft.limit);
        }
        Ok(lengths)
    }

    /// Learns from what became of a round's drafts; requests that drafted nothing may be left out.
    pub fn learn<'a>(&mut self, lessons: impl IntoIterator<Item = Lesson<'a>>) {
        let is_adaptive = self.is_adaptive();
        for Lesson { track, greedy, outcome } in lessons {
            if outcome.drafted == 0 {
                continue;
            }
            for (slot, (kept, judged)) in self.judged.iter_mut().enumerate().take(outcome.verified) {
                *kept += u64::from(slot < outcome.accepted);
                *judged += u64::from(slot <= outcome.accepted);
            }
            if is_adaptive {
                self.has_confidence = !outcome.confidences.is_empty();
                self.records[kind(greedy)].add(&outcome);
                self.corrections[kind(greedy)].add(&outcome);
                track.add(&outcome);
                track.pause.settle(outcome.accepted);
                self.pauses.iter_mut().for_each(|pause| pause.settle(outcome.accepted));
            }
        }
    }

    /// Learns the times of a round; true if the cost table changed.
    pub fn timed(&mut self, round: &RoundTime) -> bool {
        self.costs.as_mut().is_some_and(|costs| costs.add(round))
    }
}

/// Classes of batch sizes, each beginning at twice as many requests as the one before.
const SIZES: usize = 16;

/// The class of a batch of so many requests.
pub(super) fn size(requests: usize) -> usize {
    (requests.max(1).ilog2() as usize).min(SIZES - 1)
}

/// The index of greedy (0) or sampled (1) requests.
pub(super) fn kind(greedy: bool) -> usize {
    usize::from(!greedy)
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
