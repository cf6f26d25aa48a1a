//! What a round costs: measured, smoothed, and read by the throughput policy.

use thiserror::Error;

use super::curve::{Curve, Point};

/// Why a list of measurements is not a cost table.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum CostError {
    /// There is no point to extend from.
    #[error("a cost table needs at least one measured point, found none")]
    Empty,
    /// A pass over no tokens (or a draft pass of no requests) costs nothing and says nothing.
    #[error("a cost table counts tokens from 1, found a point at 0 tokens")]
    NoTokens,
    /// NaN, infinite, zero or negative time.
    #[error("the cost of {tokens} tokens must be a finite time above 0 seconds, found {seconds}")]
    Seconds {
        /// Tokens in the pass.
        tokens: usize,
        /// What was given.
        seconds: f64,
    },
    /// The same width twice; take a median first.
    #[error("a cost table has one point for each width, found {tokens} tokens twice")]
    Duplicate {
        /// Tokens in the pass.
        tokens: usize,
    },
    /// Every request of a pass has at least its anchor in it.
    #[error("a target pass of {requests} requests has at least {requests} tokens, found {tokens}")]
    Requests {
        /// Tokens in the pass.
        tokens: usize,
        /// Requests in the pass.
        requests: usize,
    },
    /// NaN, infinite or negative extra cost.
    #[error("{name} must be a finite time of at least 0 seconds, found {seconds}")]
    Extra {
        /// Which extra cost.
        name: &'static str,
        /// What was given.
        seconds: f64,
    },
}

/// Seconds of a round by what it does: the reciprocal of the paper's SPS curve (section 3.2.2), and the costs
/// around the target pass.
///
/// | part | seconds |
/// |---|---|
/// | target pass | f(tokens) + a * requests; f never falls |
/// | draft pass, and feeding its context what is kept | g(drafting requests); never falls, 0 for none |
/// | Markov chain | a constant per drafted token |
/// | the rest | a constant |
///
/// A round without a draft usually feeds nothing: its tokens wait, and are fed in one pass when drafting
/// resumes or too many wait. The cost of the latter for each request and round is learned from live rounds
/// alone. What a request feeds when it resumes (a prompt, or up to the 64 rounds of a pause) is not counted
/// here.
///
/// A wider pass that was measured to be faster is noise (or a kernel that should have been used for the
/// narrow one), and is pooled with its neighbours. Between points the curves are linear, below the first
/// point they are constant, and beyond the last one they continue with their mean slope.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    pub(super) pass: Curve,
    pub(super) draft: Option<Curve>,
    pub(super) request_seconds: f64,
    pub(super) token_seconds: f64,
    pub(super) fixed_seconds: f64,
    pub(super) plain_feed_seconds: f64,
}

impl CostTable {
    /// A table from points (tokens in the pass, seconds) in any order, preferably medians.
    ///
    /// # Errors
    /// [`CostError`] if there is no point, a width of 0 or given twice, or a time that is not a finite
    /// number above 0.
    pub fn new(points: &[(usize, f64)]) -> Result<Self, CostError> {
        Ok(Self::of(curve(points)?))
    }

    /// A table of target passes and nothing else.
    pub(super) fn of(pass: Curve) -> Self {
        Self {
            pass,
            draft: None,
            request_seconds: 0.0,
            token_seconds: 0.0,
            fixed_seconds: 0.0,
            plain_feed_seconds: 0.0,
        }
    }

    /// Adds what every round costs however little is verified: the loop itself.
    ///
    /// # Errors
    /// [`CostError::Extra`] unless it is finite and at least 0, as for the other parts.
    pub fn with_fixed_seconds(mut self, seconds: f64) -> Result<Self, CostError> {
        self.fixed_seconds = extra("the cost of a round", seconds)?;
        Ok(self)
    }

    /// Adds what every request of a target pass costs beside its tokens: its attention, its share of the
    /// decisions.
    pub fn with_request_seconds(mut self, seconds: f64) -> Result<Self, CostError> {
        self.request_seconds = extra("the cost of a request", seconds)?;
        Ok(self)
    }

    /// Adds draft passes with their feeds, as (drafting requests, seconds) in any order. Without points
    /// drafting counts as free.
    ///
    /// # Errors
    /// As for [`CostTable::new`], but an empty list is no error.
    pub fn with_draft(mut self, points: &[(usize, f64)]) -> Result<Self, CostError> {
        self.draft = if points.is_empty() { None } else { Some(curve(points)?) };
        Ok(self)
    }

    /// Adds what the chain takes for each drafted token.
    pub fn with_token_seconds(mut self, seconds: f64) -> Result<Self, CostError> {
        self.token_seconds = extra("the cost of a drafted token", seconds)?;
        Ok(self)
    }

    /// The smoothed points of f, as (tokens, seconds).
    pub fn points(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        self.pass.points().map(|(t, s)| (t as usize, s))
    }

    /// a: what each request adds to a target pass.
    pub fn request_seconds(&self) -> f64 {
        self.request_seconds
    }

    /// Seconds of the chain for each drafted token.
    pub fn token_seconds(&self) -> f64 {
        self.token_seconds
    }

    /// What every round costs however little it does.
    pub fn fixed_seconds(&self) -> f64 {
        self.fixed_seconds
    }

    /// f: seconds of one target pass over `tokens` tokens, without what its requests add.
    pub fn pass_seconds(&self, tokens: usize) -> f64 {
        self.pass.at(tokens as f64)
    }

    /// Seconds of a round that drafts nothing and whose target pass holds `tokens` tokens of `requests`
    /// requests.
    pub fn round_seconds(&self, tokens: usize, requests: usize) -> f64 {
        self.pass_seconds(tokens) + self.fixed_seconds + self.request_seconds * requests as f64
    }

    /// Seconds of a round in which none of `requests` requests drafts.
    pub(super) fn plain_seconds(&self, requests: usize) -> f64 {
        self.round_seconds(requests, requests) + self.plain_feed_seconds * requests as f64
    }

    /// What drafting `tokens` tokens for `requests` requests adds to a round.
    pub fn draft_seconds(&self, requests: usize, tokens: usize) -> f64 {
        let pass =
            self.draft.as_ref().filter(|_| requests > 0).map_or(0.0, |draft| draft.at(requests as f64));
        pass + self.token_seconds * tokens as f64
    }

    /// The paper's SPS(B): target passes per second at `tokens` tokens.
    pub fn steps_per_second(&self, tokens: usize) -> f64 {
        self.pass_seconds(tokens).recip()
    }
}

/// The curve through points in any order, or why there is none.
pub(super) fn curve(points: &[(usize, f64)]) -> Result<Curve, CostError> {
    let mut points = points.to_vec();
    points.sort_by_key(|&(tokens, _)| tokens);
    check(&points)?;
    let point = |&(tokens, seconds): &(usize, f64)| Point { x: tokens as f64, y: seconds, weight: 1.0 };
    Ok(Curve::through(&points.iter().map(point).collect::<Vec<_>>()))
}

fn check(sorted: &[(usize, f64)]) -> Result<(), CostError> {
    if sorted.is_empty() {
        return Err(CostError::Empty);
    }
    for &(tokens, seconds) in sorted {
        if tokens == 0 {
            return Err(CostError::NoTokens);
        }
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(CostError::Seconds { tokens, seconds });
        }
    }
    match sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(CostError::Duplicate { tokens: pair[0].0 }),
        None => Ok(()),
    }
}

pub(super) fn extra(name: &'static str, seconds: f64) -> Result<f64, CostError> {
    match seconds.is_finite() && seconds >= 0.0 {
        true => Ok(seconds),
        false => Err(CostError::Extra { name, seconds }),
    }
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
