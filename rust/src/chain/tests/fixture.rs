//! A small draft with every kind of head, and the chain that its tests run.

use super::super::*;
use crate::noise::{Counted, Noise};
use crate::rows::{Matrix, Row};

pub const V: usize = 12;
pub const R: usize = 3;
pub const H: usize = 4;
pub const GAMMA: usize = 5;

/// A matrix of small multiples of 1/16: exact in every element type.
#[derive(Clone)]
pub struct Dense {
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Dense {
    pub fn new(rows: usize, cols: usize, seed: u64) -> Self {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % 65) as f64 / 16.0 - 2.0
        };
        Self { cols, data: (0..rows * cols).map(|_| next()).collect() }
    }
    pub fn rows(&self) -> Rows<'_> {
        Rows::F64(Matrix::contiguous(&self.data, self.cols))
    }
    pub fn at(&self, i: usize) -> &[f64] {
        &self.data[i * self.cols..][..self.cols]
    }
    pub fn times(&self, x: &[f64]) -> Vec<f64> {
        self.data.chunks(self.cols).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }
}

/// One draft: base logits, hidden states, and tensors for every kind of head.
pub struct Draft {
    pub base: Dense,
    pub hidden: Dense,
    pub w1: Dense,
    pub w2: Dense,
    pub gate: (Dense, Dense),
    pub joint: (Dense, Dense),
    pub confidence: Dense,
}

impl Draft {
    pub fn new(seed: u64) -> Self {
        Self {
            base: Dense::new(GAMMA, V, seed + 1),
            hidden: Dense::new(GAMMA, H, seed + 2),
            w1: Dense::new(V, R, seed + 3),
            w2: Dense::new(V, R, seed + 4),
            gate: (Dense::new(R, H + R, seed + 5), Dense::new(1, R, seed + 6)),
            joint: (Dense::new(3 * R, 2 * R + H, seed + 7), Dense::new(1, 3 * R, seed + 8)),
            confidence: Dense::new(1, H + R, seed + 9),
        }
    }
    pub fn head<'a>(&'a self, kind: MarkovKind<'a>) -> Heads<'a> {
        Heads {
            markov: Some(MarkovHead { kind, w1: self.w1.rows(), w2: self.w2.rows() }),
            ..Heads::default()
        }
    }
    pub fn vanilla(&self) -> Heads<'_> {
        self.head(MarkovKind::Vanilla)
    }
    pub fn gated(&self) -> Heads<'_> {
        self.head(MarkovKind::Gated { gate_w: self.gate.0.rows(), gate_b: self.gate.1.rows().row(0) })
    }
    pub fn rnn(&self) -> Heads<'_> {
        self.head(self.recurrence(false))
    }
    pub fn recurrence(&self, through_anchor: bool) -> MarkovKind<'_> {
        MarkovKind::Rnn { joint_w: self.joint.0.rows(), joint_b: self.joint.1.rows().row(0), through_anchor }
    }
    pub fn confident(&self) -> Heads<'_> {
        let confidence = ConfidenceHead {
            weight: self.confidence.rows().row(0),
            bias: Some(Row::F64(&[0.5])),
            with_markov: true,
        };
        Heads { confidence: Some(confidence), ..self.gated() }
    }
    pub fn run(
        &self,
        heads: &Heads<'_>,
        settings: &ChainSettings<'_>,
        rule: Rule,
        params: &SamplingParams,
    ) -> Chain {
        let noise = Counted::new(Noise { seed: 11, sample: 0 }, 40);
        let (mut history, mut workspace) = (History::new(&[3]), Workspace::default());
        let hidden = Some(self.hidden.rows());
        let chain = draft(
            3,
            self.base.rows(),
            hidden,
            heads,
            settings,
            rule,
            params,
            &mut history,
            &noise,
            &mut workspace,
        );
        assert_eq!(history.generated(), 0);
        chain
    }
    pub fn greedy(&self, heads: &Heads<'_>) -> Chain {
        self.run(heads, &ALL, Rule::Rejection, &SamplingParams::greedy())
    }
}

pub const ALL: ChainSettings<'static> =
    ChainSettings { limit: GAMMA, threshold: None, candidates: None, temperatures: None, offsets: None };
