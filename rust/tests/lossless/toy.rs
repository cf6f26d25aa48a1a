//! Small models whose logits depend on everything before, and one round of drafting and judging with them.

use dspark_core::accept::{Rule, Verdict, accept};
use dspark_core::history::History;
use dspark_core::law::{Law, Logits, Workspace};
use dspark_core::noise::{Noise, Purpose, RoundNoise};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Row, Rows};

/// A target, a draft that resembles it, and how both are sampled.
#[derive(Clone)]
pub struct Toy {
    pub vocabulary: usize,
    /// Chooses the logits.
    pub seed: u64,
    /// Spread of the target's logits.
    pub spread: f64,
    /// How far the draft's logits are from the target's, as a share of the spread.
    pub distance: f64,
    /// Whether logits depend on what came before.
    pub has_memory: bool,
    pub params: SamplingParams,
    /// What the draft is sampled with; the target's parameters in production, or temperature 0.
    pub draft_params: SamplingParams,
    /// The draft's vocabulary where it is a reduced one: ascending tokens.
    pub offers: Option<Vec<u32>>,
}

pub const PROMPT: [u32; 2] = [0, 2];

impl Toy {
    pub fn new(vocabulary: usize, seed: u64) -> Self {
        let params = SamplingParams::default();
        let draft_params = params.clone();
        Toy {
            vocabulary,
            seed,
            spread: 3.0,
            distance: 0.6,
            has_memory: true,
            params,
            draft_params,
            offers: None,
        }
    }

    /// The same models sampled with other parameters.
    pub fn with(mut self, params: SamplingParams) -> Self {
        self.draft_params = params.clone();
        self.params = params;
        self
    }

    /// The same models with a draft at temperature 0.
    pub fn with_greedy_draft(mut self) -> Self {
        self.draft_params.temperature = 0.0;
        self
    }

    /// The same models with a draft that knows these tokens only.
    pub fn offering(mut self, tokens: &[u32]) -> Self {
        self.offers = Some(tokens.to_vec());
        self
    }

    fn random(&self, text: &[u32], stream: u32, spread: f64) -> Vec<f64> {
        let text = if self.has_memory { text } else { &[] };
        let digest = text.iter().fold(17u32, |h, &t| (h ^ t).wrapping_mul(0x0100_0193).rotate_left(9));
        let noise = Noise { seed: self.seed, sample: stream };
        let unit = |token| noise.uniform(digest, token, Purpose::Draft);
        (0..self.vocabulary as u32).map(|token| spread * (unit(token) - 0.5)).collect()
    }

    /// The target's logits after `text`, the output so far.
    pub fn target_row(&self, text: &[u32]) -> Vec<f64> {
        self.random(text, 0, self.spread)
    }

    pub fn draft_row(&self, text: &[u32]) -> Vec<f64> {
        let off = self.random(text, 1, self.spread * self.distance);
        self.target_row(text).iter().zip(off).map(|(t, off)| t + off).collect()
    }

    /// What the prompt and `text` look like to penalties.
    pub fn history(text: &[u32]) -> History {
        let mut history = History::new(&PROMPT);
        text.iter().for_each(|&token| history.push(token));
        history
    }

    /// The law that the next token must have.
    pub fn p(&self, text: &[u32]) -> Vec<f64> {
        let row = self.target_row(text);
        self.probs(&law(&row, &self.params, text))
    }

    /// The law that the draft draws the next token from.
    pub fn q(&self, text: &[u32]) -> Law<'static> {
        let row = self.draft_row(text);
        let Some(tokens) = &self.offers else { return law(&row, &self.draft_params, text).into_owned() };
        let logits = Logits::F64(tokens.iter().map(|&token| row[token as usize]).collect::<Vec<_>>().into());
        let history = Toy::history(text);
        let mut workspace = Workspace::default();
        Law::of(logits, Some(tokens.clone()), &self.draft_params, &history, &mut workspace).unwrap()
    }

    pub fn probs(&self, law: &Law<'_>) -> Vec<f64> {
        (0..self.vocabulary as u32).map(|token| law.prob(token)).collect()
    }

    /// A block with given drafted tokens, ready to be judged as often as needed.
    pub fn block(&self, text: &[u32], ids: &[u32]) -> Block<'_> {
        let mut context = text.to_vec();
        let (mut rows, mut laws) = (Vec::new(), Vec::new());
        for k in 0..=ids.len() {
            rows.extend(self.target_row(&context));
            laws.push(self.q(&context));
            context.extend(ids.get(k));
        }
        Block { toy: self, text: text.to_vec(), ids: ids.to_vec(), rows, laws }
    }

    /// Drafts up to `limit` tokens after `text` as the chain does.
    pub fn draft(&self, text: &[u32], limit: usize, rule: Rule, noise: &dyn RoundNoise) -> Vec<u32> {
        let mut context = text.to_vec();
        for slot in 0..limit {
            let q = self.q(&context);
            context.push(match rule {
                Rule::Coupled => q.gumbel_argmax(noise, slot),
                Rule::Rejection | Rule::Block => q.draw(noise.draft(slot)),
            });
        }
        context.split_off(text.len())
    }

    /// One round: the tokens it commits behind `text`.
    pub fn round(&self, text: &[u32], limit: usize, rule: Rule, noise: &dyn RoundNoise) -> Vec<u32> {
        let ids = self.draft(text, limit, rule, noise);
        let verdict = self.block(text, &ids).judge(rule, noise);
        [&ids[..verdict.accepted], &[verdict.token]].concat()
    }
}

fn law<'a>(row: &'a [f64], params: &SamplingParams, text: &[u32]) -> Law<'a> {
    Law::new(Row::F64(row), params, &Toy::history(text), &mut Workspace::default()).unwrap()
}

/// A drafted block and what is needed to judge it.
pub struct Block<'a> {
    toy: &'a Toy,
    text: Vec<u32>,
    pub ids: Vec<u32>,
    /// The target's logits, one row more than tokens.
    pub rows: Vec<f64>,
    /// The draft's laws: one for each token, and one for the token that was not drafted any more.
    pub laws: Vec<Law<'static>>,
}

impl Block<'_> {
    pub fn judge(&self, rule: Rule, noise: &dyn RoundNoise) -> Verdict {
        let rows = Rows::F64(Matrix::contiguous(&self.rows, self.toy.vocabulary));
        let mut history = Toy::history(&self.text);
        let mut workspace = Workspace::default();
        let params = &self.toy.params;
        let verdict =
            accept(rule, rows, &self.ids, &self.laws, params, &mut history, noise, &mut workspace).unwrap();
        assert_eq!(history.output()[self.text.len()..], self.ids[..verdict.accepted]);
        verdict
    }
}
