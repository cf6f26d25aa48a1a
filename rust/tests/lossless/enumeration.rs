//! The exact law of the text for every causal stop rule.
//!
//! A stop rule says, for each drafted prefix, whether drafting goes on. Write A(v) for the law of the text if the
//! prefix v is drafted and then verified, times the probability of drafting v. If A(v) is the sum of A over the
//! children of v, wherever v stands, then stopping at v or one token later makes no difference, and by
//! induction all stop rules give the law A(nothing drafted). So the law of every one of the 2^40 stop rules
//! of four tokens over three is checked at its 40 nodes.

use std::collections::HashMap;

use dspark_core::accept::Rule;
use dspark_core::noise::{Noise, Purpose};
use dspark_core::params::SamplingParams;

use crate::exact::{Joint, Tree, distance};
use crate::toy::Toy;

const VOCABULARY: usize = 3;

/// A(v) and the expected number of kept tokens, times the probability of v, for every prefix v.
struct Laws {
    gamma: usize,
    /// The probability of drafting each prefix.
    weight: HashMap<Vec<u32>, f64>,
    verified: HashMap<Vec<u32>, (Joint, f64)>,
    target: Joint,
}

impl Laws {
    fn new(toy: &Toy, gamma: usize, rule: Rule) -> Self {
        let mut tree = Tree::new(toy, gamma + 1);
        let mut laws =
            Laws { gamma, weight: HashMap::new(), verified: HashMap::new(), target: tree.target() };
        laws.visit(&mut tree, &mut Vec::new(), 1.0, rule);
        laws
    }

    fn visit(&mut self, tree: &mut Tree<'_>, prefix: &mut Vec<u32>, weight: f64, rule: Rule) {
        self.weight.insert(prefix.clone(), weight);
        // What the draft never proposes is never judged.
        let verified = if weight > 0.0 { tree.verified(prefix, rule, weight) } else { (tree.target(), 0.0) };
        let verified = if weight > 0.0 { verified } else { (vec![0.0; verified.0.len()], 0.0) };
        self.verified.insert(prefix.clone(), verified);
        if prefix.len() < self.gamma {
            let q = tree.toy.q(prefix);
            for token in 0..VOCABULARY as u32 {
                prefix.push(token);
                self.visit(tree, prefix, weight * q.prob(token), rule);
                prefix.pop();
            }
        }
    }

    /// The law, and the expected number of kept tokens, of a stop rule.
    fn stopped(&self, stops: &dyn Fn(&[u32]) -> bool) -> (Joint, f64) {
        let mut sum = (vec![0.0; self.target.len()], 0.0);
        self.add_stopped(&mut Vec::new(), stops, &mut sum);
        sum
    }

    fn add_stopped(&self, prefix: &mut Vec<u32>, stops: &dyn Fn(&[u32]) -> bool, sum: &mut (Joint, f64)) {
        if prefix.len() == self.gamma || stops(prefix) {
            let (joint, kept) = &self.verified[prefix];
            sum.0.iter_mut().zip(joint).for_each(|(sum, x)| *sum += x);
            sum.1 += kept;
            return;
        }
        for token in 0..VOCABULARY as u32 {
            prefix.push(token);
            self.add_stopped(prefix, stops, sum);
            prefix.pop();
        }
    }

    /// The largest distance from losslessness at any node.
    pub fn worst(&self) -> f64 {
        let mut worst = distance(&self.verified[&vec![]].0, &self.target);
        for (prefix, (joint, _)) in self.verified.iter().filter(|(prefix, _)| prefix.len() < self.gamma) {
            let one_later = |v: &[u32]| v.len() > prefix.len();
            let mut sum = (vec![0.0; joint.len()], 0.0);
            self.add_stopped(&mut prefix.clone(), &one_later, &mut sum);
            worst = worst.max(distance(joint, &sum.0));
        }
        worst
    }
}

/// Distance from losslessness of the worst causal stop rule.
pub fn worst_stop_rule(toy: &Toy, gamma: usize, rule: Rule) -> f64 {
    Laws::new(toy, gamma, rule).worst()
}

/// Models and parameters of different kinds.
fn toys() -> Vec<Toy> {
    let default = SamplingParams::default;
    let mut toys: Vec<Toy> = (1..4).map(|seed| Toy::new(VOCABULARY, seed)).collect();
    toys.push(Toy { distance: 0.0, ..Toy::new(VOCABULARY, 4) });
    toys.push(Toy { distance: 3.0, ..Toy::new(VOCABULARY, 5) });
    toys.push(Toy::new(VOCABULARY, 6).with_greedy_draft());
    toys.push(Toy::new(VOCABULARY, 7).with(SamplingParams { top_k: 2, temperature: 0.8, ..default() }));
    toys.push(Toy::new(VOCABULARY, 8).with(SamplingParams { top_p: 0.8, min_p: 0.2, ..default() }));
    toys.push(Toy::new(VOCABULARY, 9).with(SamplingParams {
        repetition_penalty: 1.4,
        frequency_penalty: 0.5,
        presence_penalty: 0.3,
        ..default()
    }));
    toys.push(Toy::new(VOCABULARY, 10).with(SamplingParams {
        min_tokens: 2,
        stop_token_ids: vec![1],
        logit_bias: vec![(0, 0.7)],
        ..default()
    }));
    // The draft is sampled with parameters of its own.
    let draft_params = SamplingParams { temperature: 0.5, ..default() };
    toys.push(Toy { draft_params, ..Toy::new(VOCABULARY, 11) });
    toys
}

#[test]
fn every_causal_stop_rule_is_lossless() {
    for rule in [Rule::Rejection, Rule::Block] {
        for (i, toy) in toys().iter().enumerate() {
            let gamma = 1 + (i + 3) % 4;
            let worst = worst_stop_rule(toy, gamma, rule);
            assert!(worst < 1e-12, "{rule:?}, toy {i}, {gamma} tokens: off by {worst:e}");
        }
    }
}

/// What the draft does not know it never offers; the target's correction has to.
#[test]
fn a_reduced_draft_vocabulary_is_lossless() {
    for rule in [Rule::Rejection, Rule::Block] {
        for (i, toy) in toys().into_iter().enumerate() {
            for tokens in [&[0, 2][..], &[1, 2], &[1]] {
                // With token 1 masked a draft of it alone has nothing to draw.
                if tokens == [1] && toy.params.min_tokens > 0 {
                    continue;
                }
                let worst = worst_stop_rule(&toy.clone().offering(tokens), 3, rule);
                assert!(worst < 1e-12, "{rule:?}, toy {i}, tokens {tokens:?}: off by {worst:e}");
            }
        }
    }
}

/// The induction, spelled out: all rules of up to three tokens, and many of four.
#[test]
fn stop_rules_one_by_one_and_block_keeps_no_fewer() {
    for (gamma, toy) in
        [(1, 21), (2, 22), (3, 23), (4, 24)].map(|(gamma, seed)| (gamma, Toy::new(VOCABULARY, seed)))
    {
        let [token, block] = [Rule::Rejection, Rule::Block].map(|rule| Laws::new(&toy, gamma, rule));
        let nodes: u32 = (0..gamma as u32).map(|depth| 3u32.pow(depth)).sum();
        let codes: Vec<u64> = if nodes <= 13 {
            (0..1 << nodes).collect()
        } else {
            let noise = Noise { seed: 1, sample: 0 };
            (0..5000).map(|i| noise.uniform(i, 0, Purpose::Draft).to_bits() >> 2).collect()
        };
        for code in codes {
            let number = |prefix: &[u32]| {
                let before: u32 = (0..prefix.len() as u32).map(|depth| 3u32.pow(depth)).sum();
                before + prefix.iter().fold(0, |n, &token| 3 * n + token)
            };
            let stops = |prefix: &[u32]| (code >> number(prefix)) & 1 == 1;
            let [by_token, by_block] = [&token, &block].map(|laws| laws.stopped(&stops));
            assert!(distance(&by_token.0, &token.target) < 1e-12);
            assert!(distance(&by_block.0, &token.target) < 1e-12);
            assert!(by_block.1 >= by_token.1 - 1e-12, "block keeps {} of {}", by_block.1, by_token.1);
        }
    }
}

/// The control: a cut that looks at the token it drops is seen at once.
#[test]
fn an_anticipating_stop_is_not_lossless() {
    for rule in [Rule::Rejection, Rule::Block] {
        for seed in 1..4 {
            let toy = Toy::new(VOCABULARY, seed);
            let laws = Laws::new(&toy, 3, rule);
            // Drafting ends at the first token 2, which is then dropped: its prefix is verified instead.
            let mut joint = vec![0.0; laws.target.len()];
            for (prefix, weight) in &laws.weight {
                let (last, before) = prefix.split_last().map_or((None, &[][..]), |(l, b)| (Some(*l), b));
                if before.contains(&2) || (last != Some(2) && prefix.len() < laws.gamma) {
                    continue;
                }
                let (verified, share) =
                    if last == Some(2) { (before, weight / laws.weight[before]) } else { (&prefix[..], 1.0) };
                joint.iter_mut().zip(&laws.verified[verified].0).for_each(|(sum, x)| *sum += share * x);
            }
            assert!((joint.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            let off = distance(&joint, &laws.target);
            assert!(off > 0.02, "{rule:?}, seed {seed}: only {off}");
        }
    }
}
