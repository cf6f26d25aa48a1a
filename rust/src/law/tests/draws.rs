//! Checks draws, residuals and races against plain loops over all tokens.

use super::*;
use crate::noise::{Counted, Injected, RoundNoise};

/// The token at which a running sum of weights passes `u` of their total.
fn plain_draw(weights: &[f64], u: f64) -> usize {
    let mut left = u * weights.iter().sum::<f64>();
    let mut last = 0;
    for (i, &w) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
        if left < w {
            return i;
        }
        left -= w;
        last = i;
    }
    last
}

/// Laws of every form over `n` tokens: dense, truncated, of candidates, and of one token.
fn laws(dice: &mut Dice, n: usize) -> Vec<Law<'static>> {
    let mut workspace = Workspace::default();
    let history = History::default();
    let mut laws = vec![Law::point(dice.below(n) as u32)];
    let shapes = [
        SamplingParams::default(),
        SamplingParams { temperature: 0.6, ..Default::default() },
        SamplingParams { top_k: (n / 3) as u32 + 1, ..Default::default() },
        SamplingParams { top_p: 0.8, ..Default::default() },
    ];
    for params in &shapes {
        let row = dice.logits(n, 6.0);
        let single: Vec<f32> = row.iter().map(|&x| x as f32).collect();
        laws.push(law_of(Row::F64(&row), params).into_owned());
        laws.push(law_of(Row::F32(&single), params).into_owned());
        let ids: Vec<u32> = (0..n as u32).filter(|&id| id + 1 == n as u32 || dice.unit() < 0.4).collect();
        let some = ids.iter().map(|&id| single[id as usize]).collect();
        let logits = Logits::F32(Cow::Owned(some));
        laws.extend(Law::of(logits, Some(ids), params, &history, &mut workspace));
    }
    laws
}

#[test]
fn draws_invert_the_distribution_function() {
    let mut dice = Dice::new(4);
    for n in [2, 30, 3000] {
        for law in laws(&mut dice, n) {
            let p = probs(&law, n);
            assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            for _ in 0..200 {
                let u = dice.unit();
                assert_eq!(law.draw(u) as usize, plain_draw(&p, u));
            }
            assert_eq!(law.draw(0.0) as usize, p.iter().position(|p| *p > 0.0).unwrap());
            assert!(law.prob(law.draw(1.0 - f64::EPSILON / 2.0)) > 0.0);
        }
    }
}

#[test]
fn residuals_are_what_is_left_of_p() {
    let mut dice = Dice::new(5);
    let mut workspace = Workspace::default();
    for n in [2, 40, 2500] {
        let (left, right) = (laws(&mut dice, n), laws(&mut dice, n));
        for p in &left {
            for q in &right {
                let factor = if dice.unit() < 0.5 { 1.0 } else { dice.unit() };
                let (pp, qq) = (probs(p, n), probs(q, n));
                let rest: Vec<f64> = pp.iter().zip(&qq).map(|(p, q)| (factor * p - q).max(0.0)).collect();
                let mass: f64 = rest.iter().sum();
                assert!((p.residual_mass(q, factor, &mut workspace) - mass).abs() < 1e-12);
                for _ in 0..5 {
                    let u = dice.unit();
                    let token = p.draw_residual(q, factor, u, &mut workspace) as usize;
                    let expected = if mass > 0.0 { plain_draw(&rest, u) } else { plain_draw(&pp, u) };
                    assert_eq!(token, expected);
                }
            }
        }
    }
}

#[test]
fn equal_laws_leave_nothing_and_the_draw_is_from_p() {
    let row = [0.3f32, 1.0, -2.0];
    let (p, q) = (law_of(Row::F32(&row), &Default::default()), law_of(Row::F32(&row), &Default::default()));
    let mut workspace = Workspace::default();
    assert_eq!(p.residual_mass(&q, 1.0, &mut workspace), 0.0);
    assert_eq!(p.draw_residual(&q, 1.0, 0.999, &mut workspace), p.draw(0.999));
}

/// Noise without bounds, so that every token is scored.
struct Unbounded(Counted);

impl RoundNoise for Unbounded {
    fn draft(&self, slot: usize) -> f64 {
        self.0.draft(slot)
    }
    fn accept(&self, slot: usize) -> f64 {
        self.0.accept(slot)
    }
    fn resample(&self, slot: usize) -> f64 {
        self.0.resample(slot)
    }
    fn gumbel(&self, slot: usize, token: u32) -> f64 {
        self.0.gumbel(slot, token)
    }
}

#[test]
fn the_fast_race_has_the_plain_race_s_winner() {
    let mut dice = Dice::new(6);
    let mut winners = std::collections::HashSet::new();
    for n in [2, 90, 3000, 20_000] {
        for law in laws(&mut dice, n) {
            let logs: Vec<f64> = (0..n as u32).map(|token| law.log_prob(token)).collect();
            for position in 0..20 {
                let noise = Counted::new(Noise { seed: 8, sample: 0 }, position);
                let mut best = (f64::NEG_INFINITY, 0);
                for (token, log) in logs.iter().enumerate() {
                    let score = log + noise.gumbel(3, token as u32);
                    if score > best.0 {
                        best = (score, token);
                    }
                }
                let winner = law.gumbel_argmax(&noise, 3);
                assert_eq!(winner as usize, best.1);
                assert_eq!(winner, law.gumbel_argmax(&Unbounded(noise), 3));
                winners.insert(winner);
            }
        }
    }
    assert!(winners.len() > 100, "{} different winners", winners.len());
}

#[test]
fn a_tied_race_goes_to_the_lowest_id() {
    let row = [1.0f64, 2.0, 2.0, 0.0];
    let law = law_of(Row::F64(&row), &Default::default());
    let noise = Injected { gumbel: vec![vec![1.5, 0.5, 0.5, 0.0]], ..Default::default() };
    assert_eq!(law.gumbel_argmax(&noise, 0), 0);
    let noise = Injected { gumbel: vec![vec![0.0, 0.5, 0.5, 2.5]], ..Default::default() };
    assert_eq!(law.gumbel_argmax(&noise, 0), 1);
}

/// Inside a pool of threads, rows are shared among them; no bit of any result changes.
#[test]
fn threads_change_nothing() {
    let mut dice = Dice::new(9);
    let (a, b) = (dice.logits(190_000, 7.0), dice.logits(190_000, 7.0));
    let [a, b] = [a, b].map(|row| row.into_iter().map(|x| x as f32).collect::<Vec<f32>>());
    assert!(a.len() > LONG);
    let noise = Counted::new(Noise { seed: 3, sample: 0 }, 1);
    let results = || {
        let (p, q) = (law_of(Row::F32(&a), &Default::default()), law_of(Row::F32(&b), &Default::default()));
        let mut workspace = Workspace::default();
        let mass = p.residual_mass(&q, 0.9, &mut workspace);
        let draws: Vec<u32> = (0..50)
            .flat_map(|i| {
                let u = f64::from(i) / 50.0;
                [p.draw(u), p.draw_residual(&q, 0.9, u, &mut workspace), p.gumbel_argmax(&noise, i as usize)]
            })
            .collect();
        let mut bad = a.clone();
        bad[100_000] = f32::NAN;
        let bad = Law::new(Row::F32(&bad), &Default::default(), &Default::default(), &mut workspace);
        (p.prob(5), q.prob(7), mass, draws, bad.unwrap_err())
    };
    let alone = results();
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(results), alone);
    }
}
