//! The exact law of the text under the policy that learns: depths, plans, corrections and costs of a round come from
//! the rounds before it, which are enumerated with it.

use std::collections::HashMap;

use dspark_core::accept::Rule;
use dspark_core::calibration::sigmoid;
use dspark_core::schedule::*;

use crate::exact::{Joint, Tree, distance, outcomes};
use crate::toy::Toy;

const VOCABULARY: usize = 3;
const GAMMA: usize = 2;
const ROUNDS: usize = 2;
const LENGTH: usize = 4;

/// What an enumeration found.
pub struct Found {
    /// Distance from the target's law.
    pub off: f64,
    /// How often each depth was drafted, and each length verified.
    pub depths: [usize; GAMMA + 1],
    pub lengths: [usize; GAMMA + 1],
    /// The largest offset that a second round used, less the smallest.
    pub offsets: f64,
}

/// What two requests have committed.
type Prefixes = (Vec<u32>, Vec<u32>);

struct Enumeration<'a> {
    toy: &'a Toy,
    rule: Rule,
    tree: Tree<'a>,
    known: HashMap<Prefixes, Vec<(usize, u32, f64)>>,
    joint: Joint,
    found: Found,
    range: (f64, f64),
}

/// The head: unsure of the first token; of the second all depends on the first.
fn logit(previous: u32, slot: usize) -> f64 {
    match (slot, previous) {
        (0, 0) => 0.6,
        (0, _) => 0.2,
        (_, 0) => 2.5,
        (_, _) => -2.5,
    }
}

impl Enumeration<'_> {
    /// Adds what the rounds behind `text` come to, `weight` being the probability of being here.
    fn rounds(&mut self, planner: &Planner, track: &Track, text: &[u32], left: usize, weight: f64) {
        if left == 0 || text.len() >= LENGTH {
            let mut text = text[..text.len().min(LENGTH)].to_vec();
            self.tree.extend(&mut text, weight, &mut self.joint);
            return;
        }
        let (mut planner, mut track) = (planner.clone(), track.clone());
        let prospect = Prospect { room: GAMMA, greedy: false, track: &mut track };
        let depth = planner.depths(&mut [prospect])[0].tokens;
        self.found.depths[depth] += 1;
        let offsets = planner.offsets(false).unwrap().to_vec();
        if left < ROUNDS {
            self.range = offsets.iter().fold(self.range, |(low, high), &x| (low.min(x), high.max(x)));
        }
        for code in 0..VOCABULARY.pow(depth as u32) {
            let (mut ids, mut confidences, mut drawn) = (Vec::new(), Vec::new(), weight);
            let mut context = text.to_vec();
            for (slot, offset) in offsets.iter().enumerate().take(depth) {
                let token = (code / VOCABULARY.pow(slot as u32) % VOCABULARY) as u32;
                let previous = context.last().copied().unwrap_or(1);
                confidences.push(sigmoid(logit(previous, slot) + offset) as f32);
                drawn *= self.toy.q(&context).prob(token);
                ids.push(token);
                context.push(token);
            }
            let mut planner = planner.clone();
            let draft = Draft { drafted: depth, limit: depth, confidences: &confidences };
            let verified = planner.plan(&[draft], false).unwrap()[0];
            self.found.lengths[verified] += 1;
            for (accepted, token, probability) in self.outcomes(text, &ids[..verified]) {
                let (mut planner, mut track) = (planner.clone(), track.clone());
                let outcome = Outcome { drafted: depth, confidences: &confidences, verified, accepted };
                planner.learn([Lesson { track: &mut track, greedy: false, outcome }]);
                // Even the clock may depend on what was said.
                let verify = 1.0 + 0.4 * f64::from(token) + 0.1 * verified as f64;
                let time = RoundTime {
                    requests: 1,
                    tokens: 1 + verified,
                    verify,
                    total: verify,
                    ..RoundTime::default()
                };
                (0..8).for_each(|_| _ = planner.timed(&time));
                let text = [text, &ids[..accepted], &[token]].concat();
                self.rounds(&planner, &track, &text, left - 1, drawn * probability);
            }
        }
    }

    fn outcomes(&mut self, text: &[u32], ids: &[u32]) -> Vec<(usize, u32, f64)> {
        let (toy, rule) = (self.toy, self.rule);
        let block = || outcomes(&toy.block(text, ids), VOCABULARY, rule);
        self.known.entry((text.to_vec(), ids.to_vec())).or_insert_with(block).clone()
    }
}

/// Two rounds of a planner that has seen enough blocks to believe the head.
pub fn adaptive(rule: Rule, seed: u64) -> Found {
    let toy = Toy { distance: 1.0, ..Toy::new(VOCABULARY, 200 + seed) };
    let mut tree = Tree::new(&toy, LENGTH);
    let target = tree.target();
    let found = Found { off: 0.0, depths: [0; GAMMA + 1], lengths: [0; GAMMA + 1], offsets: 0.0 };
    let joint = tree.zero();
    let range = (f64::INFINITY, f64::NEG_INFINITY);
    let mut all = Enumeration { toy: &toy, rule, tree, known: HashMap::new(), joint, found, range };
    // A second row costs more than it gives unless it comes with a third.
    let cost = CostTable::new(&[(1, 1.0), (2, 1.9), (3, 1.95)]).unwrap().with_draft(&[(1, 0.05)]).unwrap();
    let mut planner = Planner::new(Policy::Throughput { cost, lag: None }, rule, GAMMA);
    let mut track = Track::default();
    for i in 0..24 {
        let accepted = usize::from(i % (2 + seed as usize % 3) > 0) * 2;
        let outcome = Outcome { drafted: 2, confidences: &[0.6, 0.6], verified: 2, accepted };
        planner.learn([Lesson { track: &mut track, greedy: false, outcome }]);
    }
    all.rounds(&planner, &track, &[], ROUNDS, 1.0);
    let mut found = all.found;
    found.off = distance(&all.joint, &target);
    found.offsets = all.range.1 - all.range.0;
    found
}

#[test]
fn a_policy_that_learns_from_past_rounds_is_lossless() {
    let (mut depths, mut lengths) = ([0; GAMMA + 1], [0; GAMMA + 1]);
    for rule in [Rule::Rejection, Rule::Block] {
        for seed in 0..6 {
            let found = adaptive(rule, seed);
            assert!(found.off < 1e-12, "{rule:?}, seed {seed}: off by {:e}", found.off);
            assert!(found.offsets > 0.1, "the correction was idle: {}", found.offsets);
            (0..=GAMMA).for_each(|i| {
                depths[i] += found.depths[i];
                lengths[i] += found.lengths[i];
            });
        }
    }
    // What never varied proves nothing.
    assert!(depths.iter().filter(|&&n| n > 0).count() > 1, "depths {depths:?}");
    assert!(lengths[0] > 0 && lengths[GAMMA] > 0, "lengths {lengths:?}");
}
