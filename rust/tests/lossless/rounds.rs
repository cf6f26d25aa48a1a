//! The joint law of neighbouring tokens over many rounds: what a number used twice would bend.

use dspark_core::accept::Rule;
use dspark_core::noise::{Counted, Noise};

use crate::chi::{Test, power};
use crate::toy::Toy;

const ROUNDS: usize = 16;
const TEXTS: u64 = 6000;

/// Neighbouring tokens of a memoryless target are independent. Tests the pairs that start at even places of
/// the first 16 tokens, and those that start at odd ones, each of `TEXTS` texts of 16 rounds.
pub fn test_neighbours(rule: Rule) -> [Test; 2] {
    let toy = toy();
    let n = toy.vocabulary;
    let p = toy.p(&[]);
    let law: Vec<f64> = (0..n * n).map(|cell| p[cell / n] * p[cell % n]).collect();
    let mut counts = [vec![0; n * n], vec![0; n * n]];
    for seed in 0..TEXTS {
        let noise = Noise { seed, sample: 0 };
        let mut text = vec![];
        for _ in 0..ROUNDS {
            // The anchor of the first round stands at position 10.
            let round = Counted::new(noise, 10 + text.len() as u32);
            text.extend(toy.round(&[], 4, rule, &round));
        }
        for (start, counts) in counts.iter_mut().enumerate() {
            for pair in text[start..16].chunks_exact(2) {
                counts[pair[0] as usize * n + pair[1] as usize] += 1;
            }
        }
    }
    counts.map(|counts| Test::new(&counts, &law))
}

fn toy() -> Toy {
    Toy { has_memory: false, distance: 1.0, ..Toy::new(4, 90) }
}

#[test]
fn neighbouring_tokens_are_independent() {
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        for test in test_neighbours(rule) {
            assert!(test.passes(), "{rule:?}: {test:?}, p = {:e}", test.p_value());
        }
    }
}

/// A dependence of total variation 0.02 would be seen.
#[test]
fn a_small_dependence_would_be_noticed() {
    let p = toy().p(&[]);
    let law: Vec<f64> = (0..16).map(|cell| p[cell / 4] * p[cell % 4]).collect();
    let mut bent = law.clone();
    for (cell, shift) in [(0, 0.01), (1, -0.01), (4, -0.01), (5, 0.01)] {
        bent[cell] += shift;
    }
    assert!(power(7 * TEXTS as usize, &law, &bent) > 0.999);
}
