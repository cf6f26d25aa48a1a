//! The exact law of what a block commits, read off the production code.
//!
//! Every decision is monotone in its uniform: the acceptance of a prefix falls with it, and the token of an
//! inverse distribution function rises. So the break points are found by bisection, and their distances
//! are the probabilities.

use std::collections::HashMap;

use dspark_core::accept::{Rule, Verdict};
use dspark_core::noise::Injected;

use crate::toy::{Block, Toy};

/// The largest uniform below 1.
const ALMOST_ONE: f64 = 1.0 - f64::EPSILON / 2.0;

/// Length of the part of [0, 1) where `holds`; it must hold below some point and not above.
fn measure(holds: impl Fn(f64) -> bool) -> f64 {
    if !holds(0.0) {
        return 0.0;
    }
    if holds(ALMOST_ONE) {
        return 1.0;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        *(if holds(middle) { &mut low } else { &mut high }) = middle;
    }
    high
}

/// What a block can commit, and with which probability: (drafted tokens kept, token behind them).
pub fn outcomes(block: &Block<'_>, vocabulary: usize, rule: Rule) -> Vec<(usize, u32, f64)> {
    let len = block.ids.len();
    let judge = |accept: Vec<f64>, slot: usize, u: f64| -> Verdict {
        let mut resample = vec![0.5; len + 1];
        resample[slot] = u;
        block.judge(rule, &Injected { accept, resample, ..Default::default() })
    };
    // Numbers that let exactly `kept` tests pass, where they can. Infinity passes none.
    let passing =
        |kept: usize| -> Vec<f64> { (0..len).map(|j| if j < kept { 0.0 } else { f64::INFINITY }).collect() };
    // Probability that the test at k succeeds, the ones before it having done so and the ones behind it not.
    let success = |k: usize| {
        measure(|u| {
            let mut accept = passing(k);
            accept[k] = u;
            judge(accept, 0, 0.5).accepted == k + 1
        })
    };
    let success: Vec<f64> = (0..len).map(success).collect();
    let mut found = Vec::new();
    for kept in 0..=len {
        let probability: f64 = match rule {
            Rule::Rejection => {
                let fails = success.get(kept).map_or(1.0, |s| 1.0 - s);
                success[..kept].iter().product::<f64>() * fails
            }
            Rule::Block => {
                let passes = if kept == 0 { 1.0 } else { success[kept - 1] };
                passes * success[kept..].iter().map(|s| 1.0 - s).product::<f64>()
            }
            Rule::Coupled => panic!("coupled has no uniforms to bisect"),
        };
        if probability == 0.0 {
            continue;
        }
        let mut below = 0.0;
        for token in 0..vocabulary as u32 {
            let up_to = measure(|u| {
                let verdict = judge(passing(kept), kept, u);
                assert_eq!(verdict.accepted, kept);
                verdict.token <= token
            });
            if up_to > below {
                found.push((kept, token, probability * (up_to - below)));
            }
            below = up_to;
        }
    }
    found
}

/// A distribution of the next few tokens, by their digits in base `vocabulary`.
pub type Joint = Vec<f64>;

/// Total variation distance.
pub fn distance(a: &Joint, b: &Joint) -> f64 {
    0.5 * a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>()
}

/// Laws of the next `length` tokens behind an empty output.
pub struct Tree<'a> {
    pub toy: &'a Toy,
    pub length: usize,
    p: HashMap<Vec<u32>, Vec<f64>>,
}

impl<'a> Tree<'a> {
    pub fn new(toy: &'a Toy, length: usize) -> Self {
        Tree { toy, length, p: HashMap::new() }
    }

    /// Adds `weight` times the law that `text` and then the target alone give.
    pub fn extend(&mut self, text: &mut Vec<u32>, weight: f64, joint: &mut Joint) {
        if weight == 0.0 {
            return;
        }
        if text.len() == self.length {
            let cell = text.iter().fold(0, |cell, &token| cell * self.toy.vocabulary + token as usize);
            joint[cell] += weight;
            return;
        }
        let p = self.p.entry(text.clone()).or_insert_with(|| self.toy.p(text)).clone();
        for (token, p) in p.into_iter().enumerate() {
            text.push(token as u32);
            self.extend(text, weight * p, joint);
            text.pop();
        }
    }

    pub fn zero(&self) -> Joint {
        vec![0.0; self.toy.vocabulary.pow(self.length as u32)]
    }

    /// The target alone.
    pub fn target(&mut self) -> Joint {
        let mut joint = self.zero();
        self.extend(&mut Vec::new(), 1.0, &mut joint);
        joint
    }

    /// The law behind a block that drafted and verified `ids`, times `weight`, and its expected number of kept
    /// tokens, times `weight`.
    pub fn verified(&mut self, ids: &[u32], rule: Rule, weight: f64) -> (Joint, f64) {
        let mut joint = self.zero();
        let mut kept = 0.0;
        let block = self.toy.block(&[], ids);
        for (accepted, token, probability) in outcomes(&block, self.toy.vocabulary, rule) {
            let mut text = [&ids[..accepted], &[token]].concat();
            self.extend(&mut text, weight * probability, &mut joint);
            kept += weight * probability * accepted as f64;
        }
        (joint, kept)
    }
}
