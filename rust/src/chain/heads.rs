//! The Markov heads: how the token just drawn biases the logits of the next one, by the formulas of the
//! paper's section 3.1 and of the published checkpoints.

use thiserror::Error;

use crate::calibration::sigmoid;
use crate::confidence::ConfidenceHead;
use crate::linear::Compute;
use crate::rows::{Row, Rows};

/// The heads of a draft, read in place. Both may be absent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Heads<'a> {
    /// Without it every slot is drawn from its base logits alone.
    pub markov: Option<MarkovHead<'a>>,
    /// Without it there are no confidences; plans by throughput use the acceptance of past rounds instead.
    pub confidence: Option<ConfidenceHead<'a>>,
    /// The tokens of the columns of the base logits, ascending; absent if column i is token i. With a reduced
    /// draft vocabulary, laws, history and W1 use target ids, and only base logits and W2 are indexed by
    /// column.
    pub vocabulary: Option<&'a [u32]>,
}

/// A low-rank bias on the base logits (paper, equations 4 to 6): B_k = W2 f(W1[x_{k-1}], ...), with rank r.
#[derive(Debug, Clone, Copy)]
pub struct MarkovHead<'a> {
    /// f.
    pub kind: MarkovKind<'a>,
    /// Token embeddings, `[vocabulary, r]`, by the id of the token just drawn.
    pub w1: Rows<'a>,
    /// Projection to logits, `[draft vocabulary, r]`.
    pub w2: Rows<'a>,
}

/// How the latent vector f that W2 projects is made. H is the hidden size, e = W1[x_{k-1}].
#[derive(Debug, Clone, Copy)]
pub enum MarkovKind<'a> {
    /// f = e.
    Vanilla,
    /// f = sigma(G [h_k; e] + b) * e.
    Gated {
        /// G, `[r, H + r]`.
        gate_w: Rows<'a>,
        /// b, r elements.
        gate_b: Row<'a>,
    },
    /// A recurrent state s, zero before the block: with g, c, o = J [s; e; h_k] + b (r elements each),
    /// s becomes sigma(g) * s + (1 - sigma(g)) * tanh(c), and f = tanh(o).
    Rnn {
        /// J, `[3r, 2r + H]`.
        joint_w: Rows<'a>,
        /// b, 3r elements.
        joint_b: Row<'a>,
        /// Whether hidden states begin with a row for the anchor's own slot. Nothing is drawn from it (the
        /// draft drops it), but the state takes a step over it, with the anchor as its token.
        through_anchor: bool,
    },
}

impl MarkovKind<'_> {
    /// Whether h_k is part of f.
    pub fn reads_hidden(&self) -> bool {
        !matches!(self, MarkovKind::Vanilla)
    }

    /// Rows of hidden states before those of the drafted tokens.
    pub(crate) fn lead(&self) -> usize {
        usize::from(matches!(self, MarkovKind::Rnn { through_anchor: true, .. }))
    }
}

/// A head that does not fit the draft that it is used with.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum HeadError {
    /// A tensor of another shape.
    #[error("{tensor} must be [{}, {}], found [{}, {}]", expected.0, expected.1, found.0, found.1)]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// Rows and columns that fit.
        expected: (usize, usize),
        /// Rows and columns given.
        found: (usize, usize),
    },
    /// A list of the draft's tokens that does not ascend, or is not as long as a row of base logits.
    #[error("the draft's vocabulary must be {expected} ascending tokens, found {found}{}", if *ascends { "" } else { " that do not ascend" })]
    Vocabulary {
        /// Columns of the base logits.
        expected: usize,
        /// Tokens given.
        found: usize,
        /// Whether they ascend.
        ascends: bool,
    },
    /// The head reads hidden states and there are none.
    #[error("the {head} head needs the draft's hidden states")]
    NoHidden {
        /// Which head.
        head: &'static str,
    },
    /// The confidence head reads Markov embeddings and there are none.
    #[error("the confidence head has the Markov feature, but there is no Markov head")]
    NoMarkov,
}

impl Heads<'_> {
    /// Refuses heads that [`super::draft`] could not run on base logits of `vocabulary` columns and hidden
    /// states of `hidden` columns.
    ///
    /// # Errors
    /// [`HeadError`], naming the tensor, what was expected and what was found.
    pub fn check(&self, vocabulary: usize, hidden: Option<usize>) -> Result<(), HeadError> {
        let rank = self.markov.map_or(0, |head| head.w1.cols());
        if let Some(tokens) = self.vocabulary {
            let (found, ascends) = (tokens.len(), tokens.is_sorted_by(|a, b| a < b));
            if found != vocabulary || !ascends {
                return Err(HeadError::Vocabulary { expected: vocabulary, found, ascends });
            }
        }
        if let Some(head) = &self.markov {
            shape("markov_w2", head.w2, (vocabulary, rank))?;
            match head.kind {
                MarkovKind::Vanilla => {}
                MarkovKind::Gated { gate_w, gate_b } => {
                    let hidden = hidden.ok_or(HeadError::NoHidden { head: "gated Markov" })?;
                    shape("gate_proj.weight", gate_w, (rank, hidden + rank))?;
                    length("gate_proj.bias", gate_b, rank)?;
                }
                MarkovKind::Rnn { joint_w, joint_b, .. } => {
                    let hidden = hidden.ok_or(HeadError::NoHidden { head: "RNN Markov" })?;
                    shape("joint_proj.weight", joint_w, (3 * rank, 2 * rank + hidden))?;
                    length("joint_proj.bias", joint_b, 3 * rank)?;
                }
            }
        }
        if let Some(head) = &self.confidence {
            let hidden = hidden.ok_or(HeadError::NoHidden { head: "confidence" })?;
            if head.with_markov && self.markov.is_none() {
                return Err(HeadError::NoMarkov);
            }
            let inputs = hidden + if head.with_markov { rank } else { 0 };
            length("confidence_head.proj.weight", head.weight, inputs)?;
            head.bias.map_or(Ok(()), |bias| length("confidence_head.proj.bias", bias, 1))?;
        }
        Ok(())
    }

    /// Rows of hidden states that each request has if `gamma` tokens are drafted.
    pub fn hidden_rows(&self, gamma: usize) -> usize {
        gamma + self.markov.map_or(0, |head| head.kind.lead())
    }

    /// Whether any of the tensors is f64.
    pub(super) fn is_f64(&self) -> bool {
        let rows = |rows: Rows<'_>| matches!(rows, Rows::F64(_));
        let row = |row: Row<'_>| matches!(row, Row::F64(_));
        let markov = self.markov.is_some_and(|head| {
            rows(head.w1)
                || rows(head.w2)
                || match head.kind {
                    MarkovKind::Vanilla => false,
                    MarkovKind::Gated { gate_w, gate_b } => rows(gate_w) || row(gate_b),
                    MarkovKind::Rnn { joint_w, joint_b, .. } => rows(joint_w) || row(joint_b),
                }
        });
        markov || self.confidence.is_some_and(|head| row(head.weight))
    }
}

fn shape(tensor: &'static str, rows: Rows<'_>, expected: (usize, usize)) -> Result<(), HeadError> {
    let found = (rows.rows(), rows.cols());
    if found == expected { Ok(()) } else { Err(HeadError::Shape { tensor, expected, found }) }
}

fn length(tensor: &'static str, row: Row<'_>, expected: usize) -> Result<(), HeadError> {
    let (expected, found) = ((1, expected), (1, row.len()));
    if found == expected { Ok(()) } else { Err(HeadError::Shape { tensor, expected, found }) }
}

/// What the Markov head keeps during one chain: its state, and the vectors of the current step.
#[derive(Debug, Default)]
pub(super) struct Latent<R> {
    /// `[h_k; e]`, each present if there is one.
    features: Vec<R>,
    hidden: usize,
    state: Vec<R>,
    inputs: Vec<R>,
    projected: Vec<R>,
    latent: Vec<R>,
}

impl<R: Compute> Latent<R> {
    /// Begins a step: `previous` is the token just drawn (or the anchor), `hidden` is h_k.
    pub(super) fn enter(&mut self, heads: &Heads<'_>, previous: usize, hidden: Option<Row<'_>>) {
        self.features.clear();
        if let Some(hidden) = hidden {
            R::extend(hidden, &mut self.features);
        }
        self.hidden = self.features.len();
        if let Some(head) = &heads.markov {
            R::extend(head.w1.row(previous), &mut self.features);
        }
    }

    /// `[h_k; e]`, the input of the confidence head.
    pub(super) fn features(&self) -> &[R] {
        &self.features
    }

    /// Advances the head by one step and returns the vector that W2 projects.
    pub(super) fn advance(&mut self, kind: &MarkovKind<'_>) -> &[R] {
        let (hidden, embedding) = self.features.split_at(self.hidden);
        let rank = embedding.len();
        self.latent.clear();
        match *kind {
            MarkovKind::Vanilla => self.latent.extend_from_slice(embedding),
            MarkovKind::Gated { gate_w, gate_b } => {
                project(gate_w, gate_b, &self.features, &mut self.projected);
                let gated = self
                    .projected
                    .iter()
                    .zip(embedding)
                    .map(|(g, e)| R::narrow(sigmoid(g.widen()) * e.widen()));
                self.latent.extend(gated);
            }
            MarkovKind::Rnn { joint_w, joint_b, .. } => {
                self.state.resize(rank, R::default());
                self.inputs.clear();
                for part in [self.state.as_slice(), embedding, hidden] {
                    self.inputs.extend_from_slice(part);
                }
                project(joint_w, joint_b, &self.inputs, &mut self.projected);
                let (gates, rest) = self.projected.split_at(rank);
                let (candidates, outputs) = rest.split_at(rank);
                for ((s, g), c) in self.state.iter_mut().zip(gates).zip(candidates) {
                    let gate = sigmoid(g.widen());
                    *s = R::narrow(gate * s.widen() + (1.0 - gate) * c.widen().tanh());
                }
                self.latent.extend(outputs.iter().map(|o| R::narrow(o.widen().tanh())));
            }
        }
        &self.latent
    }
}

/// `out = weights inputs + bias`.
fn project<R: Compute>(weights: Rows<'_>, bias: Row<'_>, inputs: &[R], out: &mut Vec<R>) {
    out.clear();
    R::extend(bias, out);
    R::add_products(weights, inputs, out);
}
