//! Chi-square tests of sampled rounds, for every rule, kind of draft and sampling parameter.

use dspark_core::accept::Rule;
use dspark_core::noise::{Counted, Noise, Purpose};
use dspark_core::params::SamplingParams;

use crate::chi::{Test, assert_law, power};
use crate::exact::Tree;
use crate::toy::Toy;

const VOCABULARY: usize = 6;
const RUNS: usize = 24_000;

/// Counts of the first two tokens of `RUNS` rounds of up to `limit` drafted tokens, the target alone going
/// on where a round gives one.
pub fn pairs(toy: &Toy, limit: usize, rule: Rule) -> Vec<u64> {
    let mut counts = vec![0; toy.vocabulary * toy.vocabulary];
    for run in 0..RUNS as u64 {
        let noise = Noise { seed: 1000 * toy.seed + run.wrapping_mul(0x9E37_79B9_7F4A_7C15), sample: 0 };
        let mut text = toy.round(&[], limit, rule, &Counted::new(noise, 5));
        if text.len() == 1 {
            let other = Noise { sample: 1, ..noise };
            text.push(draw(&toy.p(&text), other.uniform(0, 0, Purpose::Resample)));
        }
        counts[text[0] as usize * toy.vocabulary + text[1] as usize] += 1;
    }
    counts
}

fn draw(p: &[f64], u: f64) -> u32 {
    let below = p.iter().scan(0.0, |sum, p| {
        *sum += p;
        Some(*sum)
    });
    below.take_while(|sum| *sum <= u).count().min(p.len() - 1) as u32
}

/// The test of [`pairs`] against the target's own law.
pub fn test_pairs(toy: &Toy, limit: usize, rule: Rule) -> Test {
    Test::new(&pairs(toy, limit, rule), &Tree::new(toy, 2).target())
}

fn params() -> Vec<(&'static str, SamplingParams)> {
    let default = SamplingParams::default;
    vec![
        ("plain", default()),
        ("temperature", SamplingParams { temperature: 0.6, ..default() }),
        ("top-k", SamplingParams { top_k: 3, ..default() }),
        ("top-p", SamplingParams { top_p: 0.7, ..default() }),
        ("min-p", SamplingParams { min_p: 0.3, ..default() }),
        ("repetition", SamplingParams { repetition_penalty: 1.8, ..default() }),
        ("presence", SamplingParams { presence_penalty: 1.0, ..default() }),
        ("frequency", SamplingParams { frequency_penalty: 1.0, ..default() }),
        ("bias", SamplingParams { logit_bias: vec![(1, 1.5), (4, -2.0)], ..default() }),
        ("min_tokens", SamplingParams { min_tokens: 1, stop_token_ids: vec![0, 3], ..default() }),
    ]
}

#[test]
fn every_parameter_is_honoured_in_every_row() {
    for (i, (what, params)) in params().into_iter().enumerate() {
        let toy = Toy::new(VOCABULARY, 40 + i as u64).with(params);
        for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
            for toy in [toy.clone(), toy.clone().with_greedy_draft()] {
                let test = test_pairs(&toy, 2, rule);
                let greedy = toy.draft_params.is_greedy();
                assert!(test.passes(), "{what}, {rule:?}, greedy draft {greedy}: p = {:e}", test.p_value());
            }
        }
    }
}

/// Each parameter changes the law by so much that ignoring it is noticed.
#[test]
fn ignoring_a_parameter_would_be_noticed() {
    for (i, (what, params)) in params().into_iter().enumerate().skip(1) {
        let toy = Toy::new(VOCABULARY, 40 + i as u64);
        let ignored = Tree::new(&toy, 2).target();
        let law = Tree::new(&toy.with(params), 2).target();
        assert!(power(RUNS, &law, &ignored) > 0.999, "{what}");
    }
}

/// The control: correcting with a draw from p instead of the residual fails, as its power says.
#[test]
fn correcting_from_p_is_noticed() {
    let toy = Toy { has_memory: false, ..Toy::new(VOCABULARY, 61) };
    let (p, q) = (toy.p(&[]), toy.probs(&toy.q(&[])));
    let kept: Vec<f64> = p.iter().zip(&q).map(|(p, q)| p.min(*q)).collect();
    let rejected = 1.0 - kept.iter().sum::<f64>();
    let biased: Vec<f64> = kept.iter().zip(&p).map(|(kept, p)| kept + rejected * p).collect();
    let (mut clean, mut doctored) = (vec![0; VOCABULARY], vec![0; VOCABULARY]);
    for run in 0..RUNS as u64 {
        let noise = Counted::new(Noise { seed: run, sample: 3 }, 9);
        let ids = toy.draft(&[], 1, Rule::Rejection, &noise);
        let verdict = toy.block(&[], &ids).judge(Rule::Rejection, &noise);
        let token = if verdict.accepted == 1 { ids[0] } else { verdict.token };
        clean[token as usize] += 1;
        let other = Noise { seed: run, sample: 4 };
        let token =
            if verdict.accepted == 1 { ids[0] } else { draw(&p, other.uniform(0, 0, Purpose::Draft)) };
        doctored[token as usize] += 1;
    }
    assert!(power(RUNS, &p, &biased) > 0.999_999);
    assert_law(&clean, &p, "the residual");
    assert_law(&doctored, &biased, "the formula of the bias");
    assert!(!Test::new(&doctored, &p).passes());
}
