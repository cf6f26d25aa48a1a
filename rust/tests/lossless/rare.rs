//! Rare tokens of a large vocabulary: the uniforms and the sums must be fine enough for them.

use dspark_core::accept::{Rule, accept};
use dspark_core::history::History;
use dspark_core::law::{Law, Workspace};
use dspark_core::noise::{Counted, Injected, Noise, RoundNoise};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Row, Rows};

use crate::chi::{Test, assert_law};

const VOCABULARY: usize = 151_936;
/// The last token, so that every rounding of the distribution function lands on it.
const RARE: u32 = VOCABULARY as u32 - 1;

/// Logits scattered over `scale` nats, and rising by `slope` from the first token to the last.
fn row(scale: f32, slope: f32, rare: f32) -> Vec<f32> {
    let scattered = |token: u32| (token.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32;
    let mut row: Vec<f32> = (0..VOCABULARY as u32)
        .map(|token| scale * scattered(token) + slope * token as f32 / VOCABULARY as f32)
        .collect();
    row[RARE as usize] = rare;
    row
}

fn judge(
    rule: Rule,
    p: &[f32],
    x: u32,
    q: &Law<'_>,
    noise: &dyn RoundNoise,
    ws: &mut Workspace,
) -> (usize, u32) {
    let rows = [p, p].concat();
    let target = Rows::F32(Matrix::contiguous(&rows, VOCABULARY));
    let (params, mut history) = (SamplingParams::default(), History::default());
    let verdict =
        accept(rule, target, &[x], std::slice::from_ref(q), &params, &mut history, noise, ws).unwrap();
    (verdict.accepted, verdict.token)
}

fn law(row: &[f32]) -> Law<'_> {
    Law::new(Row::F32(row), &SamplingParams::default(), &History::default(), &mut Workspace::default())
        .unwrap()
}

/// A token of probability 1e-12 has its exact share of the uniforms, in the bonus and in the residual draw.
#[test]
fn a_rare_token_has_its_exact_share() {
    let (p_row, q_row) = (row(4.0, 1.0, -14.0), row(3.0, -1.0, -40.0));
    let (p, q) = (law(&p_row), law(&q_row));
    assert!((1e-13..1e-11).contains(&p.prob(RARE)));
    let mut ws = Workspace::default();
    let mass = p.residual_mass(&q, 1.0, &mut ws);
    for (kept, x, share) in [(1, 7, p.prob(RARE)), (0, 7, (p.prob(RARE) - q.prob(RARE)) / mass)] {
        let accept = vec![if kept == 1 { 0.0 } else { 1.0 - f64::EPSILON }];
        let (mut low, mut high) = (0.0, 1.0);
        // A rejection is asked for at u just below 1: only where p(x) < q(x).
        let x = if kept == 0 { (0..RARE).find(|&x| p.prob(x) < 0.9 * q.prob(x)).unwrap() } else { x };
        for _ in 0..54 {
            let middle = 0.5 * (low + high);
            let noise = Injected { accept: accept.clone(), resample: vec![middle; 2], ..Default::default() };
            let (accepted, token) = judge(Rule::Rejection, &p_row, x, &q, &noise, &mut ws);
            assert_eq!(accepted, kept);
            *(if token == RARE { &mut high } else { &mut low }) = middle;
        }
        assert!(((1.0 - high) / share - 1.0).abs() < 1e-3, "{} of {share}", 1.0 - high);
    }
}

/// Sampled: the rare half of a large vocabulary, in groups, and one token that comes once in a thousand.
#[test]
fn groups_of_a_large_vocabulary_come_as_often_as_they_should() {
    const GROUPS: usize = 32;
    let (p_row, q_row) = (row(6.0, 1.0, 9.0), row(5.0, -1.0, 9.0));
    let (p, q) = (law(&p_row), law(&q_row));
    let group = |token: u32| if token == RARE { GROUPS } else { token as usize * GROUPS / VOCABULARY };
    let mut expected = vec![0.0; GROUPS + 1];
    (0..VOCABULARY as u32).for_each(|token| expected[group(token)] += p.prob(token));
    assert!((1e-4..1e-2).contains(&expected[GROUPS]));
    let mut ws = Workspace::default();
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        let mut counts = vec![0; GROUPS + 1];
        for seed in 0..8000 {
            let noise = Counted::new(Noise { seed, sample: 0 }, 77);
            let x = if rule == Rule::Coupled { q.gumbel_argmax(&noise, 0) } else { q.draw(noise.draft(0)) };
            let (accepted, token) = judge(rule, &p_row, x, &q, &noise, &mut ws);
            counts[group(if accepted == 1 { x } else { token })] += 1;
        }
        assert_law(&counts, &expected, &format!("{rule:?}"));
        // The control: the draft's law is another one.
        let mut drafted = vec![0.0; GROUPS + 1];
        (0..VOCABULARY as u32).for_each(|token| drafted[group(token)] += q.prob(token));
        assert!(!Test::new(&counts, &drafted).passes());
    }
}
