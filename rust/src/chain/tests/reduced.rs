//! A draft that knows part of the vocabulary, and a recurrent head that goes through the anchor's own slot.

use super::super::*;
use super::fixture::*;
use crate::rows::Matrix;

const TOKENS: [u32; 6] = [0, 2, 3, 7, 8, 11];
const ALL_RULES: [Rule; 3] = [Rule::Rejection, Rule::Block, Rule::Coupled];

/// The columns of base logits and the rows of W2 that belong to `TOKENS`.
fn reduced(d: &Draft) -> Draft {
    let base = (0..GAMMA).flat_map(|k| TOKENS.map(|t| d.base.at(k)[t as usize])).collect();
    let w2 = TOKENS.iter().flat_map(|&t| d.w2.at(t as usize).to_vec()).collect();
    let copy = |dense: &Dense| dense.clone();
    Draft {
        base: Dense { cols: TOKENS.len(), data: base },
        w2: Dense { cols: R, data: w2 },
        hidden: copy(&d.hidden),
        w1: copy(&d.w1),
        gate: (copy(&d.gate.0), copy(&d.gate.1)),
        joint: (copy(&d.joint.0), copy(&d.joint.1)),
        confidence: copy(&d.confidence),
    }
}

fn heads_of(d: &Draft) -> [Heads<'_>; 5] {
    [Heads::default(), d.vanilla(), d.gated(), d.rnn(), d.confident()]
}

/// A reduced vocabulary gives the laws, tokens and confidences of a whole one whose other tokens have no
/// logit, under every rule and transform. W1, bias and penalties use target ids, which above 0 all differ
/// from the columns.
#[test]
fn a_reduced_vocabulary_is_the_whole_one_without_the_others() {
    let default = SamplingParams::default;
    let samplings = [
        default(),
        SamplingParams::greedy(),
        SamplingParams { temperature: 1.4, top_k: 4, top_p: 0.9, min_p: 0.01, ..default() },
        SamplingParams { logit_bias: vec![(7, 2.5), (5, 9.0), (2, -3.0)], ..default() },
        SamplingParams {
            repetition_penalty: 1.6,
            presence_penalty: 0.7,
            frequency_penalty: 0.4,
            ..default()
        },
        SamplingParams { min_tokens: 3, stop_token_ids: vec![3, 9], ..default() },
    ];
    let mut drawn = std::collections::BTreeSet::new();
    for seed in 0..12 {
        let mut whole = Draft::new(50 * seed);
        let part = reduced(&whole);
        for (i, logit) in whole.base.data.iter_mut().enumerate() {
            if !TOKENS.contains(&((i % V) as u32)) {
                *logit = f64::NEG_INFINITY;
            }
        }
        for (heads, expected) in heads_of(&part).into_iter().zip(heads_of(&whole)) {
            let heads = Heads { vocabulary: Some(&TOKENS), ..heads };
            heads.check(TOKENS.len(), Some(H)).unwrap();
            for (params, candidates) in samplings.iter().flat_map(|p| [None, Some(3)].map(|c| (p, c))) {
                for rule in ALL_RULES {
                    let settings = ChainSettings { candidates, ..ALL };
                    let chain = part.run(&heads, &settings, rule, params);
                    let expected = whole.run(&expected, &settings, rule, params);
                    assert_eq!(chain.ids, expected.ids, "{rule:?} {params:?} {candidates:?}");
                    assert_eq!((chain.confidence, chain.bad_rows), (expected.confidence, expected.bad_rows));
                    for (found, law) in chain.laws.iter().zip(&expected.laws) {
                        for token in 0..V as u32 + 2 {
                            assert!((found.prob(token) - law.prob(token)).abs() < 1e-14);
                        }
                    }
                    drawn.extend(chain.ids);
                }
            }
        }
    }
    assert_eq!(drawn.into_iter().collect::<Vec<_>>(), TOKENS, "every token of the draft is drawn somewhere");
}

#[test]
fn a_vocabulary_that_does_not_fit_is_refused() {
    let d = Draft::new(1);
    let part = reduced(&d);
    let refused = |tokens: &[u32]| {
        Heads { vocabulary: Some(tokens), ..part.vanilla() }.check(6, Some(H)).unwrap_err().to_string()
    };
    assert_eq!(refused(&TOKENS[..5]), "the draft's vocabulary must be 6 ascending tokens, found 5");
    let message = "the draft's vocabulary must be 6 ascending tokens, found 6 that do not ascend";
    assert_eq!(refused(&[0, 2, 2, 7, 8, 11]), message);
    assert_eq!(refused(&[0, 3, 2, 7, 8, 11]), message);
}

/// There is one more row of hidden states, and slot k reads row k + 1; before the first slot, the state has
/// taken one step over row 0 with the anchor.
#[test]
fn a_recurrence_through_the_anchors_slot() {
    let d = Draft::new(3);
    let hidden = Dense::new(GAMMA + 1, H, 77);
    let tokens = [3, 0, 7, 7, 11];
    let run = |kind: MarkovKind<'_>, hidden: &[f64]| {
        let hidden = Rows::F64(Matrix::contiguous(hidden, H));
        step_logits(&tokens, d.base.rows(), Some(hidden), &d.head(kind))
    };
    let found = run(d.recurrence(true), &hidden.data);
    let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mut state = vec![0.0; R];
    for (step, token) in [3].into_iter().chain(tokens).enumerate() {
        let inputs = [&state, d.w1.at(token as usize), hidden.at(step)].concat();
        let z: Vec<f64> = d.joint.0.times(&inputs).iter().zip(&d.joint.1.data).map(|(z, b)| z + b).collect();
        state = (0..R).map(|i| sigma(z[i]) * state[i] + (1.0 - sigma(z[i])) * z[R + i].tanh()).collect();
        let Some(slot) = step.checked_sub(1) else { continue };
        let latent: Vec<f64> = (0..R).map(|i| z[2 * R + i].tanh()).collect();
        for ((found, base), bias) in found[slot].iter().zip(d.base.at(slot)).zip(d.w2.times(&latent)) {
            assert!((found - base - bias).abs() < 1e-12);
        }
    }
    assert_ne!(found, run(d.recurrence(false), &hidden.data[H..]), "the first step matters");
    let heads = d.head(d.recurrence(true));
    assert_eq!((heads.hidden_rows(GAMMA), d.rnn().hidden_rows(GAMMA)), (GAMMA + 1, GAMMA));

    // And the chain takes the same steps.
    let chain =
        Draft { hidden, ..Draft::new(3) }.run(&heads, &ALL, Rule::Rejection, &SamplingParams::greedy());
    let path = [&[3], &chain.ids[..GAMMA - 1]].concat();
    let hidden = Dense::new(GAMMA + 1, H, 77);
    for (row, id) in step_logits(&path, d.base.rows(), Some(hidden.rows()), &heads).iter().zip(&chain.ids) {
        assert!(row.iter().all(|x| *x <= row[*id as usize]));
    }
}
