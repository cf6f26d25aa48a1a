//! How long a Markov chain and a plan take. Not a check:
//! `cargo test --release --test chain_timing -- --ignored --nocapture`.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::Instant;

use dspark_core::accept::Rule;
use dspark_core::chain::{ChainSettings, ConfidenceHead, Heads, MarkovHead, MarkovKind, draft};
use dspark_core::history::History;
use dspark_core::law::Workspace;
use dspark_core::noise::{Counted, Noise, Purpose};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Row, Rows};
use dspark_core::schedule::{CostTable, DelayedSearch, Draft, Foresight, Survivals, plan};
use half::bf16;

const GAMMA: usize = 7;

/// Median of the microseconds that `run` takes, after `before`.
fn time(what: &str, times: usize, mut before: impl FnMut(), mut run: impl FnMut()) {
    let mut spent: Vec<f64> = (0..times)
        .map(|_| {
            before();
            let started = Instant::now();
            run();
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    spent.sort_by(f64::total_cmp);
    let at = |share: f64| spent[((times - 1) as f64 * share) as usize];
    println!("{what:<52} {:9.2} us  ({:.2} .. {:.2})", at(0.5), at(0.1), at(0.9));
}

fn numbers(n: usize, spread: f32, seed: u64) -> Vec<f32> {
    let noise = Noise { seed, sample: 0 };
    (0..n).map(|i| (noise.uniform(i as u32, 0, Purpose::Draft) as f32 - 0.5) * spread).collect()
}

/// Times whole chains of one size, each `times` times.
fn chains(name: &str, vocabulary: usize, rank: usize, hidden: usize, times: usize, half: bool) {
    let w1 = numbers(vocabulary * rank, 2.0, 1);
    let w2 = numbers(vocabulary * rank, 2.0, 2);
    let base = numbers(GAMMA * vocabulary, 8.0, 3);
    let states = numbers(GAMMA * hidden, 2.0, 4);
    let joint = numbers(3 * rank * (2 * rank + hidden), 0.2, 5);
    let bias = vec![0.0f32; 3 * rank];
    let weight = numbers(hidden + rank, 0.1, 6);
    let (w1_half, w2_half): (Vec<bf16>, Vec<bf16>) = match half {
        true => {
            (w1.iter().map(|&x| bf16::from_f32(x)).collect(), w2.iter().map(|&x| bf16::from_f32(x)).collect())
        }
        false => Default::default(),
    };
    let (w1, w2) = match half {
        true => {
            (Rows::Bf16(Matrix::contiguous(&w1_half, rank)), Rows::Bf16(Matrix::contiguous(&w2_half, rank)))
        }
        false => (Rows::F32(Matrix::contiguous(&w1, rank)), Rows::F32(Matrix::contiguous(&w2, rank))),
    };
    let rnn = MarkovKind::Rnn {
        joint_w: Rows::F32(Matrix::contiguous(&joint, 2 * rank + hidden)),
        joint_b: Row::F32(&bias),
        through_anchor: false,
    };
    let confidence = Some(ConfidenceHead { weight: Row::F32(&weight), bias: None, with_markov: true });
    let heads = |kind| Heads { markov: Some(MarkovHead { kind, w1, w2 }), confidence, vocabulary: None };
    // Empties the caches as a target pass does.
    let sweep = vec![1u64; 12 << 20];
    let cold = || {
        black_box(sweep.iter().sum::<u64>());
    };
    let warm = || {};
    let noise = Counted::new(Noise { seed: 1, sample: 0 }, 9);
    let (mut history, mut workspace) = (History::new(&[1]), Workspace::default());
    let mut run = |what: &str, kind, params: &SamplingParams, candidates, rule, before: &dyn Fn()| {
        let settings = ChainSettings { limit: GAMMA, candidates, ..ChainSettings::default() };
        let heads = heads(kind);
        let mut body = || {
            let mut chain = draft(
                1,
                Rows::F32(Matrix::contiguous(&base, vocabulary)),
                Some(Rows::F32(Matrix::contiguous(&states, hidden))),
                &heads,
                &settings,
                rule,
                params,
                &mut history,
                &noise,
                &mut workspace,
            );
            assert_eq!(chain.ids.len(), GAMMA);
            chain.recycle(&mut workspace);
        };
        time(&format!("{name}: {what}, {GAMMA} steps"), times, before, &mut body);
    };
    let (greedy, sampled) = (SamplingParams::greedy(), SamplingParams::default());
    run("vanilla greedy", MarkovKind::Vanilla, &greedy, None, Rule::Rejection, &warm);
    if vocabulary > 10_000 {
        run("vanilla greedy, cold", MarkovKind::Vanilla, &greedy, None, Rule::Rejection, &cold);
        run(
            "vanilla greedy, 256 candidates",
            MarkovKind::Vanilla,
            &greedy,
            Some(256),
            Rule::Rejection,
            &warm,
        );
        run(
            "vanilla greedy, 256 candidates, cold",
            MarkovKind::Vanilla,
            &greedy,
            Some(256),
            Rule::Rejection,
            &cold,
        );
    }
    run("rnn greedy", rnn, &greedy, None, Rule::Rejection, &warm);
    run("vanilla sampled", MarkovKind::Vanilla, &sampled, None, Rule::Rejection, &warm);
    run("vanilla coupled", MarkovKind::Vanilla, &sampled, None, Rule::Coupled, &warm);
}

#[test]
#[ignore = "a measurement"]
fn chain() {
    chains("embedded f32", 512, 16, 128, 5001, false);
    chains("SmolLM2 f32", 49_152, 64, 576, 101, false);
    chains("SmolLM2 bf16", 49_152, 64, 576, 101, true);
    chains("flagship bf16", 151_936, 256, 2560, 11, true);
}

#[test]
#[ignore = "a measurement"]
fn plans() {
    let cost = CostTable::new(&[(1, 0.02), (64, 0.021), (128, 0.03), (256, 0.05), (512, 0.09)]).unwrap();
    for requests in [1, 8, 64] {
        let confidences: Vec<Vec<f32>> = (0..requests)
            .map(|r| (0..GAMMA).map(|k| 0.5 + ((r * 31 + k * 17) % 50) as f32 / 100.0).collect())
            .collect();
        let drafts: Vec<Draft<'_>> =
            confidences.iter().map(|c| Draft { drafted: GAMMA, limit: GAMMA, confidences: c }).collect();
        let survivals = || Survivals::new(&drafts).unwrap();
        let mut delayed = DelayedSearch::new(NonZeroUsize::MIN);
        let foresight = || Foresight::allowed(Rule::Coupled, false).unwrap();
        let run = |what: &str, plan: &mut dyn FnMut() -> Vec<usize>| {
            time(
                &format!("{requests} requests of {GAMMA}: {what}"),
                1001,
                || {},
                || {
                    black_box(plan());
                },
            );
        };
        run("Algorithm 1", &mut || plan::causal(&survivals(), &cost));
        run("global search", &mut || plan::global(&survivals(), &cost, foresight()));
        run("delayed search", &mut || delayed.plan(&survivals(), &cost));
    }
}
