mod edges;
mod fixture;
mod reduced;

use super::*;
use crate::noise::{Counted, Injected, Noise};
use crate::rows::{Matrix, Row};
use fixture::*;
use half::{bf16, f16};

fn sigma(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn close(found: &[Vec<f64>], expected: &[Vec<f64>]) -> bool {
    found.len() == expected.len()
        && found.iter().flatten().zip(expected.iter().flatten()).all(|(a, b)| (a - b).abs() < 1e-12)
}

/// Checks the three formulas, written down again with plain loops.
#[test]
fn heads_follow_their_formulas() {
    let d = Draft::new(0);
    let tokens = [3, 0, 7, 7, 11];
    type Latent<'a> = &'a mut dyn FnMut(&[f64], &[f64]) -> Vec<f64>;
    let along = |f: Latent<'_>| -> Vec<Vec<f64>> {
        let step = |(k, &t): (usize, &u32)| {
            let bias = d.w2.times(&f(d.w1.at(t as usize), d.hidden.at(k)));
            d.base.at(k).iter().zip(bias).map(|(u, b)| u + b).collect()
        };
        tokens.iter().enumerate().map(step).collect()
    };
    let logits = |heads: &Heads<'_>| step_logits(&tokens, d.base.rows(), Some(d.hidden.rows()), heads);

    assert!(close(&logits(&d.vanilla()), &along(&mut |e, _| e.to_vec())));
    let gated = along(&mut |e, h| {
        let gate = d.gate.0.times(&[h, e].concat());
        (0..R).map(|i| sigma(gate[i] + d.gate.1.data[i]) * e[i]).collect()
    });
    assert!(close(&logits(&d.gated()), &gated));
    let mut s = vec![0.0; R];
    let rnn = along(&mut |e, h| {
        let z: Vec<f64> =
            d.joint.0.times(&[&s, e, h].concat()).iter().zip(&d.joint.1.data).map(|(z, b)| z + b).collect();
        s = (0..R).map(|i| sigma(z[i]) * s[i] + (1.0 - sigma(z[i])) * z[R + i].tanh()).collect();
        (0..R).map(|i| z[2 * R + i].tanh()).collect()
    });
    assert!(close(&logits(&d.rnn()), &rnn));
    let none: Vec<Vec<f64>> = (0..GAMMA).map(|k| d.base.at(k).to_vec()).collect();
    assert!(close(&logits(&Heads::default()), &none));
}

/// Token k is drawn from row k of the base logits, and each step reads the token drawn before it.
#[test]
fn a_chain_walks_slots_and_tokens_in_step() {
    for seed in 0..20 {
        let d = Draft::new(100 * seed);
        for heads in [d.vanilla(), d.gated(), d.rnn(), Heads::default()] {
            let chain = d.greedy(&heads);
            assert_eq!(chain.ids.len(), GAMMA);
            let path = [&[3], &chain.ids[..GAMMA - 1]].concat();
            for (k, row) in
                step_logits(&path, d.base.rows(), Some(d.hidden.rows()), &heads).iter().enumerate()
            {
                let first_largest = (0..V).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
                assert_eq!(chain.ids[k] as usize, first_largest);
                assert_eq!(chain.laws[k].prob(chain.ids[k]), 1.0);
            }
        }
    }
    // The same by hand: W1 = identity, W2 sends t to t + 1, a large base logit makes one slot draw token 0.
    let identity: Vec<f64> = (0..V * V).map(|i| f64::from(u8::from(i / V == i % V))).collect();
    let next: Vec<f64> = (0..V * V).map(|i| f64::from(u8::from(i / V == (i % V + 1) % V))).collect();
    let (w1, w2) = (Matrix::contiguous(&identity, V), Matrix::contiguous(&next, V));
    let heads = Heads {
        markov: Some(MarkovHead { kind: MarkovKind::Vanilla, w1: Rows::F64(w1), w2: Rows::F64(w2) }),
        ..Heads::default()
    };
    let mut d = Draft::new(0);
    d.base.data.fill(0.0);
    assert_eq!(d.greedy(&heads).ids, [4, 5, 6, 7, 8]);
    for slot in 0..GAMMA {
        let mut d = Draft { base: d.base.clone(), ..Draft::new(0) };
        d.base.data[slot * V] = 9.0;
        let mut expected = [4, 5, 6, 7, 8];
        expected[slot..].copy_from_slice(&[0, 1, 2, 3, 4][..GAMMA - slot]);
        assert_eq!(d.greedy(&heads).ids, expected, "slot {slot}");
    }
}

#[test]
fn all_element_types_give_the_same_chain() {
    let d = Draft::new(7);
    let expected = d.greedy(&d.vanilla()).ids;
    macro_rules! ids {
        ($kind:ident, $make:expr) => {{
            let make = |dense: &Dense| dense.data.iter().map(|&x| $make(x)).collect::<Vec<_>>();
            let (base, w1, w2) = (make(&d.base), make(&d.w1), make(&d.w2));
            let head = MarkovHead {
                kind: MarkovKind::Vanilla,
                w1: Rows::$kind(Matrix::contiguous(&w1, R)),
                w2: Rows::$kind(Matrix::contiguous(&w2, R)),
            };
            let noise = Injected::default();
            draft(
                3,
                Rows::$kind(Matrix::contiguous(&base, V)),
                None,
                &Heads { markov: Some(head), ..Heads::default() },
                &ALL,
                Rule::Rejection,
                &SamplingParams::greedy(),
                &mut History::new(&[]),
                &noise,
                &mut Workspace::default(),
            )
            .ids
        }};
    }
    assert_eq!(ids!(F64, |x| x), expected);
    assert_eq!(ids!(F32, |x| x as f32), expected);
    assert_eq!(ids!(F16, f16::from_f64), expected);
    assert_eq!(ids!(Bf16, bf16::from_f64), expected);
}

#[test]
fn tokens_come_from_their_laws_with_the_noise_of_the_rule() {
    let d = Draft::new(3);
    let params = SamplingParams { temperature: 0.8, top_k: 6, ..SamplingParams::default() };
    let noise = Counted::new(Noise { seed: 11, sample: 0 }, 40);
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        let chain = d.run(&d.rnn(), &ALL, rule, &params);
        for (k, law) in chain.laws.iter().enumerate() {
            let expected =
                if rule == Rule::Coupled { law.gumbel_argmax(&noise, k) } else { law.draw(noise.draft(k)) };
            assert_eq!(chain.ids[k], expected);
        }
    }
    assert_ne!(
        d.run(&d.rnn(), &ALL, Rule::Coupled, &params).ids,
        d.run(&d.rnn(), &ALL, Rule::Block, &params).ids
    );
}

#[test]
fn laws_see_the_parameters_and_the_block_so_far() {
    let d = Draft::new(5);
    let params = SamplingParams {
        temperature: 0.7,
        top_p: 0.9,
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        logit_bias: vec![(2, 1.5)],
        min_tokens: 3,
        stop_token_ids: vec![4],
        ..SamplingParams::default()
    };
    let chain = d.run(&d.vanilla(), &ALL, Rule::Rejection, &params);
    let path = [&[3], &chain.ids[..GAMMA - 1]].concat();
    let mut history = History::new(&[3]);
    let mut workspace = Workspace::default();
    for (k, row) in step_logits(&path, d.base.rows(), None, &d.vanilla()).iter().enumerate() {
        let law = Law::new(Row::F64(row), &params, &history, &mut workspace).unwrap();
        for token in 0..V as u32 {
            assert!((law.prob(token) - chain.laws[k].prob(token)).abs() < 1e-12);
        }
        assert!(k >= 3 || chain.laws[k].prob(4) == 0.0);
        history.push(chain.ids[k]);
    }
    // A penalty that forbids repetition makes the block a permutation.
    let strict = SamplingParams { presence_penalty: 1e4, ..SamplingParams::greedy() };
    let mut ids = d.run(&d.vanilla(), &ALL, Rule::Rejection, &strict).ids;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), GAMMA);
}

#[test]
fn a_shorter_chain_is_a_prefix() {
    let d = Draft::new(2);
    for rule in [Rule::Rejection, Rule::Coupled] {
        let whole = d.run(&d.confident(), &ALL, rule, &SamplingParams::default());
        for limit in 0..GAMMA + 3 {
            let chain =
                d.run(&d.confident(), &ChainSettings { limit, ..ALL }, rule, &SamplingParams::default());
            let length = limit.min(GAMMA);
            assert_eq!((chain.ids.as_slice(), chain.cut), (&whole.ids[..length], false));
            assert_eq!(
                (chain.confidence.as_slice(), chain.laws.len()),
                (&whole.confidence[..length], length)
            );
        }
    }
}

#[test]
fn confidence_reads_the_previous_token_and_cuts_before_the_draw() {
    let mut cuts = 0;
    for seed in 0..30 {
        let d = Draft::new(1000 + seed);
        let params = SamplingParams::default();
        let whole = d.run(&d.confident(), &ALL, Rule::Rejection, &params);
        let path = [&[3], &whole.ids[..GAMMA - 1]].concat();
        for (k, &previous) in path.iter().enumerate() {
            let features = [d.hidden.at(k), d.w1.at(previous as usize)].concat();
            let expected = sigma(d.confidence.times(&features)[0] + 0.5);
            assert!((f64::from(whole.confidence[k]) - expected).abs() < 1e-6);
        }
        for threshold in [0.0, 0.2, 0.5, 0.8] {
            let settings = ChainSettings { threshold: Some(threshold), ..ALL };
            let chain = d.run(&d.confident(), &settings, Rule::Rejection, &params);
            let kept = crate::schedule::threshold_prefix(&whole.confidence, threshold);
            assert_eq!(chain.ids, whole.ids[..kept]);
            assert_eq!(chain.confidence, whole.confidence[..kept]);
            assert_eq!(chain.cut, kept < GAMMA);
            cuts += usize::from(chain.cut);
        }
    }
    assert!(cuts > 20, "only {cuts} cuts");
}

#[test]
fn calibration_divides_the_logit_of_its_slot() {
    let d = Draft::new(4);
    let plain = d.greedy(&d.confident());
    let temperatures = [1.0, 2.0, 0.5, 4.0, 1.0];
    let settings = ChainSettings { temperatures: Some(&temperatures), ..ALL };
    let chain = d.run(&d.confident(), &settings, Rule::Rejection, &SamplingParams::greedy());
    for (k, temperature) in temperatures.iter().enumerate() {
        let c = f64::from(plain.confidence[k]);
        let expected = sigma((c / (1.0 - c)).ln() / temperature);
        assert!((f64::from(chain.confidence[k]) - expected).abs() < 1e-5);
    }
}
