//! Known bugs of speculative decoding, planted so that tests can prove that they would be caught.
//!
//! Without the feature `mutants` nothing can be planted: `on` is the constant `false`, and the
//! branches that ask it are compiled away.

/// One bug that others have shipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The draft's noise and the residual's come from one stream.
    SharedStream,
    /// The uniform of the acceptance test is used again to draw from the residual.
    ReusedUniform,
    /// The acceptance test sees the draft's probabilities in another precision than the draw did.
    RoundedDraftLaw,
    /// Block verification accepts with the prefix ratio itself, without looking at the next row.
    BlockWithoutResidual,
    /// Acceptance noise is counted by absolute position, not by round and slot.
    PositionKeys,
    /// The target's rows are judged without the sampling parameters, by their largest logit.
    TargetArgmax,
    /// The cut looks at the token that it then drops.
    AnticipatingCut,
    /// A cut before the first token is treated as a rejection of that token.
    EmptyCutRejects,
    /// The plan of verify lengths looks at confidences of tokens behind the ones it drops, under every rule.
    PlanLooksAhead,
}

/// All of them.
pub const ALL: [Mutant; 9] = [
    Mutant::SharedStream,
    Mutant::ReusedUniform,
    Mutant::RoundedDraftLaw,
    Mutant::BlockWithoutResidual,
    Mutant::PositionKeys,
    Mutant::TargetArgmax,
    Mutant::AnticipatingCut,
    Mutant::EmptyCutRejects,
    Mutant::PlanLooksAhead,
];

/// Whether this bug is planted on this thread.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub(crate) const fn on(_: Mutant) -> bool {
    false
}

#[cfg(feature = "mutants")]
pub(crate) use planted::on;
#[cfg(feature = "mutants")]
pub use planted::{Planted, plant};

#[cfg(feature = "mutants")]
mod planted {
    use super::Mutant;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Whether this bug is planted on this thread.
    pub(crate) fn on(mutant: Mutant) -> bool {
        PLANTED.get() == Some(mutant)
    }

    /// Plants a bug on this thread until the guard is dropped. Work that is handed to other threads, such as
    /// batches and rows of large vocabularies, stays clean.
    pub fn plant(mutant: Mutant) -> Planted {
        Planted { before: PLANTED.replace(Some(mutant)) }
    }

    /// Keeps a bug planted on the thread that planted it.
    #[must_use = "the bug is gone as soon as the guard is"]
    pub struct Planted {
        before: Option<Mutant>,
    }

    impl Drop for Planted {
        fn drop(&mut self) {
            PLANTED.set(self.before);
        }
    }
}
