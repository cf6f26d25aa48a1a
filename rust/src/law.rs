//! The distribution (*law*) that a token is really drawn from: a row of logits after every transform.
//!
//! The transforms, in order and the same for draft and target: `min_tokens` mask, logit bias, repetition,
//! frequency and presence penalties, temperature, top-k, top-p, min-p. Rows in `f64` stay `f64`; others
//! become `f32` for the transforms. Sums, ratios, residuals and cumulative distribution functions are `f64`.

mod cdf;
mod gumbel;
mod kernels;
mod logprobs;
mod parallel;
mod real;
mod residual;
mod soft;
mod transform;
mod truncate;
mod workspace;

use std::borrow::Cow;

pub(crate) use kernels::exp;
pub use logprobs::TokenLogprobs;
pub(crate) use parallel::LONG;
pub use workspace::Workspace;

use real::{Real, Shift};
use soft::Soft;

use crate::history::History;
use crate::noise::RoundNoise;
use crate::params::SamplingParams;
use crate::rows::Row;

/// The factor by which a single-precision logit's distance from the largest is multiplied.
#[cfg(feature = "cuda")]
pub(crate) fn inverse_temperature(temperature: f64) -> f32 {
    Shift::new(0.0f32, temperature).inverse_temperature
}

/// Why nothing can be drawn from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRow {
    /// A logit is not a number.
    #[error("a NaN")]
    NaN,
    /// A logit is plus infinity.
    #[error("plus infinity")]
    PlusInfinity,
    /// Every logit is minus infinity, or there is none.
    #[error("no candidate above minus infinity")]
    NoCandidate,
}

/// Logits in the precision of the transforms, borrowed where they can be.
#[derive(Clone, Debug)]
pub enum Logits<'a> {
    /// Double precision.
    F64(Cow<'a, [f64]>),
    /// Single precision.
    F32(Cow<'a, [f32]>),
}

impl<'a> Logits<'a> {
    /// Reads a row; half-precision ones are widened into a buffer of the workspace.
    pub fn read(row: Row<'a>, workspace: &mut Workspace) -> Self {
        let mut widened = |widen: &dyn Fn(&mut [f32])| {
            // Whatever an earlier row left in the buffer is overwritten, so it is not cleared first.
            let mut buffer = workspace.singles.pop().unwrap_or_default();
            buffer.resize(row.len(), 0.0);
            widen(&mut buffer);
            Logits::F32(Cow::Owned(buffer))
        };
        match row {
            Row::F64(x) => Logits::F64(Cow::Borrowed(x)),
            Row::F32(x) => Logits::F32(Cow::Borrowed(x)),
            Row::F16(x) => widened(&|buffer| kernels::widen_f16(x, buffer)),
            Row::Bf16(x) => widened(&|buffer| kernels::widen_bf16(x, buffer)),
        }
    }
}

/// The distribution of one token.
#[derive(Debug)]
pub struct Law<'a>(Form<'a>);

#[derive(Debug)]
enum Form<'a> {
    /// One token is certain.
    Point(u32),
    F32(Soft<'a, f32>),
    F64(Soft<'a, f64>),
}

impl<'a> Law<'a> {
    /// The law of a row over the whole vocabulary under `params`, after `history`.
    pub fn new(
        row: Row<'a>,
        params: &SamplingParams,
        history: &History,
        workspace: &mut Workspace,
    ) -> Result<Self, BadRow> {
        let logits = Logits::read(row, workspace);
        Self::of(logits, None, params, history, workspace)
    }

    /// The law of `logits` over the ascending tokens `ids`, or over the whole vocabulary if `ids` is absent.
    /// Other tokens have no probability, and the transforms do not see them.
    pub fn of(
        logits: Logits<'a>,
        ids: Option<Vec<u32>>,
        params: &SamplingParams,
        history: &History,
        workspace: &mut Workspace,
    ) -> Result<Self, BadRow> {
        Ok(Law(match logits {
            Logits::F32(logits) => match build(logits, ids, params, history, workspace)? {
                Built::Point(token) => Form::Point(token),
                Built::Soft(soft) => Form::F32(soft),
            },
            Logits::F64(logits) => match build(logits, ids, params, history, workspace)? {
                Built::Point(token) => Form::Point(token),
                Built::Soft(soft) => Form::F64(soft),
            },
        }))
    }

    /// The law that puts everything on one token.
    pub fn point(token: u32) -> Law<'static> {
        Law(Form::Point(token))
    }

    /// Probability of a token; 0 outside of the vocabulary.
    pub fn prob(&self, token: u32) -> f64 {
        match &self.0 {
            Form::Point(only) => f64::from(u8::from(*only == token)),
            Form::F32(soft) => soft.prob(token),
            Form::F64(soft) => soft.prob(token),
        }
    }

    /// Natural logarithm of a token's probability.
    pub fn log_prob(&self, token: u32) -> f64 {
        match &self.0 {
            Form::Point(only) if *only == token => 0.0,
            Form::Point(_) => f64::NEG_INFINITY,
            Form::F32(soft) => soft.log_prob(token),
            Form::F64(soft) => soft.log_prob(token),
        }
    }

    /// The first token, in ascending id, at which the cumulative distribution function exceeds `u` of [0, 1).
    pub fn draw(&self, u: f64) -> u32 {
        match &self.0 {
            Form::Point(only) => *only,
            Form::F32(soft) => soft.draw(u),
            Form::F64(soft) => soft.draw(u),
        }
    }

    /// The token with the largest log p + Gumbel noise of `slot`, ties going to the lowest id.
    pub fn gumbel_argmax(&self, noise: &dyn RoundNoise, slot: usize) -> u32 {
        match &self.0 {
            Form::Point(only) => *only,
            Form::F32(soft) => soft.gumbel_argmax(noise, slot),
            Form::F64(soft) => soft.gumbel_argmax(noise, slot),
        }
    }

    /// The same law, independent of the row it was read from.
    pub fn into_owned(self) -> Law<'static> {
        Law(match self.0 {
            Form::Point(token) => Form::Point(token),
            Form::F32(soft) => Form::F32(soft.into_owned()),
            Form::F64(soft) => Form::F64(soft.into_owned()),
        })
    }
}

/// A law in one precision.
enum Built<'a, F: Real> {
    Point(u32),
    Soft(Soft<'a, F>),
}

fn build<'a, F: Real>(
    logits: Cow<'a, [F]>,
    ids: Option<Vec<u32>>,
    params: &SamplingParams,
    history: &History,
    workspace: &mut Workspace,
) -> Result<Built<'a, F>, BadRow> {
    let logits = transform::transform(logits, ids.as_deref(), params, history, workspace)?;
    let max = largest(&logits)?;
    if params.is_greedy() {
        let index = F::position(&logits, max).unwrap_or_default();
        let token = ids.as_ref().map_or(index as u32, |ids| ids[index]);
        recycle(logits, ids, workspace);
        return Ok(Built::Point(token));
    }
    let shift = Shift::new(max, params.temperature);
    if !truncate::truncates(params, logits.len()) {
        return Ok(Built::Soft(Soft::new(logits, ids, shift, workspace)));
    }
    let mut kept = truncate::truncate(&logits, shift, params, workspace);
    let mut values = F::take(workspace);
    values.extend(kept.iter().map(|&i| logits[i as usize]));
    if let Some(ids) = &ids {
        for id in &mut kept {
            *id = ids[*id as usize];
        }
    }
    recycle(logits, ids, workspace);
    let soft = Soft::new(Cow::Owned(values), Some(kept), shift, workspace);
    Ok(Built::Soft(soft))
}

/// The largest logit of a row, or why nothing can be drawn from the row.
fn largest<F: Real>(logits: &[F]) -> Result<F, BadRow> {
    let scan = parallel::scan(logits);
    if scan.has_nan {
        Err(BadRow::NaN)
    } else if scan.max == F::INFINITY {
        Err(BadRow::PlusInfinity)
    } else if scan.max == F::NEG_INFINITY {
        Err(BadRow::NoCandidate)
    } else {
        Ok(scan.max)
    }
}

fn recycle<F: Real>(logits: Cow<'_, [F]>, ids: Option<Vec<u32>>, workspace: &mut Workspace) {
    if let Cow::Owned(values) = logits {
        F::pool(workspace).push(values);
    }
    workspace.ids.extend(ids);
}

#[cfg(test)]
mod tests;
