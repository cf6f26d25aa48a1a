//! The coupled rule: closed forms of the race, and equal text with and without a draft.

use dspark_core::accept::Rule;
use dspark_core::noise::{Counted, Noise, Purpose};
use dspark_core::params::SamplingParams;

use crate::chi::{Test, assert_law, power};
use crate::toy::Toy;

/// P(draft draws i, target draws j) with shared Gumbel noise, i.e. one race with clocks E_k ~ Exp(1), run at
/// speeds q by the draft and p by the target.
///
/// i wins for the draft and j for the target iff E_k >= max(E_i q_k / q_i, E_j p_k / p_j) for all k. For i = j this
/// has probability 1 / sum_k max(p_k / p_i, q_k / q_i); else, with t = E_j / E_i, it is the integral of
/// 1 / (sum_k max(q_k / q_i, t p_k / p_j))^2 over t from q_j / q_i to p_j / p_i, piecewise elementary.
fn race(p: &[f64], q: &[f64], i: usize, j: usize) -> f64 {
    let sum = |t: f64| -> (f64, f64) {
        // At t, the sum is constant + slope t.
        p.iter().zip(q).fold((0.0, 0.0), |(constant, slope), (p_k, q_k)| {
            let (a, b) = (q_k / q[i], p_k / p[j]);
            if a >= t * b { (constant + a, slope) } else { (constant, slope + b) }
        })
    };
    if i == j {
        let (constant, slope) = sum(1.0);
        return 1.0 / (constant + slope);
    }
    let (low, high) = (q[j] / q[i], p[j] / p[i]);
    if low >= high {
        return 0.0;
    }
    let mut breaks: Vec<f64> = p.iter().zip(q).map(|(p_k, q_k)| (q_k / q[i]) / (p_k / p[j])).collect();
    breaks.retain(|t| *t > low && *t < high);
    breaks.extend([low, high]);
    breaks.sort_by(f64::total_cmp);
    let piece = |from: f64, to: f64| {
        let (constant, slope) = sum(0.5 * (from + to));
        (to - from) / ((constant + slope * from) * (constant + slope * to))
    };
    breaks.windows(2).map(|pair| piece(pair[0], pair[1])).sum()
}

#[test]
fn draft_and_target_race_as_the_closed_form_says() {
    const RUNS: usize = 60_000;
    for seed in [71, 72] {
        let toy = Toy { has_memory: false, ..Toy::new(5, seed) };
        let (p, q) = (toy.p(&[]), toy.probs(&toy.q(&[])));
        let n = p.len();
        let joint: Vec<f64> = (0..n * n).map(|cell| race(&p, &q, cell / n, cell % n)).collect();
        assert!((joint.iter().sum::<f64>() - 1.0).abs() < 1e-12, "the closed form is a law");
        for (token, p) in p.iter().enumerate() {
            let marginal: f64 = (0..n).map(|i| joint[i * n + token]).sum();
            assert!((marginal - p).abs() < 1e-12, "its margin is the target's law");
        }
        let agreement: f64 = (0..n).map(|i| joint[i * n + i]).sum();
        let tv: f64 = 0.5 * p.iter().zip(&q).map(|(p, q)| (p - q).abs()).sum::<f64>();
        assert!(agreement >= (1.0 - tv) / (1.0 + tv) && agreement <= 1.0 - tv, "Daliri et al., theorem 1");

        let (mut cells, mut kept) = (vec![0; n * n], [0; 2]);
        for run in 0..RUNS as u64 {
            let noise = Counted::new(Noise { seed: run, sample: seed as u32 }, 3);
            let ids = toy.draft(&[], 1, Rule::Coupled, &noise);
            let verdict = toy.block(&[], &ids).judge(Rule::Coupled, &noise);
            let target = if verdict.accepted == 1 { ids[0] } else { verdict.token };
            cells[ids[0] as usize * n + target as usize] += 1;
            kept[verdict.accepted] += 1;
        }
        assert_law(&cells, &joint, "drafted and target token");
        assert_law(&kept, &[1.0 - agreement, agreement], "acceptance");
        // The control: independent draws have the same margins and another joint law.
        let independent: Vec<f64> = (0..n * n).map(|cell| q[cell / n] * p[cell % n]).collect();
        assert!(power(RUNS, &independent, &joint) > 0.999_999);
        assert!(!Test::new(&cells, &independent).passes());
    }
}

/// The text of a seed: `length` tokens in rounds of up to `limit` drafted ones, cut anywhere.
fn text(toy: &Toy, seed: u64, length: usize, limit: usize) -> (Vec<u32>, usize) {
    let noise = Noise { seed, sample: 0 };
    let (mut text, mut rounds) = (Vec::new(), 0);
    while text.len() < length {
        let cut = noise.uniform(text.len() as u32, 99, Purpose::Draft) * (limit + 1) as f64;
        text.extend(toy.round(
            &text.clone(),
            cut as usize,
            Rule::Coupled,
            &Counted::new(noise, text.len() as u32),
        ));
        rounds += 1;
    }
    text.truncate(length);
    (text, rounds)
}

#[test]
fn the_text_of_a_seed_does_not_depend_on_the_draft() {
    let default = SamplingParams::default;
    let shapes = [
        default(),
        SamplingParams::greedy(),
        SamplingParams { temperature: 0.7, top_p: 0.9, ..default() },
        SamplingParams { top_k: 4, min_p: 0.05, repetition_penalty: 1.2, presence_penalty: 0.4, ..default() },
    ];
    let mut rounds_saved = 0;
    for (i, params) in shapes.into_iter().enumerate() {
        let toy = Toy::new(7, 80 + i as u64).with(params);
        let others = [toy.clone().with_greedy_draft(), Toy { distance: 2.0, ..toy.clone() }];
        for seed in 0..60 {
            let (alone, rounds) = text(&toy, seed, 40, 0);
            assert_eq!(rounds, 40);
            for drafted in [&toy, &others[0], &others[1]] {
                let (same, rounds) = text(drafted, seed, 40, 5);
                assert_eq!(same, alone);
                rounds_saved += 40 - rounds;
            }
        }
    }
    assert!(rounds_saved > 5000, "drafts were accepted: {rounds_saved} rounds saved");
}
