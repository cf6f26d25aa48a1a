//! The laws of drafted tokens, which the draft has kept or which are built from its logits.

use std::ops::Deref;

use super::{NumericsError, Side};
use crate::history::History;
use crate::law::{Law, Workspace};
use crate::params::SamplingParams;
use crate::rows::Rows;

/// Where the laws of drafted tokens come from.
#[derive(Clone, Copy)]
pub(super) enum Drafts<'a> {
    /// The draft kept them.
    Laws(&'a [Law<'a>]),
    /// They are built from logits under the request's parameters.
    Logits(Rows<'a>),
}

impl<'a> Drafts<'a> {
    /// The law of drafted token `k` after the tokens in `history`.
    pub fn law(
        self,
        k: usize,
        params: &SamplingParams,
        history: &History,
        workspace: &mut Workspace,
    ) -> Result<Read<'a>, NumericsError> {
        match self {
            Drafts::Laws(laws) => Ok(Read::Kept(&laws[k])),
            Drafts::Logits(rows) => match Law::new(rows.row(k), params, history, workspace) {
                Ok(law) => Ok(Read::Built(law)),
                Err(reason) => Err(NumericsError { side: Side::Draft, row: k, reason }),
            },
        }
    }

    /// Number of laws available.
    pub fn len(self) -> usize {
        match self {
            Drafts::Laws(laws) => laws.len(),
            Drafts::Logits(rows) => rows.rows(),
        }
    }
}

/// A draft's law, borrowed or built on demand.
pub(super) enum Read<'a> {
    Kept(&'a Law<'a>),
    Built(Law<'a>),
}

impl<'a> Deref for Read<'a> {
    type Target = Law<'a>;

    fn deref(&self) -> &Law<'a> {
        match self {
            Read::Kept(law) => law,
            Read::Built(law) => law,
        }
    }
}

impl Read<'_> {
    /// Returns the buffers of a built law to the workspace.
    pub fn recycle(self, workspace: &mut Workspace) {
        if let Read::Built(law) = self {
            workspace.recycle(law);
        }
    }
}
