//! How long the passes over a long row take. Not a check: `cargo test --test timing -- --ignored --nocapture`.

use std::hint::black_box;
use std::time::Instant;

use dspark_core::accept::{Rule, accept_logits};
use dspark_core::history::History;
use dspark_core::law::{Law, Workspace};
use dspark_core::noise::{Counted, Noise, Purpose};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Row, Rows};
use half::{bf16, f16};

const VOCABULARY: usize = 151_936;
const GAMMA: usize = 7;

/// Median of the microseconds that `run` takes.
fn time(what: &str, mut run: impl FnMut()) {
    let mut spent: Vec<f64> = (0..101)
        .map(|_| {
            let started = Instant::now();
            run();
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    spent.sort_by(f64::total_cmp);
    println!("{what:<44} {:8.1} us  ({:.1} .. {:.1})", spent[50], spent[10], spent[90]);
}

/// Logits of about the spread of a language model's.
fn logits(rows: usize, seed: u64) -> Vec<f32> {
    let noise = Noise { seed, sample: 0 };
    (0..rows * VOCABULARY)
        .map(|i| {
            let sum: f64 = (0..4).map(|k| noise.uniform(i as u32, k, Purpose::Draft)).sum();
            ((sum - 2.0) * 4.0) as f32
        })
        .collect()
}

#[test]
#[ignore = "a measurement"]
fn passes_over_a_row() {
    let single = logits(1, 1);
    let double: Vec<f64> = single.iter().map(|&x| f64::from(x)).collect();
    let brain: Vec<bf16> = single.iter().map(|&x| bf16::from_f32(x)).collect();
    let half: Vec<f16> = single.iter().map(|&x| f16::from_f32(x)).collect();
    let history = History::new(&[1, 2, 3]);
    let mut ws = Workspace::default();
    let plain = SamplingParams::default();
    let changed = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        params
    };
    let cases = [
        ("f32", Row::F32(&single), plain.clone()),
        ("bf16", Row::Bf16(&brain), plain.clone()),
        ("f16", Row::F16(&half), plain.clone()),
        ("f64", Row::F64(&double), plain.clone()),
        ("f32 greedy", Row::F32(&single), SamplingParams::greedy()),
        ("f32 penalised", Row::F32(&single), changed(|p| p.repetition_penalty = 1.1)),
        ("f32 top-k 50", Row::F32(&single), changed(|p| p.top_k = 50)),
        ("f32 top-p 0.95", Row::F32(&single), changed(|p| p.top_p = 0.95)),
        ("f32 min-p 0.05", Row::F32(&single), changed(|p| p.min_p = 0.05)),
    ];
    for (what, row, params) in &cases {
        time(&format!("law of a row, {what}"), || {
            let law = Law::new(*row, params, &history, &mut ws).unwrap();
            ws.recycle(black_box(law));
        });
    }
    let other = logits(1, 2);
    let p = Law::new(Row::F32(&single), &plain, &history, &mut ws).unwrap();
    let q = Law::new(Row::F32(&other), &plain, &history, &mut ws).unwrap();
    time("draw", || {
        black_box(p.draw(black_box(0.7)));
    });
    time("residual draw", || {
        black_box(p.draw_residual(&q, 1.0, black_box(0.7), &mut ws));
    });
    let round = Counted::new(Noise { seed: 5, sample: 0 }, 17);
    time("Gumbel argmax", || {
        black_box(p.gumbel_argmax(&round, 0));
    });
    let flat = Law::new(Row::F32(&single), &changed(|p| p.top_p = 0.95), &history, &mut ws).unwrap();
    time("Gumbel argmax, top-p 0.95", || {
        black_box(flat.gumbel_argmax(&round, 0));
    });
}

#[test]
#[ignore = "a measurement"]
fn blocks() {
    let target = logits(GAMMA + 1, 3);
    let other = logits(GAMMA, 4);
    let rows = |data| Rows::F32(Matrix::contiguous(data, VOCABULARY));
    let params = SamplingParams::default();
    let mut ws = Workspace::default();
    let mut history = History::new(&[1]);
    let round = Counted::new(Noise { seed: 9, sample: 0 }, 17);
    // With the target's own logits the draft is always accepted, under `coupled` with the tokens that the
    // target draws; a token that the draft much prefers and the target does not is never accepted.
    let history_of_one = History::new(&[1]);
    let drawn: Vec<u32> = (0..GAMMA)
        .map(|k| {
            Law::new(rows(&target).row(k), &params, &history_of_one, &mut ws)
                .unwrap()
                .gumbel_argmax(&round, k)
        })
        .collect();
    let mut refused = other.clone();
    refused[11] = 40.0;
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        for (what, draft, ids) in
            [("all accepted", &target, &drawn[..]), ("first rejected", &refused, &[11; GAMMA])]
        {
            let mut accepted = 0;
            time(&format!("{rule:?}, {what}"), || {
                let verdict = accept_logits(
                    rule,
                    rows(&target),
                    ids,
                    rows(draft),
                    &params,
                    &mut history,
                    &round,
                    &mut ws,
                );
                history.rewind(0);
                accepted = black_box(verdict.unwrap()).accepted;
            });
            println!("    {accepted} accepted");
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn scheduling() {
    use dspark_core::schedule::*;
    let (requests, gamma) = (64, 7);
    let points: Vec<_> =
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map(|t| (t, 0.01 + 0.0001 * t as f64)).to_vec();
    let cost = CostTable::new(&points).unwrap().with_draft(&[(1, 0.002), (64, 0.003)]).unwrap();
    let noise = Noise { seed: 3, sample: 0 };
    for lag in [None, std::num::NonZeroUsize::new(1)] {
        let policy = Policy::Throughput { cost: cost.clone(), lag };
        let mut planner = Planner::new(policy, Rule::Rejection, gamma);
        let mut tracks = vec![Track::default(); requests];
        let mut spent = [Vec::new(), Vec::new(), Vec::new()];
        for round in 1..=400 {
            let confidences: Vec<Vec<f32>> = (0..requests as u32)
                .map(|r| {
                    (0..gamma as u32)
                        .map(|k| 0.3 + 0.7 * noise.uniform(round, r * 8 + k, Purpose::Draft) as f32)
                        .collect()
                })
                .collect();
            let started = Instant::now();
            let mut prospects: Vec<_> =
                tracks.iter_mut().map(|track| Prospect { room: gamma, greedy: false, track }).collect();
            let depths = black_box(planner.depths(&mut prospects));
            spent[0].push(started.elapsed().as_secs_f64() * 1e6);
            let drafts: Vec<_> = depths
                .iter()
                .zip(&confidences)
                .map(|(d, c)| Draft { drafted: d.tokens, limit: d.tokens, confidences: &c[..d.tokens] })
                .collect();
            let started = Instant::now();
            let lengths = black_box(planner.plan(&drafts, false).unwrap());
            spent[1].push(started.elapsed().as_secs_f64() * 1e6);
            let started = Instant::now();
            let accepted = |r: usize, length: usize| {
                let kept = |k: &usize| noise.uniform(round, (r * 8 + k) as u32, Purpose::Accept) < 0.65;
                (0..length).take_while(kept).count()
            };
            planner.learn(tracks.iter_mut().enumerate().map(|(r, track)| Lesson {
                track,
                greedy: false,
                outcome: Outcome {
                    drafted: depths[r].tokens,
                    confidences: &confidences[r][..depths[r].tokens],
                    verified: lengths[r],
                    accepted: accepted(r, lengths[r]),
                },
            }));
            let width = requests + lengths.iter().sum::<usize>();
            let verify = 0.01 + 0.0001 * width as f64;
            planner.timed(&RoundTime {
                requests,
                tokens: width,
                verify,
                drafting: 64,
                draft: 0.003,
                total: verify + 0.003,
                ..RoundTime::default()
            });
            spent[2].push(started.elapsed().as_secs_f64() * 1e6);
        }
        for (what, spent) in ["depths", "plan", "learn and timed"].iter().zip(&mut spent) {
            spent.sort_by(f64::total_cmp);
            println!(
                "{what}, 64 requests of 7, lag {lag:?}: {:.1} us ({:.1} .. {:.1})",
                spent[200], spent[40], spent[360]
            );
        }
    }
}
