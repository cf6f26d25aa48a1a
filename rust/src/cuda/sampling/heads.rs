//! The heads of a draft in the device's memory, as the kernels read them.

use super::layout::{Heads, Matrix, code};
use super::plan::int;
use super::{DeviceRows, SampleError};

/// The heads of a draft in the device's memory; see [`crate::chain::Heads`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceHeads {
    /// The Markov head.
    pub markov: Option<DeviceMarkov>,
    /// Weight of the confidence head, one row; its bias, 0 if it has none; whether it reads the embedding.
    pub confidence: Option<(DeviceRows, f64, bool)>,
    /// The draft's reduced vocabulary, if it has one.
    pub vocabulary: Option<DeviceVocabulary>,
}

/// A Markov head in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMarkov {
    /// How the latent vector is made.
    pub kind: DeviceKind,
    /// Token embeddings.
    pub w1: DeviceRows,
    /// Projection to logits.
    pub w2: DeviceRows,
}

/// The kinds of Markov heads, with the projection and its bias where there is one.
#[derive(Clone, Copy, Debug)]
pub enum DeviceKind {
    /// The embedding itself.
    Vanilla,
    /// A gated one.
    Gated(DeviceRows, DeviceRows),
    /// A recurrent state; the flag says whether it goes through the anchor's own slot.
    Rnn(DeviceRows, DeviceRows, bool),
}

/// A reduced vocabulary in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceVocabulary {
    /// The token of each column, as 32-bit integers.
    pub tokens: u64,
    /// The column of each target token, as 32-bit integers; -1 for none.
    pub column: u64,
    /// Columns of the base logits.
    pub columns: usize,
    /// Target tokens.
    pub size: usize,
}

/// The longest latent vector that the kernels hold.
const MOST_RANK: usize = 1024;

/// Refuses a pass of blocks of `gamma` slots whose tensors do not fit the heads, as
/// [`crate::chain::Heads::check`] does on the host.
pub(super) fn check_shapes(
    heads: &DeviceHeads,
    gamma: usize,
    base: &DeviceRows,
    hidden: Option<&DeviceRows>,
) -> Result<(), SampleError> {
    let is = |name: &str, found: &DeviceRows, rows: usize, columns: usize| {
        if (found.rows, found.columns) == (rows, columns) {
            return Ok(());
        }
        let found = (found.rows, found.columns);
        Err(SampleError(format!("{name} must be [{rows}, {columns}], found [{}, {}]", found.0, found.1)))
    };
    let states = |head: &str| {
        hidden.ok_or_else(|| SampleError(format!("the {head} head needs the draft's hidden states")))
    };
    if gamma == 0 || !base.rows.is_multiple_of(gamma) {
        return Err(SampleError(format!("draft logits: {} rows are not whole blocks of {gamma}", base.rows)));
    }
    let (mut rank, mut lead) = (0, 0);
    if let Some(markov) = &heads.markov {
        rank = markov.w1.columns;
        is("markov_w2", &markov.w2, base.columns, rank)?;
        match &markov.kind {
            DeviceKind::Vanilla => {}
            DeviceKind::Gated(weight, bias) => {
                is("gate_proj.weight", weight, rank, states("gated Markov")?.columns + rank)?;
                is("gate_proj.bias", bias, 1, rank)?;
            }
            DeviceKind::Rnn(weight, bias, through_anchor) => {
                lead = usize::from(*through_anchor);
                is("joint_proj.weight", weight, 3 * rank, 2 * rank + states("RNN Markov")?.columns)?;
                is("joint_proj.bias", bias, 1, 3 * rank)?;
            }
        }
    }
    if let Some((weight, _, with_markov)) = &heads.confidence {
        if *with_markov && heads.markov.is_none() {
            let reason = "the confidence head has the Markov feature, but there is no Markov head";
            return Err(SampleError(reason.into()));
        }
        let inputs = states("confidence")?.columns + if *with_markov { rank } else { 0 };
        is("confidence_head.proj.weight", weight, 1, inputs)?;
    }
    if let Some(hidden) = hidden {
        is("draft states", hidden, base.rows / gamma * (gamma + lead), hidden.columns)?;
    }
    if let Some(found) = heads.vocabulary.map(|tokens| tokens.columns).filter(|found| *found != base.columns)
    {
        let expected = base.columns;
        return Err(SampleError(format!("the draft's vocabulary must be {expected} tokens, found {found}")));
    }
    Ok(())
}

/// The heads as the kernels read them.
pub(super) fn place(heads: &DeviceHeads, hidden: Option<&DeviceRows>) -> Result<Heads, SampleError> {
    let matrix = |name: &str, rows: &DeviceRows| {
        let dtype = code(rows.dtype)
            .ok_or_else(|| SampleError(format!("{name}: float64 is computed on the host")))?;
        let (count, columns, stride) = (int(rows.rows), int(rows.columns), int(rows.stride));
        Ok::<_, SampleError>(Matrix { data: rows.address, dtype, rows: count, columns, stride })
    };
    let mut placed = Heads::default();
    if let Some(markov) = &heads.markov {
        placed.kind = 1;
        placed.w1 = matrix("markov_w1", &markov.w1)?;
        placed.w2 = matrix("markov_w2", &markov.w2)?;
        if markov.w1.columns > MOST_RANK {
            let rank = markov.w1.columns;
            return Err(SampleError(format!(
                "the Markov head has rank {rank}, the kernels take at most {MOST_RANK}"
            )));
        }
        if let DeviceKind::Gated(weight, bias) | DeviceKind::Rnn(weight, bias, _) = &markov.kind {
            placed.kind = 2;
            placed.latent = matrix("the Markov projection", weight)?;
            placed.latent_bias = matrix("the Markov projection's bias", bias)?;
        }
        if let DeviceKind::Rnn(_, _, through_anchor) = &markov.kind {
            placed.kind = 3;
            placed.lead = i32::from(*through_anchor);
        }
    }
    if let Some((weight, _, with_markov)) = &heads.confidence {
        placed.confidence = matrix("the confidence head", weight)?;
        placed.with_markov = i32::from(*with_markov);
    }
    if let Some(hidden) = hidden {
        placed.hidden = matrix("draft states", hidden)?;
    }
    if let Some(vocabulary) = &heads.vocabulary {
        (placed.tokens, placed.column) = (vocabulary.tokens, vocabulary.column);
        placed.vocabulary = int(vocabulary.size);
    }
    Ok(placed)
}
