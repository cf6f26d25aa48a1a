//! The transforms before temperature: the mask of stop tokens, bias and penalties.

use std::borrow::Cow;

use super::BadRow;
use super::real::Real;
use super::workspace::Workspace;
use crate::history::History;
use crate::params::SamplingParams;

/// Applies, in this order, the `min_tokens` mask, logit bias, and the repetition, frequency and presence
/// penalties. Copies the row only if something changes it.
///
/// `ids` are the ascending ids of the logits, absent if the row is the whole vocabulary.
pub(super) fn transform<'a, F: Real>(
    logits: Cow<'a, [F]>,
    ids: Option<&[u32]>,
    params: &SamplingParams,
    history: &History,
    workspace: &mut Workspace,
) -> Result<Cow<'a, [F]>, BadRow> {
    let masks = history.generated() < params.min_tokens as usize && !params.stop_token_ids.is_empty();
    let penalises =
        params.repetition_penalty != 1.0 || (params.penalises_output() && history.generated() > 0);
    if !masks && !penalises && params.logit_bias.is_empty() {
        return Ok(logits);
    }
    let mut values = match logits {
        Cow::Owned(values) => values,
        Cow::Borrowed(row) => {
            let mut values = F::take(workspace);
            values.extend_from_slice(row);
            values
        }
    };
    let mut row = Addressed { values: &mut values, ids };
    if masks {
        row.mask(&params.stop_token_ids)?;
    }
    for &(token, bias) in &params.logit_bias {
        if let Some(value) = row.get_mut(token) {
            *value = *value + F::narrow(bias);
        }
    }
    if penalises {
        row.penalise(params, history);
    }
    Ok(Cow::Owned(values))
}

/// Logits addressed by token.
struct Addressed<'a, F> {
    values: &'a mut [F],
    ids: Option<&'a [u32]>,
}

impl<F: Real> Addressed<'_, F> {
    fn get_mut(&mut self, token: u32) -> Option<&mut F> {
        let index = match self.ids {
            None => token as usize,
            Some(ids) => ids.binary_search(&token).ok()?,
        };
        self.values.get_mut(index)
    }

    /// Makes tokens impossible. Refuses to mask a logit that makes the row a bad one.
    fn mask(&mut self, tokens: &[u32]) -> Result<(), BadRow> {
        for &token in tokens {
            let Some(value) = self.get_mut(token) else { continue };
            if *value == F::INFINITY {
                return Err(BadRow::PlusInfinity);
            }
            if value.widen().is_nan() {
                return Err(BadRow::NaN);
            }
            *value = F::NEG_INFINITY;
        }
        Ok(())
    }

    fn penalise(&mut self, params: &SamplingParams, history: &History) {
        let repetition = F::narrow(params.repetition_penalty);
        for (token, seen) in history.distinct() {
            let Some(value) = self.get_mut(token) else { continue };
            if params.repetition_penalty != 1.0 {
                let is_negative = value.widen() < 0.0;
                *value = if is_negative { *value * repetition } else { *value / repetition };
            }
            if seen.in_output > 0 {
                let count = F::narrow(f64::from(seen.in_output));
                *value =
                    *value - count * F::narrow(params.frequency_penalty) - F::narrow(params.presence_penalty);
            }
        }
    }
}
