//! The one boundary between decisions and models.

use crate::chain::Heads;
use crate::rows::Rows;

/// Names a request for as long as the engine and the runner know it.
pub type RequestId = u64;

/// Logits or hidden states that a pass left in memory, readable until dropped.
pub trait PassRows: Send + Sync {
    /// The rows in the order in which the pass was asked for them.
    fn rows(&self) -> Rows<'_>;
}

/// What a draft pass leaves: `gamma` rows for each request, one request after the other.
pub struct DraftPass<R> {
    /// Base logits U, `[requests * gamma, vocabulary]`.
    pub base: R,
    /// Backbone states h, `[requests * gamma, hidden]`; absent if no head reads them. With an RNN head that goes
    /// through the anchor's slot, gamma + 1 rows each ([`Heads::hidden_rows`]).
    pub hidden: Option<R>,
}

/// Why a pass could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RunnerError(pub String);

/// Refuses a pass that gave another number of rows than was asked for.
pub(super) fn check_rows(pass: &str, found: &impl PassRows, asked: usize) -> Result<(), RunnerError> {
    let found = found.rows().rows();
    if found == asked {
        return Ok(());
    }
    Err(RunnerError(format!("the {pass} pass gave {found} rows, and {asked} were asked for")))
}

/// The models, seen from the engine. A round calls each of `draft`, `verify` and `commit` at most once, for the whole
/// batch; everything comes from the engine's own thread.
pub trait ModelRunner {
    /// Rows as this runner hands them over.
    type Rows: PassRows;

    /// Runs the next part of each prompt through the target, keeps it, and for requests that draft (the flag)
    /// hands its taps to the draft's context. The first part makes a request known. Returns the logits of each
    /// part's last token, `[requests, vocabulary]`.
    fn prefill(&mut self, items: &[(RequestId, &[u32], bool)]) -> Result<Self::Rows, RunnerError>;

    /// Brings the draft context of these requests up to date: what their prompts and rounds without a draft put off.
    /// Called before the draft pass of requests that resume drafting, so that the pass can be timed by itself.
    fn feed(&mut self, _ids: &[RequestId]) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Runs one draft block per request, behind the given anchors.
    fn draft(&mut self, items: &[(RequestId, u32)]) -> Result<DraftPass<Self::Rows>, RunnerError>;

    /// Runs each request's anchor and drafted tokens through the target, packed: the rows of a request
    /// follow those of the one before. Caches are written but not advanced.
    fn verify(&mut self, items: &[(RequestId, &[u32])]) -> Result<Self::Rows, RunnerError>;

    /// Keeps the first rows of the last verify pass of each request: its caches advance by that many
    /// positions and the kept taps become draft context. Everything else is as if it had never run.
    fn commit(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError>;

    /// Gives the caches of each request room for that many positions: target rows and draft context alike, a pass's
    /// own rows included. Called before the pass or the fork that needs it, and so for requests that are not known yet.
    fn reserve(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError>;

    /// Makes `new` known with the first positions of `source`'s caches (target and, if it `drafts`, draft context);
    /// `source` is not changed. Returns how many positions it took, at most `length`; 0, and `new` stays unknown, where
    /// that is not possible.
    fn fork(
        &mut self,
        new: RequestId,
        source: RequestId,
        length: usize,
        drafts: bool,
    ) -> Result<usize, RunnerError>;

    /// Whether a request can only be forked at its present length or where the last part of its prompt began, as with
    /// recurrent states. Then the engine ends a part at the last page border before a prompt's last token.
    fn forks_at_parts(&self) -> bool;

    /// Forgets requests, and what was reserved for them. Unknown ids are ignored.
    fn release(&mut self, ids: &[RequestId]);

    /// The draft's heads, in place.
    fn heads(&self) -> Heads<'_>;
}
