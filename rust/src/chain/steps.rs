//! One step of a chain: confidence, biased logits, law.

use std::borrow::Cow;

use super::candidates::Largest;
use super::heads::{Heads, Latent};
use crate::history::History;
use crate::law::{Law, Logits, Workspace};
use crate::linear::Compute;
use crate::params::SamplingParams;
use crate::rows::{Row, Rows};

/// f32 or f64, with the buffers and the laws of that precision.
pub(super) trait Precision: Compute + Largest {
    fn buffer(workspace: &mut Workspace) -> Vec<Self>;
    fn logits(values: Vec<Self>) -> Logits<'static>;
}

impl Precision for f32 {
    fn buffer(workspace: &mut Workspace) -> Vec<f32> {
        workspace.take_singles()
    }
    fn logits(values: Vec<f32>) -> Logits<'static> {
        Logits::F32(Cow::Owned(values))
    }
}

impl Precision for f64 {
    fn buffer(workspace: &mut Workspace) -> Vec<f64> {
        workspace.take_doubles()
    }
    fn logits(values: Vec<f64>) -> Logits<'static> {
        Logits::F64(Cow::Owned(values))
    }
}

/// Whether a chain over these tensors computes in f64.
pub(super) fn in_f64(base: Rows<'_>, hidden: Option<Rows<'_>>, heads: &Heads<'_>) -> bool {
    matches!(base, Rows::F64(_)) || matches!(hidden, Some(Rows::F64(_))) || heads.is_f64()
}

/// The tensors of a block and the state of its heads. Slots are entered in order.
pub(super) struct Steps<'a, R> {
    base: Rows<'a>,
    hidden: Option<Rows<'a>>,
    heads: &'a Heads<'a>,
    /// Rows of `hidden` before that of the first slot.
    lead: usize,
    latent: Latent<R>,
    /// A base row, if candidates are chosen from it.
    row: Vec<R>,
}

impl<'a, R: Precision> Steps<'a, R> {
    pub(super) fn new(base: Rows<'a>, hidden: Option<Rows<'a>>, heads: &'a Heads<'a>) -> Self {
        // If no head reads the hidden states, they are ignored.
        let reads = heads.confidence.is_some() || heads.markov.is_some_and(|head| head.kind.reads_hidden());
        let hidden = hidden.filter(|_| reads);
        let lead = heads.markov.map_or(0, |head| head.kind.lead());
        Self { base, hidden, heads, lead, latent: Latent::default(), row: Vec::new() }
    }

    /// Slots of the block.
    pub(super) fn slots(&self) -> usize {
        self.base.rows()
    }

    /// Reads the inputs of slot `slot`: h, and the token `previous` of the slot before. Returns the slot's
    /// confidence, if there is a head for it; `None` if there is no embedding or the confidence is NaN.
    pub(super) fn enter(
        &mut self,
        slot: usize,
        previous: u32,
        temperature: Option<f64>,
        offset: f64,
    ) -> Option<Option<f32>> {
        if self.heads.markov.is_some_and(|head| head.w1.rows() <= previous as usize) {
            return None;
        }
        self.read(slot, previous);
        let head = self.heads.confidence.as_ref();
        let confidence = head.map(|head| head.confidence(self.latent.features(), temperature, offset));
        if confidence.is_some_and(f32::is_nan) { None } else { Some(confidence) }
    }

    /// Feeds the latent the inputs of slot `slot`, after the anchor's own slot if the state goes through it.
    fn read(&mut self, slot: usize, previous: u32) {
        if let Some(head) = self.heads.markov.filter(|_| self.lead > 0 && slot == 0) {
            self.latent = Latent::default();
            self.latent.enter(self.heads, previous as usize, self.hidden.map(|hidden| hidden.row(0)));
            self.latent.advance(&head.kind);
        }
        let hidden = self.hidden.map(|hidden| hidden.row(self.lead + slot));
        self.latent.enter(self.heads, previous as usize, hidden);
    }

    /// The law of the slot that was entered last; `None` if nothing can be drawn from its row.
    pub(super) fn law(
        &mut self,
        slot: usize,
        candidates: Option<usize>,
        params: &SamplingParams,
        history: &History,
        workspace: &mut Workspace,
    ) -> Option<Law<'static>> {
        let mut values = R::buffer(workspace);
        let row = self.base.row(slot);
        let ids = match candidates.filter(|&count| count < row.len()) {
            None => {
                self.whole(row, &mut values);
                self.heads.vocabulary.map(|tokens| {
                    let mut ids = workspace.take_ids();
                    ids.extend_from_slice(tokens);
                    ids
                })
            }
            Some(count) => {
                let mut ids = workspace.take_ids();
                self.among(row, count, &mut ids, &mut values)?;
                if let Some(tokens) = self.heads.vocabulary {
                    // Columns and vocabulary ascend, so the tokens do.
                    ids.iter_mut().for_each(|id| *id = tokens[*id as usize]);
                }
                Some(ids)
            }
        };
        Law::of(R::logits(values), ids, params, history, workspace).ok()
    }

    /// Biased logits of the draft's whole vocabulary: `U + W2 f`.
    fn whole(&mut self, row: Row<'_>, out: &mut Vec<R>) {
        R::extend(row, out);
        if let Some(head) = &self.heads.markov {
            R::add_products(head.w2, self.latent.advance(&head.kind), out);
        }
    }

    /// The `count` columns with the largest base logits, and their biased logits; `None` if the row is a bad one.
    fn among(&mut self, row: Row<'_>, count: usize, ids: &mut Vec<u32>, out: &mut Vec<R>) -> Option<()> {
        self.row.clear();
        R::extend(row, &mut self.row);
        if !R::largest(&self.row, count, ids) {
            return None;
        }
        out.extend(ids.iter().map(|&id| self.row[id as usize]));
        if let Some(head) = &self.heads.markov {
            R::add_products_at(head.w2, ids, self.latent.advance(&head.kind), out);
        }
        Some(())
    }
}

/// The biased logits of a block along given tokens: `tokens.len()` rows of the draft's vocabulary, of which
/// row k follows `tokens[k]`, and `tokens[0]` is the anchor. For comparison with other implementations.
///
/// # Panics
/// If there are more tokens than slots, a token has no embedding, or the tensors do not fit together.
pub fn step_logits(
    tokens: &[u32],
    base: Rows<'_>,
    hidden: Option<Rows<'_>>,
    heads: &Heads<'_>,
) -> Vec<Vec<f64>> {
    fn run<R: Precision>(tokens: &[u32], mut steps: Steps<'_, R>) -> Vec<Vec<f64>> {
        let row = |(slot, &previous): (usize, &u32)| {
            steps.read(slot, previous);
            let mut logits = Vec::new();
            steps.whole(steps.base.row(slot), &mut logits);
            logits.into_iter().map(R::widen).collect()
        };
        tokens.iter().enumerate().map(row).collect()
    }
    if in_f64(base, hidden, heads) {
        run(tokens, Steps::<f64>::new(base, hidden, heads))
    } else {
        run(tokens, Steps::<f32>::new(base, hidden, heads))
    }
}
