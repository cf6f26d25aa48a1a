//! Tests of rows that nothing can be drawn from, of rows in half precision, and of log-probabilities.

use half::{bf16, f16};

use super::*;

fn outcome(row: &[f64], params: &SamplingParams) -> [Result<f64, BadRow>; 2] {
    let single: Vec<f32> = row.iter().map(|&x| x as f32).collect();
    let mut workspace = Workspace::default();
    let mut total = |row: Row<'_>| {
        let law = Law::new(row, params, &History::default(), &mut workspace)?;
        Ok((0..row.len() as u32).map(|token| law.prob(token)).sum())
    };
    [total(Row::F64(row)), total(Row::F32(&single))]
}

#[test]
fn a_bad_row_is_named_wherever_it_is_bad() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let some = [
        SamplingParams::default(),
        SamplingParams::greedy(),
        SamplingParams { top_k: 2, top_p: 0.5, ..Default::default() },
        SamplingParams { logit_bias: vec![(0, 1.0)], temperature: 0.5, ..Default::default() },
    ];
    for params in &some {
        for n in [1, 2, 17, 130, 1500] {
            for at in [0, n / 2, n - 1] {
                let mut row = vec![0.5; n];
                row[at] = nan;
                assert_eq!(outcome(&row, params), [Err(BadRow::NaN); 2]);
                row[at] = inf;
                assert_eq!(outcome(&row, params), [Err(BadRow::PlusInfinity); 2]);
                row[n - 1 - at] = nan;
                assert_eq!(outcome(&row, params), [Err(BadRow::NaN); 2], "a NaN beside an infinity");
                let mut row = vec![-inf; n];
                assert_eq!(outcome(&row, params), [Err(BadRow::NoCandidate); 2]);
                row[at] = -7.0;
                assert_eq!(outcome(&row, params), [Ok(1.0); 2], "one candidate is enough");
            }
        }
        assert_eq!(outcome(&[], params), [Err(BadRow::NoCandidate); 2]);
    }
}

#[test]
fn the_mask_covers_nothing_up() {
    let params = SamplingParams { min_tokens: 1, stop_token_ids: vec![1], ..Default::default() };
    assert_eq!(outcome(&[0.0, f64::NAN], &params), [Err(BadRow::NaN); 2]);
    assert_eq!(outcome(&[0.0, f64::INFINITY], &params), [Err(BadRow::PlusInfinity); 2]);
    assert_eq!(outcome(&[f64::NEG_INFINITY, 3.0], &params), [Err(BadRow::NoCandidate); 2]);
    assert_eq!(outcome(&[0.0, 3.0], &params), [Ok(1.0); 2]);
    let row = [0.0, 3.0];
    let mut history = History::default();
    let masked = Law::new(Row::F64(&row), &params, &history, &mut Workspace::default()).unwrap();
    assert_eq!(masked.prob(1), 0.0);
    history.push(0);
    let free = Law::new(Row::F64(&row), &params, &history, &mut Workspace::default()).unwrap();
    assert!(free.prob(1) > 0.9, "one token was generated");
}

#[test]
fn half_precision_is_read_as_the_singles_it_stands_for() {
    let mut dice = Dice::new(3);
    let values = dice.logits(1300, 9.0);
    let halves: Vec<f16> = values.iter().map(|&x| f16::from_f64(x)).collect();
    let brains: Vec<bf16> = values.iter().map(|&x| bf16::from_f64(x)).collect();
    let of_halves: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
    let of_brains: Vec<f32> = brains.iter().map(|x| x.to_f32()).collect();
    for params in
        [SamplingParams::default(), SamplingParams { top_p: 0.9, temperature: 0.7, ..Default::default() }]
    {
        let probs = |row| probs(&law_of(row, &params), 1300);
        assert_eq!(probs(Row::F16(&halves)), probs(Row::F32(&of_halves)));
        assert_eq!(probs(Row::Bf16(&brains)), probs(Row::F32(&of_brains)));
    }
    // A buffer that held a longer row before.
    let mut workspace = Workspace::default();
    let (params, history) = (SamplingParams::default(), History::default());
    let long = Law::new(Row::Bf16(&brains), &params, &history, &mut workspace).unwrap();
    workspace.recycle(long);
    let short = Law::new(Row::Bf16(&brains[..700]), &params, &history, &mut workspace).unwrap();
    assert_eq!(short.prob(699), law_of(Row::F32(&of_brains[..700]), &params).prob(699));
    assert_eq!(short.prob(700), 0.0);
}

#[test]
fn log_probabilities_are_those_of_the_law() {
    let row = [1.0f64, 3.0, 2.0, 3.0, f64::NEG_INFINITY];
    let params = SamplingParams { temperature: 0.5, ..Default::default() };
    let law = law_of(Row::F64(&row), &params);
    let mut workspace = Workspace::default();
    let reported = law.logprobs(2, 3, &mut workspace);
    let total = (1.0f64 + 1.0 + (-2.0f64).exp() + (-4.0f64).exp()).ln();
    assert!((reported.logprob - (-2.0 - total)).abs() < 1e-14);
    let tokens: Vec<u32> = reported.top.iter().map(|top| top.0).collect();
    assert_eq!(tokens, [1, 3, 2]);
    assert!((reported.top[0].1 + total).abs() < 1e-14);
    assert_eq!(law.logprobs(4, 9, &mut workspace).top.len(), 4);
    assert_eq!(law.logprobs(4, 0, &mut workspace).logprob, f64::NEG_INFINITY);
    let certain = Law::point(2).logprobs(2, 2, &mut workspace);
    assert_eq!((certain.logprob, certain.top), (0.0, vec![(2, 0.0)]));
}
