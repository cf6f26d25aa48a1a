//! The one boundary between decisions and models.

use crate::accept::{NumericsError, Rule, Verdict};
use crate::chain::{Chain, ChainSettings, Heads};
use crate::history::History;
use crate::noise::Counted;
use crate::params::SamplingParams;
use crate::rows::Rows;

/// Names a request for as long as the engine and the runner know it.
pub type RequestId = u64;

/// Logits or hidden states that a pass left in memory, readable until dropped.
pub trait PassRows: Send + Sync {
    /// The rows, in the order in which the pass was asked for them. To be called after [`PassRows::fetch`].
    fn rows(&self) -> Rows<'_>;

    /// Copies rows that lie elsewhere to where they can be read, unless that was done before.
    fn fetch(&mut self) -> Result<(), RunnerError> {
        Ok(())
    }

    /// The numbers of rows and columns, wherever the rows lie.
    fn shape(&self) -> (usize, usize) {
        (self.rows().rows(), self.rows().cols())
    }
}

/// A drafted block to be judged by rows of a verify pass.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// The request that it belongs to.
    pub request: RequestId,
    /// The first of its rows of logits, of which there is one more than drafted tokens.
    pub first_row: usize,
    /// The drafted tokens to judge.
    pub ids: &'a [u32],
    /// How the request is sampled.
    pub params: &'a SamplingParams,
    /// Ends with the anchor.
    pub history: &'a History,
    /// The round's noise.
    pub noise: Counted,
}

/// A block of a draft pass to draw tokens for.
#[derive(Clone, Copy)]
pub struct ChainBlock<'a> {
    /// The request that it belongs to.
    pub request: RequestId,
    /// The place of the request in the pass.
    pub index: usize,
    /// The last committed token.
    pub anchor: u32,
    /// How the request is sampled.
    pub params: &'a SamplingParams,
    /// Ends with the anchor.
    pub history: &'a History,
    /// The round's noise.
    pub noise: Counted,
    /// The chain's limits and calibration.
    pub settings: ChainSettings<'a>,
}

/// How a runner judged a block.
#[derive(Debug)]
pub struct Judgement {
    /// How many drafted tokens stay, and the token after them.
    pub verdict: Verdict,
    /// Whether a margin was within the rounding error, so that the core might have decided otherwise.
    pub is_close: bool,
}

/// The output of a draft pass: `gamma` rows for each request, one request after the other.
pub struct DraftPass<R> {
    /// Base logits U, `[requests * gamma, vocabulary]`.
    pub base: R,
    /// Backbone states h, `[requests * gamma, hidden]`; absent if no head reads them. An RNN head that goes
    /// through the anchor's slot needs gamma + 1 rows for each request ([`Heads::hidden_rows`]).
    pub hidden: Option<R>,
}

/// Where a runner can fork a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forks {
    /// After any committed token, as a rule.
    Anywhere,
    /// At its present length, or where the last part of its prompt began, as with recurrent states. The
    /// engine then ends a part at the last page border before a prompt's last token.
    AtParts,
    /// Nowhere: no prefix is kept for later requests, and none waits for another one's prompt.
    Never,
}

/// Why a pass or another call of a runner failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RunnerError(pub String);

/// Refuses a pass that gave a different number of rows than it was asked for.
pub(super) fn check_rows(pass: &str, found: &impl PassRows, asked: usize) -> Result<(), RunnerError> {
    let (found, _) = found.shape();
    if found == asked {
        return Ok(());
    }
    Err(RunnerError(format!("the {pass} pass gave {found} rows, but {asked} were asked for")))
}

/// The models as the engine sees them. A round calls each of `draft`, `verify` and `commit` at most once, for
/// the whole batch, and again only if a call failed. All calls come from the engine's own thread.
pub trait ModelRunner {
    /// The type of the rows that this runner returns.
    type Rows: PassRows;

    /// Runs the next part of each prompt through the target, keeps its rows in the caches, and adds its taps
    /// to the draft's context if the request drafts (the flag). A request becomes known with its first part.
    /// Returns the logits of each part's last token, `[requests, vocabulary]`. A call that fails keeps
    /// nothing of any part, so each may be run again.
    fn prefill(&mut self, items: &[(RequestId, &[u32], bool)]) -> Result<Self::Rows, RunnerError>;

    /// Brings the draft context of these requests up to date with what their prompts and rounds without a
    /// draft put off. Called before the draft pass of requests that resume drafting, so that the pass can be
    /// timed by itself.
    fn feed(&mut self, _ids: &[RequestId]) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Runs one draft block per request, after the given anchors.
    fn draft(&mut self, items: &[(RequestId, u32)]) -> Result<DraftPass<Self::Rows>, RunnerError>;

    /// Runs each request's anchor and drafted tokens through the target, packed: the rows of a request follow
    /// those of the one before. Caches are written but not advanced, so a call that fails may be repeated.
    fn verify(&mut self, items: &[(RequestId, &[u32])]) -> Result<Self::Rows, RunnerError>;

    /// Keeps the first rows of each request's last verify pass: its caches advance by that many positions,
    /// and the taps of these rows become draft context, now or before the next draft (a failure then counts
    /// as the draft's). All other rows are as if they had never run.
    fn commit(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError>;

    /// Gives each request's caches room for that many positions, target rows and draft context alike,
    /// including a pass's own rows. Called before the pass or the fork that needs the room, hence also for
    /// requests that are not known yet.
    fn reserve(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError>;

    /// Makes `new` known with the first positions of `source`'s caches (target and, if it `drafts`, draft
    /// context); `source` is not changed. Returns how many positions it took, at most `length`. If it can
    /// take none, it returns 0 and `new` stays unknown, as it does if the call fails.
    fn fork(
        &mut self,
        new: RequestId,
        source: RequestId,
        length: usize,
        drafts: bool,
    ) -> Result<usize, RunnerError>;

    /// Where requests can be forked.
    fn forks(&self) -> Forks;

    /// Forgets requests, and what was reserved for them. Unknown ids are ignored.
    fn release(&mut self, ids: &[RequestId]);

    /// The draft's heads, in place.
    fn heads(&self) -> Heads<'_>;

    /// Whether this runner itself draws and judges the blocks of such a request, on the device where their
    /// rows lie ([`chain`] and [`judge`], with the same distribution and the same noise). The answer for a
    /// request never changes.
    ///
    /// [`chain`]: ModelRunner::chain
    /// [`judge`]: ModelRunner::judge
    fn decides(&self, _rule: Rule, _params: &SamplingParams) -> bool {
        false
    }

    /// Draws the chains of some blocks of a draft pass. The runner keeps the laws that the tokens were drawn
    /// from until the next call; the chains that it returns have none.
    fn chain(
        &mut self,
        _rule: Rule,
        _pass: &DraftPass<Self::Rows>,
        _blocks: &[ChainBlock<'_>],
    ) -> Result<Vec<Chain>, RunnerError> {
        Err(RunnerError("this runner draws no chains".into()))
    }

    /// Judges some blocks by rows of a pass. Their tokens are those of the last [`ModelRunner::chain`], or
    /// the first of them.
    fn judge(
        &mut self,
        _rule: Rule,
        _logits: &Self::Rows,
        _blocks: &[Block<'_>],
    ) -> Result<Vec<Result<Judgement, NumericsError>>, RunnerError> {
        Err(RunnerError("this runner judges no blocks".into()))
    }
}
