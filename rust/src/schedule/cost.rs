//! What a target pass costs: measured once, smoothed, and read by the throughput plan.

use thiserror::Error;

/// Why a list of measurements is not a cost table.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum CostError {
    /// There is nothing to extend.
    #[error("a cost table needs at least one measured point, found none")]
    Empty,
    /// A pass over no tokens costs nothing and says nothing.
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
    /// NaN, infinite, zero or negative weight.
    #[error("the weight of the point at {tokens} tokens must be finite and above 0, found {weight}")]
    Weight {
        /// Tokens in the pass.
        tokens: usize,
        /// What was given.
        weight: f64,
    },
    /// The same width twice: take a median first.
    #[error("a cost table has one point for each width, found {tokens} tokens twice")]
    Duplicate {
        /// Tokens in the pass.
        tokens: usize,
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

/// One measurement of the target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostPoint {
    /// Tokens in the pass, over all requests.
    pub tokens: usize,
    /// Time of the pass, best a median.
    pub seconds: f64,
    /// How much the point counts where noise is smoothed, for example the number of repetitions.
    pub weight: f64,
}

/// Seconds per round as a function of the tokens in the target pass (the paper's SPS curve, section
/// 3.2.2, turned over).
///
/// The curve never falls: a wider pass that was measured faster is noise (or a kernel that should have
/// been used for the narrow one), and is pooled with its neighbours. Between points it is linear, below
/// the first constant. Beyond the last it goes on with the mean slope of the whole table, because the
/// last two points alone may be a step or a plateau of the kernel; one point extends as a constant.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    tokens: Vec<f64>,
    seconds: Vec<f64>,
    slope_beyond: f64,
    round_seconds: f64,
    request_seconds: f64,
}

impl CostTable {
    /// A table from (tokens in the pass, seconds) in any order, all of the same weight.
    ///
    /// # Errors
    /// [`CostError`] if there is no point, a width of 0 or given twice, or a time that is not a finite
    /// number above 0.
    pub fn new(points: &[(usize, f64)]) -> Result<Self, CostError> {
        let points: Vec<CostPoint> =
            points.iter().map(|&(tokens, seconds)| CostPoint { tokens, seconds, weight: 1.0 }).collect();
        Self::weighted(&points)
    }

    /// As [`CostTable::new`], with a weight for each point.
    ///
    /// # Errors
    /// As [`CostTable::new`], and for a weight that is not a finite number above 0.
    pub fn weighted(points: &[CostPoint]) -> Result<Self, CostError> {
        let mut points = points.to_vec();
        points.sort_by_key(|p| p.tokens);
        check(&points)?;
        let seconds = pool_adjacent_violators(&points);
        let tokens: Vec<f64> = points.iter().map(|p| p.tokens as f64).collect();
        let last = tokens.len() - 1;
        let slope_beyond = match last {
            0 => 0.0,
            _ => (seconds[last] - seconds[0]) / (tokens[last] - tokens[0]),
        };
        Ok(Self { tokens, seconds, slope_beyond, round_seconds: 0.0, request_seconds: 0.0 })
    }

    /// Adds what every round costs however little is verified: the draft pass and the loop itself.
    ///
    /// # Errors
    /// [`CostError::Extra`] unless it is finite and at least 0.
    pub fn with_round_seconds(mut self, seconds: f64) -> Result<Self, CostError> {
        self.round_seconds = extra("the cost of a round", seconds)?;
        Ok(self)
    }

    /// Adds what every request of a round costs: its share of the draft pass and of the decisions.
    ///
    /// # Errors
    /// [`CostError::Extra`] unless it is finite and at least 0.
    pub fn with_request_seconds(mut self, seconds: f64) -> Result<Self, CostError> {
        self.request_seconds = extra("the cost of a request", seconds)?;
        Ok(self)
    }

    /// The smoothed points, as (tokens, seconds).
    pub fn points(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        self.tokens.iter().zip(&self.seconds).map(|(&t, &s)| (t as usize, s))
    }

    /// Seconds of one target pass over `tokens` tokens.
    pub fn pass_seconds(&self, tokens: usize) -> f64 {
        let x = tokens as f64;
        let last = self.tokens.len() - 1;
        if x <= self.tokens[0] {
            return self.seconds[0];
        }
        if x >= self.tokens[last] {
            return self.seconds[last] + self.slope_beyond * (x - self.tokens[last]);
        }
        let right = self.tokens.partition_point(|&t| t < x);
        let (x0, x1) = (self.tokens[right - 1], self.tokens[right]);
        let (y0, y1) = (self.seconds[right - 1], self.seconds[right]);
        // Clamped: the rounding of a long segment must not make the curve fall.
        (y0 + (y1 - y0) * ((x - x0) / (x1 - x0))).clamp(y0, y1)
    }

    /// Seconds of a whole round of `requests` requests whose target pass holds `tokens` tokens.
    pub fn round_seconds(&self, tokens: usize, requests: usize) -> f64 {
        self.pass_seconds(tokens) + self.round_seconds + self.request_seconds * requests as f64
    }

    /// The paper's SPS(B): target passes per second at `tokens` tokens.
    pub fn steps_per_second(&self, tokens: usize) -> f64 {
        self.pass_seconds(tokens).recip()
    }
}

fn check(sorted: &[CostPoint]) -> Result<(), CostError> {
    if sorted.is_empty() {
        return Err(CostError::Empty);
    }
    for &CostPoint { tokens, seconds, weight } in sorted {
        if tokens == 0 {
            return Err(CostError::NoTokens);
        }
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(CostError::Seconds { tokens, seconds });
        }
        if !(weight.is_finite() && weight > 0.0) {
            return Err(CostError::Weight { tokens, weight });
        }
    }
    match sorted.windows(2).find(|pair| pair[0].tokens == pair[1].tokens) {
        Some(pair) => Err(CostError::Duplicate { tokens: pair[0].tokens }),
        None => Ok(()),
    }
}

fn extra(name: &'static str, seconds: f64) -> Result<f64, CostError> {
    match seconds.is_finite() && seconds >= 0.0 {
        true => Ok(seconds),
        false => Err(CostError::Extra { name, seconds }),
    }
}

/// The non-decreasing sequence nearest to the measured one in weighted squares (isotonic regression):
/// whenever a block is not above the one before it, the two become their mean.
fn pool_adjacent_violators(sorted: &[CostPoint]) -> Vec<f64> {
    struct Block {
        seconds: f64,
        weight: f64,
        points: usize,
    }
    let mut blocks: Vec<Block> = Vec::with_capacity(sorted.len());
    for point in sorted {
        let mut block = Block { seconds: point.seconds, weight: point.weight, points: 1 };
        while let Some(before) = blocks.pop_if(|before| before.seconds >= block.seconds) {
            let weight = before.weight + block.weight;
            block.seconds = (before.seconds * before.weight + block.seconds * block.weight) / weight;
            block.weight = weight;
            block.points += before.points;
        }
        blocks.push(block);
    }
    blocks.iter().flat_map(|b| std::iter::repeat_n(b.seconds, b.points)).collect()
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
