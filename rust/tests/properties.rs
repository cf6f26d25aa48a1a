//! Properties of `accept` for any logits, lengths, parameters and element types.

use dspark_core::accept::{AcceptError, NumericsError, Rule, Side, Verdict, accept, accept_logits};
use dspark_core::history::History;
use dspark_core::law::{BadRow, Law, Workspace};
use dspark_core::noise::{Counted, Noise, RoundNoise};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Rows};
use half::{bf16, f16};
use proptest::prelude::*;

/// Logits of a block in the four element types, which all hold the same values.
#[derive(Debug, Clone)]
struct Logits {
    cols: usize,
    f64: Vec<f64>,
    f32: Vec<f32>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
}

impl Logits {
    fn new(values: Vec<f64>, cols: usize) -> Self {
        // bfloat16 has the fewest digits, and half precision underflows first: those eighths that bfloat16
        // can hold (all below 32, some above) are exact in all types.
        let eighths = values.iter().map(|x| (x * 8.0).round() / 8.0);
        let f64: Vec<f64> = eighths.map(|x| bf16::from_f64(x).to_f64()).collect();
        let logits = Logits {
            cols,
            f32: f64.iter().map(|&x| x as f32).collect(),
            f16: f64.iter().map(|&x| f16::from_f64(x)).collect(),
            bf16: f64.iter().map(|&x| bf16::from_f64(x)).collect(),
            f64,
        };
        logits.check();
        logits
    }

    /// Checks that all types hold the same values: otherwise they need not agree.
    fn check(&self) {
        for (k, row) in self.f64.chunks_exact(self.cols).enumerate() {
            for (i, &x) in row.iter().enumerate() {
                for kind in SINGLES {
                    let held = self.rows(kind).row(k).get(i);
                    assert!(held == x || (held.is_nan() && x.is_nan()), "type {kind} holds {held} for {x}");
                }
            }
        }
    }

    fn rows(&self, kind: usize) -> Rows<'_> {
        match kind {
            0 => Rows::F64(Matrix::contiguous(&self.f64, self.cols)),
            1 => Rows::F32(Matrix::contiguous(&self.f32, self.cols)),
            2 => Rows::F16(Matrix::contiguous(&self.f16, self.cols)),
            _ => Rows::Bf16(Matrix::contiguous(&self.bf16, self.cols)),
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    rule: Rule,
    target: Logits,
    draft: Logits,
    ids: Vec<u32>,
    params: SamplingParams,
    greedy_draft: bool,
    seed: u64,
    kind: usize,
}

const PROMPT: [u32; 3] = [0, 1, 1];

/// The kinds that are transformed as `f32`: `f32` itself, `f16` and `bf16`.
const SINGLES: [usize; 3] = [1, 2, 3];

impl Case {
    fn noise(&self) -> Counted {
        Counted::new(Noise { seed: self.seed, sample: 0 }, 3)
    }

    /// Draws the drafted tokens as the chain does; a bad row ends the draft.
    fn drafted(mut self) -> (Self, Vec<Law<'static>>) {
        let mut params = self.params.clone();
        if self.greedy_draft {
            params.temperature = 0.0;
        }
        let (mut history, mut ws) = (History::new(&PROMPT), Workspace::default());
        let mut laws = Vec::new();
        self.ids.clear();
        for k in 0..self.target.f64.len() / self.target.cols - 1 {
            let row = self.draft.rows(self.kind).row(k);
            let Ok(law) = Law::new(row, &params, &history, &mut ws) else { break };
            let id = match self.rule {
                Rule::Coupled => law.gumbel_argmax(&self.noise(), k),
                _ => law.draw(self.noise().draft(k)),
            };
            history.push(id);
            self.ids.push(id);
            laws.push(law.into_owned());
        }
        (self, laws)
    }

    fn target(&self) -> Rows<'_> {
        self.target.rows(self.kind).slice(0..self.ids.len() + 1)
    }

    fn judge(&self, laws: &[Law<'_>], history: &mut History) -> Result<Verdict, AcceptError> {
        let noise = self.noise();
        accept(
            self.rule,
            self.target(),
            &self.ids,
            laws,
            &self.params,
            history,
            &noise,
            &mut Workspace::default(),
        )
    }

    /// The verdict from the draft's logits instead of its laws.
    fn judge_logits(&self) -> Result<Verdict, AcceptError> {
        let (mut history, mut ws) = (History::new(&PROMPT), Workspace::default());
        let (draft, noise) = (self.draft.rows(self.kind), self.noise());
        accept_logits(self.rule, self.target(), &self.ids, draft, &self.params, &mut history, &noise, &mut ws)
    }

    /// The tokens drafted in an element type, the verdict on them, which must be the same from laws and from
    /// logits to the last bit, and all probabilities behind it: those drawn from, and the target's.
    fn decided(&self, kind: usize) -> (Vec<u32>, Result<Verdict, AcceptError>, Vec<f64>) {
        let (case, laws) = Case { greedy_draft: false, kind, ..self.clone() }.drafted();
        let verdict = case.judge(&laws, &mut History::new(&PROMPT));
        assert_eq!(case.judge_logits(), verdict, "type {kind}");
        let targets: Vec<Law<'_>> = (0..=laws.len()).flat_map(|k| case.p(k)).collect();
        let all = |law: &Law<'_>| (0..case.target.cols as u32).map(|id| law.prob(id)).collect::<Vec<f64>>();
        let probs = laws.iter().chain(&targets).flat_map(all).collect();
        (case.ids.clone(), verdict, probs)
    }

    /// The same with the laws that log-probabilities report: at temperature 0, before it and the truncation.
    fn reported(&self) -> Self {
        let mut case = self.clone();
        if case.params.is_greedy() {
            case.params =
                SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..case.params };
        }
        case
    }

    /// The target's law of row `k`, after the drafted tokens before it.
    fn p(&self, k: usize) -> Result<Law<'_>, BadRow> {
        let mut history = History::new(&PROMPT);
        self.ids[..k].iter().for_each(|&id| history.push(id));
        Law::new(self.target().row(k), &self.params, &history, &mut Workspace::default())
    }
}

fn params(vocabulary: usize) -> impl Strategy<Value = SamplingParams> {
    let token = 0..vocabulary as u32;
    let shape = (
        prop_oneof![Just(0.0), Just(1.0), 0.1..3.0f64],
        prop_oneof![Just(0u32), 1..vocabulary as u32 + 2],
        prop_oneof![Just(1.0), 0.01..1.0f64],
        prop_oneof![Just(0.0), 0.0..0.9f64],
    );
    let penalties = (prop_oneof![Just(1.0), 0.5..2.0f64], prop_oneof![Just(0.0), -1.0..1.0f64]);
    let others = (
        prop::collection::vec((token.clone(), -3.0..3.0f64), 0..3),
        0..4u32,
        prop::collection::vec(token, 0..2),
        prop::option::of(0..4u32),
    );
    (shape, penalties, others).prop_map(|(shape, penalties, others)| SamplingParams {
        temperature: shape.0,
        top_k: shape.1,
        top_p: shape.2,
        min_p: shape.3,
        repetition_penalty: penalties.0,
        presence_penalty: penalties.1,
        frequency_penalty: penalties.1 / 2.0,
        logit_bias: others.0,
        min_tokens: others.1,
        stop_token_ids: others.2,
        logprobs: others.3,
    })
}

/// Logits of which some are minus infinity and a few are NaN or plus infinity.
fn logits(rows: usize, cols: usize) -> impl Strategy<Value = Vec<f64>> {
    let logit = prop_oneof![
        60 => -20.0..20.0f64,
        6 => Just(f64::NEG_INFINITY),
        1 => prop_oneof![9 => Just(0.0), 1 => Just(f64::NAN), 1 => Just(f64::INFINITY)],
    ];
    prop::collection::vec(logit, rows * cols)
}

fn cases() -> impl Strategy<Value = Case> {
    let rule = prop_oneof![Just(Rule::Rejection), Just(Rule::Block), Just(Rule::Coupled)];
    (rule, 0..6usize, prop_oneof![2..9usize, 60..70usize]).prop_flat_map(|(rule, len, cols)| {
        let likeness = prop_oneof![Just(0.0), 0.0..1.0f64];
        let all = (
            logits(len + 1, cols),
            logits(len, cols),
            params(cols),
            likeness,
            any::<(bool, u64)>(),
            0..4usize,
        );
        all.prop_map(move |(target, other, params, likeness, (greedy_draft, seed), kind)| {
            // Drafts that resemble the target are accepted often.
            let draft =
                target.iter().zip(&other).map(|(t, o)| if likeness == 0.0 { *t } else { t + likeness * o });
            let draft = Logits::new(draft.collect(), cols);
            let target = Logits::new(target, cols);
            Case { rule, target, draft, ids: vec![], params, greedy_draft, seed, kind }
        })
    })
}

/// 4000 cases, or more if PROPTEST_CASES says so.
fn config() -> ProptestConfig {
    let asked = ProptestConfig::default();
    ProptestConfig { cases: asked.cases.max(4000), failure_persistence: None, ..asked }
}

proptest! {
    #![proptest_config(config())]

    /// A verdict keeps a prefix of possible tokens and one more; an error names a row that is really bad, and
    /// leaves the history as it was.
    #[test]
    fn verdicts_and_errors(case in cases()) {
        let (case, laws) = case.drafted();
        let mut history = History::new(&PROMPT);
        match case.judge(&laws, &mut history) {
            Ok(verdict) => {
                prop_assert!(verdict.accepted <= case.ids.len());
                prop_assert_eq!(history.output(), &case.ids[..verdict.accepted]);
                let kept: Vec<u32> = [&case.ids[..verdict.accepted], &[verdict.token]].concat();
                for (k, &token) in kept.iter().enumerate() {
                    prop_assert!(case.p(k).unwrap().prob(token) > 0.0, "token {token} of row {k}");
                }
                match case.params.logprobs {
                    None => prop_assert!(verdict.logprobs.is_empty()),
                    Some(n) => {
                        let reported: Vec<u32> = verdict.logprobs.iter().map(|l| l.token).collect();
                        prop_assert_eq!(&reported, &kept);
                        for (k, reported) in verdict.logprobs.iter().enumerate() {
                            prop_assert!(reported.top.len() <= n as usize);
                            prop_assert!(reported.top.windows(2).all(|w| w[0].1 >= w[1].1));
                            let p = case.reported().p(k).unwrap().prob(reported.token);
                            prop_assert!((reported.logprob.exp() - p).abs() < 1e-6);
                        }
                    }
                }
                if case.rule == Rule::Coupled {
                    for (k, &token) in kept.iter().enumerate() {
                        prop_assert_eq!(case.p(k).unwrap().gumbel_argmax(&case.noise(), k), token);
                    }
                }
            }
            Err(AcceptError::Numerics(NumericsError { side, row, reason })) => {
                prop_assert_eq!(side, Side::Target);
                prop_assert_eq!(case.p(row).unwrap_err(), reason);
                prop_assert_eq!(history.generated(), 0);
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    /// Under `rejection` and `coupled`, rows behind the first rejection are never read.
    #[test]
    fn rows_behind_a_rejection_are_not_read(case in cases()) {
        let (mut case, laws) = case.drafted();
        if case.rule == Rule::Block {
            return Ok(());
        }
        let Ok(verdict) = case.judge(&laws, &mut History::new(&PROMPT)) else { return Ok(()) };
        let mut spoilt = case.target.f64.clone();
        spoilt[(verdict.accepted + 1) * case.target.cols..].fill(f64::NAN);
        case.target = Logits::new(spoilt, case.target.cols);
        prop_assert_eq!(case.judge(&laws, &mut History::new(&PROMPT)), Ok(verdict));
    }

    /// The draft's logits give the same verdict as its laws in every type; f32, f16 and bf16 rows of equal
    /// values have the same probabilities to the last bit, and decide alike. `f64` rows are transformed in
    /// `f64`: near a border they may decide otherwise, and only have to agree with themselves.
    #[test]
    fn laws_and_logits_agree(case in cases()) {
        let _ = case.decided(0);
        let [single, half, brain] = SINGLES.map(|kind| case.decided(kind));
        prop_assert_eq!(half, single.clone());
        prop_assert_eq!(brain, single);
    }

    /// A draft with the target's own law is kept whole.
    #[test]
    fn a_perfect_draft_is_kept(case in cases()) {
        let draft = case.target.clone();
        let (case, laws) = Case { draft, greedy_draft: false, ..case }.drafted();
        if let Ok(verdict) = case.judge(&laws, &mut History::new(&PROMPT)) {
            prop_assert_eq!(verdict.accepted, case.ids.len());
        }
    }
}

/// A case that random numbers once found: bfloat16 rounds a draft's 35.875 to 36, and another token replaces
/// the drafted one. The value decides, not the type that holds it.
#[test]
fn a_number_decides_alike_in_every_type() {
    let ids = [2, 13, 21, 28, 34, 35, 36, 51, 65];
    let row = |some: [f64; 9]| {
        let mut row = vec![0.0; 68];
        ids.iter().zip(some).for_each(|(&id, logit)| row[id] = logit);
        row
    };
    let none = f64::NEG_INFINITY;
    let target = row([11.25, 17.75, 18.25, 15.875, 19.125, 16.375, 17.0, none, 15.875]);
    let draft = row([27.125, 17.75, 18.25, 15.875, 36.0, 28.5, none, none, 22.875]);
    let mut case = Case {
        rule: Rule::Rejection,
        target: Logits::new([target, vec![0.0; 68]].concat(), 68),
        draft: Logits::new(draft, 68),
        ids: vec![],
        params: SamplingParams {
            temperature: 2.544228745627512,
            top_p: 0.9136246834860967,
            ..SamplingParams::default()
        },
        greedy_draft: false,
        seed: 7021829815355314897,
        kind: 0,
    };
    let check = |case: &Case, kind, token| {
        let (ids, verdict, _) = case.decided(kind);
        let expected = Verdict { accepted: 0, token, logprobs: vec![] };
        assert_eq!((ids, verdict), (vec![34], Ok(expected)), "type {kind}");
    };
    (0..4).for_each(|kind| check(&case, kind, 35));
    // The three types that can hold it.
    case.draft.f64[34] = 35.875;
    case.draft.f32[34] = 35.875;
    case.draft.f16[34] = f16::from_f32(35.875);
    (0..3).for_each(|kind| check(&case, kind, 28));
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let values = [0.0f32; 12];
    let rows = |n: usize| Rows::F32(Matrix::contiguous(&values[..3 * n], 3));
    let params = SamplingParams::default();
    let laws = [Law::point(1), Law::point(1)];
    let refuse = |rows, ids: &[u32], laws: &[Law<'_>]| {
        let (mut history, mut ws) = (History::default(), Workspace::default());
        let noise = Counted::new(Noise { seed: 0, sample: 0 }, 0);
        accept(Rule::Rejection, rows, ids, laws, &params, &mut history, &noise, &mut ws)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refuse(rows(2), &[1, 1], &laws), "2 drafted tokens need 3 rows of target logits, found 2");
    assert_eq!(refuse(rows(3), &[1, 1], &laws[..1]), "2 drafted tokens need as many draft laws, found 1");
    assert_eq!(refuse(rows(3), &[1, 3], &laws), "drafted token 3 is outside of the vocabulary of 3");

    let narrow = Rows::F32(Matrix::contiguous(&values[..4], 2));
    let refuse = |draft: Rows<'_>| {
        let (mut history, mut ws) = (History::default(), Workspace::default());
        let noise = Counted::new(Noise { seed: 0, sample: 0 }, 0);
        let ids = [1, 1];
        accept_logits(Rule::Block, rows(3), &ids, draft, &params, &mut history, &noise, &mut ws)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refuse(rows(1)), "2 drafted tokens need draft logits of shape [2, 3], found [1, 3]");
    assert_eq!(refuse(narrow), "2 drafted tokens need draft logits of shape [2, 3], found [2, 2]");
    let bad = [0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0];
    let bad = Rows::F32(Matrix::contiguous(&bad, 3));
    assert_eq!(refuse(bad), "row 0 of the draft's logits has a NaN");
}

/// Row k is penalised for the tokens drafted before it, and for no others.
#[test]
fn tokens_drafted_earlier_in_the_block_count_for_later_rows() {
    let row = [1.0, 0.9, -5.0];
    let rows = [row, row, row].concat();
    let target = Rows::F64(Matrix::contiguous(&rows, 3));
    let params = SamplingParams { presence_penalty: 0.2, ..SamplingParams::greedy() };
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        let judge = |ids: &[u32]| {
            let laws: Vec<Law<'_>> = ids.iter().map(|&id| Law::point(id)).collect();
            let (mut history, mut ws) = (History::new(&[0]), Workspace::default());
            let noise = Counted::new(Noise { seed: 0, sample: 0 }, 0);
            let target = target.slice(0..ids.len() + 1);
            let verdict = accept(rule, target, ids, &laws, &params, &mut history, &noise, &mut ws).unwrap();
            (verdict.accepted, verdict.token)
        };
        // The presence penalty counts the output, not the prompt: 0, then 1, then 0 again.
        assert_eq!(judge(&[]), (0, 0));
        assert_eq!(judge(&[0]), (1, 1));
        assert_eq!(judge(&[0, 1]), (2, 0));
        assert_eq!(judge(&[0, 0]), (1, 1));
    }
}
