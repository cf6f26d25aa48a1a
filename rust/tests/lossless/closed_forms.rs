//! Numbers that can be worked out by hand.

use dspark_core::accept::{Rule, accept, accept_logits};
use dspark_core::history::History;
use dspark_core::law::{Law, Workspace};
use dspark_core::noise::{Injected, RoundNoise};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Rows};
use dspark_core::schedule::plan::causal;
use dspark_core::schedule::{CostTable, Survivals};

use crate::exact::outcomes;
use crate::toy::Toy;

/// A toy over two tokens whose laws are `p` and `q` everywhere.
struct Coin {
    p: [f64; 2],
    q: [f64; 2],
}

impl Coin {
    /// Expected number of kept tokens of `len` drafted ones, and the law of the first token.
    fn play(&self, len: usize, rule: Rule) -> (f64, [f64; 2]) {
        let (mut kept, mut first) = (0.0, [0.0; 2]);
        for code in 0..1 << len {
            let ids: Vec<u32> = (0..len).map(|k| (code >> k) & 1).collect();
            let weight: f64 = ids.iter().map(|&id| self.q[id as usize]).product();
            for (accepted, token, probability) in self.outcomes(&ids, rule) {
                kept += weight * probability * accepted as f64;
                first[[&ids[..accepted], &[token]].concat()[0] as usize] += weight * probability;
            }
        }
        (kept, first)
    }

    fn outcomes(&self, ids: &[u32], rule: Rule) -> Vec<(usize, u32, f64)> {
        let toy = Toy::new(2, 0);
        let mut block = toy.block(&[], ids);
        block.rows = (0..=ids.len()).flat_map(|_| self.p.map(f64::ln)).collect();
        block.laws = (0..=ids.len()).map(|_| law(&self.q)).collect();
        outcomes(&block, 2, rule)
    }
}

fn law(probs: &[f64]) -> Law<'static> {
    let row: Vec<f64> = probs.iter().map(|p| p.ln()).collect();
    let (params, history) = (SamplingParams::default(), History::default());
    let row = dspark_core::rows::Row::F64(&row);
    Law::new(row, &params, &history, &mut Workspace::default()).unwrap().into_owned()
}

/// Sun et al., arXiv 2403.10444, section 1: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens.
#[test]
fn the_block_paper_s_example() {
    let coin = Coin { p: [1.0 / 3.0, 2.0 / 3.0], q: [2.0 / 3.0, 1.0 / 3.0] };
    for (rule, expected) in [(Rule::Rejection, 10.0 / 9.0), (Rule::Block, 11.0 / 9.0)] {
        let (kept, first) = coin.play(2, rule);
        assert!((kept - expected).abs() < 1e-12, "{rule:?} keeps {kept} tokens");
        assert!((first[0] - 1.0 / 3.0).abs() < 1e-12);
    }
}

/// DSpark paper, appendix A: a verify length that looks ahead gives 0.85 / 0.15, a causal one 0.70 / 0.30.
#[test]
fn the_dspark_paper_s_counterexample() {
    let coin = Coin { p: [0.7, 0.3], q: [0.5, 0.5] };
    let first = |confidence_2: [f32; 2], length: &dyn Fn(&[f32]) -> usize, rule| {
        let mut first = [0.0; 2];
        for x in [0u32, 1] {
            let verified = length(&[0.8, confidence_2[x as usize]]);
            for (accepted, token, probability) in coin.outcomes(&[x, 0][..verified], rule) {
                let ids = [x, 0];
                first[[&ids[..accepted], &[token]].concat()[0] as usize] += 0.5 * probability;
            }
        }
        first
    };
    let passes_per_second = [1.0, 0.5, 0.45];
    let cost = CostTable::new(&[(1, 1.0), (2, 2.0), (3, 1.0 / 0.45)]).unwrap();
    let causal = |confidences: &[f32]| {
        let draft = dspark_core::schedule::Draft { drafted: 2, limit: 2, confidences };
        causal(&Survivals::new(&[draft]).unwrap(), &cost)[0]
    };
    let global = |c: &[f32]| {
        let tokens = [1.0, 1.0 + c[0], 1.0 + c[0] + c[0] * c[1]];
        let throughput = |l: &usize| f64::from(tokens[*l]) * passes_per_second[*l];
        (0..3).max_by(|a, b| throughput(a).total_cmp(&throughput(b))).unwrap()
    };
    for rule in [Rule::Rejection, Rule::Block] {
        let sound = first([0.9, 0.0], &causal, rule);
        let unsound = first([0.9, 0.0], &global, rule);
        assert!((sound[0] - 0.70).abs() < 1e-12, "{rule:?} {sound:?}");
        assert!((unsound[0] - 0.85).abs() < 1e-12, "{rule:?} {unsound:?}");
    }
}

/// One row, two drafted tokens: the uniform at exactly p / q rejects, just below it accepts.
#[test]
fn acceptance_is_strict() {
    let (p, q) = ([0.25f64, 0.75].map(f64::ln), [law(&[0.5, 0.5])]);
    let rows = [p, p].concat();
    let kept = |u: f64| {
        let noise = Injected { accept: vec![u], resample: vec![0.0; 2], ..Default::default() };
        let target = Rows::F64(Matrix::contiguous(&rows, 2));
        let (params, mut history) = (SamplingParams::default(), History::default());
        accept(Rule::Rejection, target, &[0], &q, &params, &mut history, &noise, &mut Workspace::default())
            .unwrap()
            .accepted
    };
    assert_eq!((kept(0.5), kept(0.5 - 1e-15), kept(0.0)), (0, 1, 1));
}

/// A token that the target never says is rejected even at u = 0, also if the draft never says it either.
#[test]
fn impossible_tokens_are_never_kept() {
    let never = f64::NEG_INFINITY;
    let rows = [0.0, never, 1.0, 0.0, 0.0, 0.0];
    let noise = Injected { accept: vec![0.0], resample: vec![0.99; 2], ..Default::default() };
    for rule in [Rule::Rejection, Rule::Block] {
        for q in [[0.1, 0.8, 0.1], [0.5, 0.0, 0.5]] {
            let target = Rows::F64(Matrix::contiguous(&rows, 3));
            let mut history = History::default();
            let verdict = accept(
                rule,
                target,
                &[1],
                &[law(&q)],
                &SamplingParams::default(),
                &mut history,
                &noise,
                &mut Workspace::default(),
            )
            .unwrap();
            assert_eq!((verdict.accepted, verdict.token), (0, 2), "{rule:?} {q:?}");
        }
    }
}

/// Nor do later tokens save them, whatever the draft says of these.
#[test]
fn nothing_behind_an_impossible_token_is_kept() {
    let never = f64::NEG_INFINITY;
    let rows = [0.0, never, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let noise = Injected { accept: vec![0.0; 2], resample: vec![0.99; 3], ..Default::default() };
    for rule in [Rule::Rejection, Rule::Block] {
        for q in [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]] {
            for second in [0, 1, 2] {
                let verdict = accept(
                    rule,
                    Rows::F64(Matrix::contiguous(&rows, 3)),
                    &[1, second],
                    &[law(&[0.1, 0.8, 0.1]), law(&q)],
                    &SamplingParams::default(),
                    &mut History::default(),
                    &noise,
                    &mut Workspace::default(),
                )
                .unwrap();
                assert_eq!((verdict.accepted, verdict.token), (0, 2), "{rule:?} {q:?} {second}");
            }
        }
    }
}

/// At temperature 0 every rule keeps the longest prefix of argmax tokens and corrects with the argmax.
#[test]
fn greedy_is_agreement_of_the_argmax() {
    let rows: [f32; 12] = [0.0, 2.0, 1.0, 5.0, 1.0, 5.0, 0.0, 0.0, 3.0, 1.0, 0.0, 0.0];
    let draft: [f32; 9] = [0.0, 9.0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0];
    let params = SamplingParams { logprobs: Some(1), ..SamplingParams::greedy() };
    let noise = Injected { accept: vec![0.999; 3], resample: vec![0.999; 4], ..Default::default() };
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        let mut history = History::default();
        let verdict = accept_logits(
            rule,
            Rows::F32(Matrix::contiguous(&rows, 3)),
            &[1, 0, 1],
            Rows::F32(Matrix::contiguous(&draft, 3)),
            &params,
            &mut history,
            &noise,
            &mut Workspace::default(),
        )
        .unwrap();
        assert_eq!((verdict.accepted, verdict.token, history.output()), (2, 2, &[1, 0][..]), "{rule:?}");
        let reported: Vec<u32> = verdict.logprobs.iter().map(|l| l.token).collect();
        assert_eq!(reported, [1, 0, 2]);
        // Row 1 has two largest logits; the report is of the row before its temperature.
        let expected = -(2.0 + (-4.0f64).exp()).ln();
        assert!((verdict.logprobs[1].logprob - expected).abs() < 1e-6);
        assert_eq!(verdict.logprobs[1].top[0].0, 0);
    }
}

/// Under the ratio rules each number has one use: slots past the outcome are not looked at.
#[test]
fn rejection_asks_for_no_number_behind_the_first_rejection() {
    struct Watched;
    impl RoundNoise for Watched {
        fn draft(&self, _: usize) -> f64 {
            panic!("nothing is drafted")
        }
        fn accept(&self, slot: usize) -> f64 {
            assert!(slot < 2);
            [0.0, 0.999_999][slot]
        }
        fn resample(&self, slot: usize) -> f64 {
            assert_eq!(slot, 1);
            0.5
        }
        fn gumbel(&self, _: usize, _: u32) -> f64 {
            panic!("no Gumbel noise under a ratio rule")
        }
    }
    let toy = Toy::new(5, 3);
    let ids = toy.draft(&[], 4, Rule::Rejection, &Injected { draft: vec![0.3; 4], ..Default::default() });
    let verdict = toy.block(&[], &ids).judge(Rule::Rejection, &Watched);
    assert!(verdict.accepted <= 1);
}
