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
    /// The rows in the order in which the pass was asked for them. After [`PassRows::fetch`].
    fn rows(&self) -> Rows<'_>;

    /// Brings rows that lie elsewhere to where they can be read, once.
    fn fetch(&mut self) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Rows and columns, wherever they lie.
    fn shape(&self) -> (usize, usize) {
        (self.rows().rows(), self.rows().cols())
    }
}

/// A drafted block to be judged by rows of a verify pass.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// Whose it is.
    pub request: RequestId,
    /// The first of its rows of logits: one more than tokens.
    pub first_row: usize,
    /// The drafted tokens to judge.
    pub ids: &'a [u32],
    /// How the request is sampled.
    pub params: &'a SamplingParams,
    /// Ends with the anchor.
    pub history: &'a History,
    /// That of the round.
    pub noise: Counted,
}

/// A block of a draft pass to draw tokens for.
#[derive(Clone, Copy)]
pub struct ChainBlock<'a> {
    /// Whose it is.
    pub request: RequestId,
    /// The place of the request in the pass.
    pub index: usize,
    /// The last committed token.
    pub anchor: u32,
    /// How the request is sampled.
    pub params: &'a SamplingParams,
    /// Ends with the anchor.
    pub history: &'a History,
    /// That of the round.
    pub noise: Counted,
    /// How far the chain goes.
    pub settings: ChainSettings<'a>,
}

/// What a runner that decides says of a block.
#[derive(Debug)]
pub struct Judgement {
    /// What stays, and the token after it.
    pub verdict: Verdict,
    /// Whether a margin was within rounding: the core might have decided otherwise.
    pub is_close: bool,
}

/// What a draft pass leaves: `gamma` rows for each request, one request after the other.
pub struct DraftPass<R> {
    /// Base logits U, `[requests * gamma, vocabulary]`.
    pub base: R,
    /// Backbone states h, `[requests * gamma, hidden]`; absent if no head reads them. With an RNN head that goes
    /// through the anchor's slot, gamma + 1 rows each ([`Heads::hidden_rows`]).
    pub hidden: Option<R>,
}

/// Where a runner can fork a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forks {
    /// Behind any committed token, as a rule.
    Anywhere,
    /// At its present length, or where the last part of its prompt began, as with recurrent states. Then the engine ends a
    /// part at the last page border before a prompt's last token.
    AtParts,
    /// Nowhere: nothing is kept for later requests, and none waits for another one's prompt.
    Never,
}

/// Why a pass could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RunnerError(pub String);

/// Refuses a pass that gave another number of rows than was asked for.
pub(super) fn check_rows(pass: &str, found: &impl PassRows, asked: usize) -> Result<(), RunnerError> {
    let (found, _) = found.shape();
    if found == asked {
        return Ok(());
    }
    Err(RunnerError(format!("the {pass} pass gave {found} rows, and {asked} were asked for")))
}

/// The models, seen from the engine. A round calls each of `draft`, `verify` and `commit` at most once, for the whole batch; more
/// often only where one of them failed. Everything comes from the engine's own thread.
pub trait ModelRunner {
    /// Rows as this runner hands them over.
    type Rows: PassRows;

    /// Runs the next part of each prompt through the target, keeps it, and for requests that draft (the flag)
    /// hands its taps to the draft's context. The first part makes a request known. Returns the logits of each
    /// part's last token, `[requests, vocabulary]`. A call that fails keeps nothing of any of them: each may be asked for
    /// again.
    fn prefill(&mut self, items: &[(RequestId, &[u32], bool)]) -> Result<Self::Rows, RunnerError>;

    /// Brings the draft context of these requests up to date: what their prompts and rounds without a draft put off.
    /// Called before the draft pass of requests that resume drafting, so that the pass can be timed by itself.
    fn feed(&mut self, _ids: &[RequestId]) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Runs one draft block per request, behind the given anchors.
    fn draft(&mut self, items: &[(RequestId, u32)]) -> Result<DraftPass<Self::Rows>, RunnerError>;

    /// Runs each request's anchor and drafted tokens through the target, packed: the rows of a request
    /// follow those of the one before. Caches are written but not advanced, so a call that fails may be made again.
    fn verify(&mut self, items: &[(RequestId, &[u32])]) -> Result<Self::Rows, RunnerError>;

    /// Keeps the first rows of the last verify pass of each request: its caches advance by that many
    /// positions and the kept taps become draft context, if not now then before the next draft: what fails then is the
    /// draft's. Everything else is as if it had never run.
    fn commit(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError>;

    /// Gives the caches of each request room for that many positions: target rows and draft context alike, a pass's
    /// own rows included. Called before the pass or the fork that needs it, and so for requests that are not known yet.
    fn reserve(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError>;

    /// Makes `new` known with the first positions of `source`'s caches (target and, if it `drafts`, draft context);
    /// `source` is not changed. Returns how many positions it took, at most `length`; 0, and `new` stays unknown, where
    /// that is not possible; so it does where the call fails.
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

    /// Whether this runner itself draws and judges the blocks of such a request, where their rows lie ([`chain`] and
    /// [`judge`], under the same law and with the same noise). The answer for a request never changes.
    ///
    /// [`chain`]: ModelRunner::chain
    /// [`judge`]: ModelRunner::judge
    fn decides(&self, _rule: Rule, _params: &SamplingParams) -> bool {
        false
    }

    /// Draws the chains of some blocks of a draft pass. It keeps the laws that the tokens were drawn from until the
    /// next call; those of the chains it gives back are empty.
    fn chain(
        &mut self,
        _rule: Rule,
        _pass: &DraftPass<Self::Rows>,
        _blocks: &[ChainBlock<'_>],
    ) -> Result<Vec<Chain>, RunnerError> {
        Err(RunnerError("this runner draws no chains".into()))
    }

    /// Judges some blocks by rows of a pass. Their tokens are those of the last [`ModelRunner::chain`], or fewer.
    fn judge(
        &mut self,
        _rule: Rule,
        _logits: &Self::Rows,
        _blocks: &[Block<'_>],
    ) -> Result<Vec<Result<Judgement, NumericsError>>, RunnerError> {
        Err(RunnerError("this runner judges no blocks".into()))
    }
}
