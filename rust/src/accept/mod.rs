//! Which drafted tokens stay, and which token follows them.
//!
//! All three rules leave the text distributed as if the target had decoded alone.

mod block;
mod coupled;
mod drafts;
mod judged;
mod rejection;

pub use crate::law::TokenLogprobs;

use crate::history::History;
use crate::law::{BadRow, Law, Workspace};
use crate::noise::RoundNoise;
use crate::params::SamplingParams;
use crate::rows::Rows;
use drafts::Drafts;
use judged::Judged;

/// How drafted tokens are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Each token by itself: x is kept with probability min(1, p(x) / q(x)), otherwise replaced by a draw
    /// from max(p - q, 0) (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
    Rejection,
    /// The block as a whole (Sun et al., arXiv 2403.10444): never keeps fewer tokens in expectation.
    Block,
    /// The target draws with noise that depends on seed and position alone; drafted tokens are kept while
    /// they equal the target's (Daliri et al., arXiv 2408.07978). The text does not depend on the draft.
    Coupled,
}

/// What a round keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Number of drafted tokens kept.
    pub accepted: usize,
    /// The corrected or bonus token that follows them.
    pub token: u32,
    /// If asked for, the target's log-probabilities of the kept tokens and of `token`.
    pub logprobs: Vec<TokenLogprobs>,
}

/// Whose row it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The target's.
    Target,
    /// The draft's.
    Draft,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Target => "target",
            Side::Draft => "draft",
        })
    }
}

/// A row of logits that nothing can be drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("row {row} of the {side}'s logits has {reason}")]
pub struct NumericsError {
    /// Whose row.
    pub side: Side,
    /// Its index in the block, from 0.
    pub row: usize,
    /// What is wrong with it.
    pub reason: BadRow,
}

/// Why a block cannot be judged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    /// The logits of one row are unusable.
    #[error(transparent)]
    Numerics(#[from] NumericsError),
    /// Tokens and rows do not fit together.
    #[error("{0}")]
    Shape(String),
}

/// Judges the drafted tokens `ids` (L of them) by the target's logits (L + 1 rows: row `k` is that of the
/// token after `k` drafted ones).
///
/// `q[k]` is the law that `ids[k]` was really drawn from; laws past the L-th are ignored, and `coupled`
/// ignores them all. Before the call `history` ends with the anchor; after it, with the last accepted token,
/// the verdict's `token` not included; it is unchanged if the call fails. Rows behind the first rejection are
/// never read, except by `block`, which needs them all.
#[expect(clippy::too_many_arguments, reason = "a block, its request and its noise, each owned by another")]
pub fn accept(
    rule: Rule,
    target: Rows<'_>,
    ids: &[u32],
    q: &[Law<'_>],
    params: &SamplingParams,
    history: &mut History,
    noise: &dyn RoundNoise,
    workspace: &mut Workspace,
) -> Result<Verdict, AcceptError> {
    if rule != Rule::Coupled && q.len() < ids.len() {
        return Err(AcceptError::Shape(format!(
            "{} drafted tokens need as many draft laws, found {}",
            ids.len(),
            q.len()
        )));
    }
    let drafts = Drafts::Laws(q);
    Judged { target, ids, drafts, params, history, noise, workspace, logprobs: Vec::new() }.judge(rule)
}

/// Like [`accept`], but builds the draft's laws from its logits (at least L rows) under `params`, and only as
/// far as they are needed.
#[expect(clippy::too_many_arguments, reason = "a block, its request and its noise, each owned by another")]
pub fn accept_logits(
    rule: Rule,
    target: Rows<'_>,
    ids: &[u32],
    draft: Rows<'_>,
    params: &SamplingParams,
    history: &mut History,
    noise: &dyn RoundNoise,
    workspace: &mut Workspace,
) -> Result<Verdict, AcceptError> {
    if draft.rows() < ids.len() || draft.cols() != target.cols() {
        return Err(AcceptError::Shape(format!(
            "{} drafted tokens need draft logits of shape [{}, {}], found [{}, {}]",
            ids.len(),
            ids.len(),
            target.cols(),
            draft.rows(),
            draft.cols()
        )));
    }
    let drafts = Drafts::Logits(draft);
    Judged { target, ids, drafts, params, history, noise, workspace, logprobs: Vec::new() }.judge(rule)
}

/// p / q, but 0 where p is 0: a token that the target never draws is never accepted, even if q is 0.
fn ratio(p: f64, q: f64) -> f64 {
    if p > 0.0 { p / q } else { 0.0 }
}
