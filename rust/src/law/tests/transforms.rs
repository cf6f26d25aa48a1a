//! Tests of the order and the meaning of the transforms.

use super::*;

/// The transforms by the book: sort, sum and compare, in `f64`.
fn by_the_book(row: &[f64], params: &SamplingParams, history: &History) -> Vec<f64> {
    let mut x = row.to_vec();
    let n = x.len() as u32;
    if history.generated() < params.min_tokens as usize {
        for &stop in params.stop_token_ids.iter().filter(|&&id| id < n) {
            x[stop as usize] = f64::NEG_INFINITY;
        }
    }
    for &(token, bias) in &params.logit_bias {
        x[token as usize] += bias;
    }
    for token in 0..n {
        let (seen, x) = (history.count(token), &mut x[token as usize]);
        if seen.in_prompt || seen.in_output > 0 {
            *x = if *x < 0.0 { *x * params.repetition_penalty } else { *x / params.repetition_penalty };
        }
        *x -= f64::from(seen.in_output) * params.frequency_penalty;
        *x -= if seen.in_output > 0 { params.presence_penalty } else { 0.0 };
    }
    let softmax = |x: &[f64]| {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = x.iter().map(|x| ((x - max) / params.temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|w| w / total).collect::<Vec<f64>>()
    };
    let order = |x: &[f64]| {
        let mut order: Vec<usize> = (0..x.len()).collect();
        order.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).unwrap());
        order
    };
    if params.top_k > 0 {
        for &i in order(&x).iter().skip(params.top_k as usize) {
            x[i] = f64::NEG_INFINITY;
        }
    }
    if params.top_p < 1.0 {
        let (p, mut ahead) = (softmax(&x), 0.0);
        for (rank, &i) in order(&x).iter().enumerate() {
            if rank > 0 && ahead >= params.top_p {
                x[i] = f64::NEG_INFINITY;
            }
            ahead += p[i];
        }
    }
    if params.min_p > 0.0 {
        let p = softmax(&x);
        let max = p.iter().copied().fold(0.0, f64::max);
        for (x, p) in x.iter_mut().zip(p) {
            if p < params.min_p * max {
                *x = f64::NEG_INFINITY;
            }
        }
    }
    softmax(&x)
}

fn any_params(dice: &mut Dice, n: usize) -> SamplingParams {
    let mut params = SamplingParams { temperature: 0.3 + 1.5 * dice.unit(), ..Default::default() };
    let on = |dice: &mut Dice| dice.unit() < 0.5;
    if on(dice) {
        params.top_k = dice.below(n + 3) as u32;
    }
    if on(dice) {
        params.top_p = 0.02 + 0.97 * dice.unit();
    }
    if on(dice) {
        params.min_p = 0.3 * dice.unit();
    }
    if on(dice) {
        params.repetition_penalty = 0.7 + dice.unit();
    }
    if on(dice) {
        params.presence_penalty = 2.0 * dice.unit() - 1.0;
    }
    if on(dice) {
        params.frequency_penalty = 2.0 * dice.unit() - 1.0;
    }
    if on(dice) {
        params.logit_bias = vec![(dice.below(n) as u32, 3.0), (dice.below(n) as u32, -4.0)];
    }
    if on(dice) {
        params.min_tokens = 4;
        params.stop_token_ids = vec![dice.below(n) as u32, n as u32 + 5];
    }
    params
}

#[test]
fn every_combination_is_what_the_book_says() {
    let mut dice = Dice::new(1);
    let mut workspace = Workspace::default();
    let mut beyond_borders = 0;
    for round in 0..1500 {
        let n = [5, 40, 700, 2500][round % 4];
        let row = dice.logits(n, 8.0);
        let params = any_params(&mut dice, n);
        let mut history = History::new(&[1, 2, 2, dice.below(n) as u32]);
        for _ in 0..dice.below(7) {
            history.push(dice.below(n) as u32);
        }
        let expected = by_the_book(&row, &params, &history);
        let law = Law::new(Row::F64(&row), &params, &history, &mut workspace).unwrap();
        assert_close(&probs(&law, n), &expected, 1e-12);
        workspace.recycle(law);
        let single: Vec<f32> = row.iter().map(|&x| x as f32).collect();
        let law = Law::new(Row::F32(&single), &params, &history, &mut workspace).unwrap();
        // In single precision a token may cross a border; where none does, the laws agree.
        let found = probs(&law, n);
        let differs = |(a, b): (&f64, &f64)| if *a > 0.0 { *b == 0.0 } else { *b > 1e-30 };
        let same_support = !found.iter().zip(&expected).any(differs);
        if same_support {
            assert_close(&found, &expected, 3e-6);
        } else {
            assert!(params.top_p < 1.0 || params.min_p > 0.0 || params.top_k > 0);
            beyond_borders += 1;
        }
        workspace.recycle(law);
    }
    assert!(beyond_borders < 15, "{beyond_borders} of 1500");
}

/// Numbers from transformers 5.24 in float64: temperature, top-k, top-p, min-p, repetition penalty, and all.
#[test]
fn transformers_says_the_same() {
    let row = [2.0, -1.0, 0.5, 1.5, -0.25, 3.0, 0.0, 2.5];
    let mut history = History::new(&[1, 5]);
    [7, 7, 2].into_iter().for_each(|token| history.push(token));
    let default = SamplingParams::default;
    let cases = [
        (
            SamplingParams { temperature: 0.7, ..default() },
            [
                0.126044559435518,
                0.00173485043493177,
                0.0147874426036922,
                0.0617040628041886,
                0.00506497791037079,
                0.525950403999781,
                0.00723906919281468,
                0.257474633618703,
            ],
        ),
        (
            SamplingParams { top_k: 3, ..default() },
            [0.186323723225848, 0.0, 0.0, 0.0, 0.0, 0.506480391055654, 0.0, 0.307195885718498],
        ),
        (
            SamplingParams { top_p: 0.8, ..default() },
            [0.186323723225848, 0.0, 0.0, 0.0, 0.0, 0.506480391055654, 0.0, 0.307195885718498],
        ),
        (
            SamplingParams { min_p: 0.1, ..default() },
            [0.167405097278443, 0.0, 0.0, 0.101536324091552, 0.0, 0.455054233923411, 0.0, 0.276004344706594],
        ),
        (
            SamplingParams { repetition_penalty: 1.5, ..default() },
            [
                0.264349592135135,
                0.00798266599123819,
                0.0499291885743873,
                0.160336132512489,
                0.0278622420242884,
                0.264349592135135,
                0.0357758269250916,
                0.189414759702235,
            ],
        ),
        (
            SamplingParams {
                repetition_penalty: 1.5,
                temperature: 1.3,
                top_k: 6,
                top_p: 0.9,
                min_p: 0.12,
                ..default()
            },
            [
                0.267952525273817,
                0.0,
                0.0743481312630595,
                0.182398606115947,
                0.0,
                0.267952525273817,
                0.0,
                0.20734821207336,
            ],
        ),
    ];
    for (params, expected) in cases {
        let law = Law::new(Row::F64(&row), &params, &history, &mut Workspace::default()).unwrap();
        assert_close(&probs(&law, 8), &expected, 1e-14);
    }
}

#[test]
fn truncation_to_one_token_is_greedy() {
    let row = [0.5, 2.0, 2.0, 1.0, 2.0];
    let tight = [
        SamplingParams { top_k: 1, ..Default::default() },
        SamplingParams { top_p: 0.0001, ..Default::default() },
        SamplingParams::greedy(),
        SamplingParams { temperature: 1e-300, top_k: 1, ..Default::default() },
    ];
    for params in tight {
        assert_eq!(probs(&law_of(Row::F64(&row), &params), 5), [0.0, 1.0, 0.0, 0.0, 0.0]);
    }
    let zeros = [-0.0f32, 0.0, -1.0];
    for params in [SamplingParams { top_k: 1, ..Default::default() }, SamplingParams::greedy()] {
        assert_eq!(probs(&law_of(Row::F32(&zeros), &params), 3), [1.0, 0.0, 0.0]);
    }
}

#[test]
fn tiny_temperatures_do_not_overflow() {
    let row = [3.0f32, -1e30, 3.0, 2.9999998, 0.0];
    for temperature in [1e-7, 1e-39, 1e-300, f64::MIN_POSITIVE] {
        let params = SamplingParams { temperature, ..Default::default() };
        let law = law_of(Row::F32(&row), &params);
        assert_eq!(law.prob(0), law.prob(2));
        assert!((probs(&law, 5).iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert_eq!(law.prob(4), 0.0);
    }
    let huge = [f32::MAX, f32::MIN, 0.0];
    assert_eq!(probs(&law_of(Row::F32(&huge), &SamplingParams::default()), 3), [1.0, 0.0, 0.0]);
}

#[test]
fn penalties_look_at_candidates_only_and_candidates_keep_their_ids() {
    let mut workspace = Workspace::default();
    let mut history = History::new(&[900]);
    [3, 70, 70].into_iter().for_each(|token| history.push(token));
    let params = SamplingParams {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        logit_bias: vec![(8, 1.0), (9, 100.0)],
        top_k: 3,
        ..Default::default()
    };
    let ids = vec![3, 8, 70, 80];
    let logits = Logits::F64(Cow::Owned(vec![4.0, 1.0, 6.0, -9.0]));
    let law = Law::of(logits, Some(ids), &params, &history, &mut workspace).unwrap();
    let weights = [1.5f64, 2.0, 2.0].map(f64::exp);
    let total: f64 = weights.iter().sum();
    let found = [law.prob(3), law.prob(8), law.prob(70), law.prob(80), law.prob(9), law.prob(0)];
    assert_close(&found, &[weights[0] / total, weights[1] / total, weights[2] / total, 0.0, 0.0, 0.0], 1e-14);
    assert_eq!([law.draw(0.0), law.draw(0.5), law.draw(0.999)], [3, 8, 70]);
}
