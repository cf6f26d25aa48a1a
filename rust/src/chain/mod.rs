//! The Markov chain of one block, on the CPU: from a backbone's base logits to drafted tokens.
//!
//! Each step biases the base logits by the token that the previous step drew, and draws from the law that the
//! request's sampling parameters make of them; penalties count the tokens of the block so far. That law is
//! kept: it is the `q` of the acceptance rule.
//!
//! The confidence of a token is known before the token is drawn. Under the threshold policy the chain ends
//! before the first confidence that is too low, so that no draw is wasted, and no token is dropped because of
//! what it is.

mod candidates;
mod heads;
mod steps;

pub use crate::confidence::ConfidenceHead;
pub use heads::{HeadError, Heads, MarkovHead, MarkovKind};
pub use steps::step_logits;

use crate::accept::Rule;
use crate::history::History;
use crate::law::{Law, Workspace};
use crate::mutant::{self, Mutant};
use crate::noise::RoundNoise;
use crate::params::SamplingParams;
use crate::rows::Rows;
use crate::schedule::threshold::is_below;
use steps::{Precision, Steps};

/// How far a chain goes, and over what.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChainSettings<'a> {
    /// The most tokens to draft; a chain shorter than the block is a prefix of the whole one.
    pub limit: usize,
    /// Ends the chain before the first confidence below this. 0 never does.
    pub threshold: Option<f64>,
    /// Draws only among this many tokens, those with the largest base logits, and computes the bias only for
    /// them. It then costs candidates x rank instead of vocabulary x rank; `q` is the law over the
    /// candidates, so the output's distribution stays the same.
    pub candidates: Option<usize>,
    /// Calibration: one temperature for each slot of the block (see [`crate::calibration::Calibration`]).
    pub temperatures: Option<&'a [f64]>,
    /// Offsets to each slot's calibrated logit. From past rounds only, like everything that limits a chain.
    pub offsets: Option<&'a [f64]>,
}

/// A drafted block.
#[derive(Debug, Default)]
pub struct Chain {
    /// The drafted tokens.
    pub ids: Vec<u32>,
    /// The law that each of them was drawn from.
    pub laws: Vec<Law<'static>>,
    /// The confidence of each of them; empty without a confidence head.
    pub confidence: Vec<f32>,
    /// Whether a confidence below the threshold ended the chain.
    pub cut: bool,
    /// Number of rows that nothing could be drawn from: such a row ends the chain before it.
    pub bad_rows: u32,
}

impl Chain {
    /// Makes the chain empty and gives the laws' buffers, each as long as the vocabulary, to the next one.
    pub fn recycle(&mut self, workspace: &mut Workspace) {
        for law in std::mem::take(self).laws {
            workspace.recycle(law);
        }
    }
}

/// Drafts one block behind `anchor`, the last committed token.
///
/// * `base`: base logits U, `[gamma, draft vocabulary]`; `hidden`: backbone states h, `[gamma, H]`, needed by
///   the heads that read them. Row k belongs to drafted token k, from 0. If an RNN head goes through the
///   anchor's own slot ([`MarkovKind::Rnn`]), a row for that slot precedes them in `hidden`.
/// * The chain computes in f64 if `base`, `hidden` or a head is f64, else in f32.
/// * At temperature 0 a token is the argmax of its row; under [`Rule::Coupled`] it is drawn with the noise that
///   the target will use, under the ratio rules with the draft's own stream.
/// * `history` ends with the anchor, and is as before when the call returns.
///
/// Never fails: a row with a NaN, a plus infinity or no finite candidate, a confidence that is NaN, and a
/// token without an embedding end the chain before the row, and are counted.
///
/// # Panics
/// If the tensors do not fit together; [`Heads::check`] detects that beforehand.
#[expect(clippy::too_many_arguments, reason = "one request's whole round state; the engine calls it once")]
pub fn draft(
    anchor: u32,
    base: Rows<'_>,
    hidden: Option<Rows<'_>>,
    heads: &Heads<'_>,
    settings: &ChainSettings<'_>,
    rule: Rule,
    params: &SamplingParams,
    history: &mut History,
    noise: &dyn RoundNoise,
    workspace: &mut Workspace,
) -> Chain {
    let before = history.generated();
    let mut draw = |law: &Law<'_>, slot| match rule {
        Rule::Coupled => law.gumbel_argmax(noise, slot),
        Rule::Rejection | Rule::Block => law.draw(noise.draft(slot)),
    };
    let chain = if steps::in_f64(base, hidden, heads) {
        run(anchor, Steps::<f64>::new(base, hidden, heads), settings, params, history, &mut draw, workspace)
    } else {
        run(anchor, Steps::<f32>::new(base, hidden, heads), settings, params, history, &mut draw, workspace)
    };
    history.rewind(before);
    chain
}

fn run<R: Precision>(
    anchor: u32,
    mut steps: Steps<'_, R>,
    settings: &ChainSettings<'_>,
    params: &SamplingParams,
    history: &mut History,
    draw: &mut dyn FnMut(&Law<'_>, usize) -> u32,
    workspace: &mut Workspace,
) -> Chain {
    let limit = settings.limit.min(steps.slots());
    let mut chain =
        Chain { ids: Vec::with_capacity(limit), laws: Vec::with_capacity(limit), ..Chain::default() };
    let threshold = settings.threshold.unwrap_or(0.0);
    let mut previous = anchor;
    for slot in 0..limit {
        let temperature = settings.temperatures.map(|temperatures| temperatures[slot]);
        let offset = settings.offsets.map_or(0.0, |offsets| offsets[slot]);
        let Some(confidence) = steps.enter(slot, previous, temperature, offset) else {
            chain.bad_rows += 1;
            break;
        };
        if confidence.is_some_and(|c| is_below(c, threshold)) {
            chain.cut = true;
            break;
        }
        let Some(law) = steps.law(slot, settings.candidates, params, history, workspace) else {
            chain.bad_rows += 1;
            break;
        };
        let token = draw(&law, slot);
        if mutant::on(Mutant::AnticipatingCut)
            && let Some(Some(c)) = steps.enter(slot, token, temperature, offset)
            && is_below(c, threshold)
        {
            chain.cut = true;
            break;
        }
        chain.ids.push(token);
        chain.laws.push(law);
        chain.confidence.extend(confidence);
        history.push(token);
        previous = token;
    }
    chain
}

#[cfg(test)]
mod tests;
