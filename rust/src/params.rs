//! The sampling parameters of a request: named and defined as in vLLM, applied in the order of transformers.

/// Sampling parameters of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 means the largest logit wins, ties going to the lowest id.
    pub temperature: f64,
    /// Keep the `k` most probable tokens, the lower ids among equal ones; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keep tokens at least this many times as probable as the most probable one; 0 keeps all.
    pub min_p: f64,
    /// Divides the positive and multiplies the negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f64,
    /// Subtracted once from the logit of every token in the output; 0 is off.
    pub presence_penalty: f64,
    /// Subtracted from a token's logit as often as it occurs in the output; 0 is off.
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f64)>,
    /// The tokens of `stop_token_ids` cannot be drawn before this many tokens were generated.
    pub min_tokens: u32,
    /// Every id that ends the request, the end-of-sequence ids included.
    pub stop_token_ids: Vec<u32>,
    /// Report the log-probability of each token and of this many most probable alternatives.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    /// The target's own distribution: temperature 1, nothing truncated, nothing penalised.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}

/// A sampling parameter outside of its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} must be {range}, found {found}")]
pub struct ParamsError {
    name: &'static str,
    range: &'static str,
    found: f64,
}

impl SamplingParams {
    /// The default at temperature 0.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether the most probable token is taken instead of a draw.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether tokens seen before change a row's distribution.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.penalises_output()
    }

    /// Whether tokens of the output, but not of the prompt, change a row's distribution.
    pub(crate) fn penalises_output(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The same without temperature and truncation: the distribution that bias and penalties leave.
    pub(crate) fn before_temperature(&self) -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..self.clone() }
    }

    /// Refuses values that have no meaning, naming the first one. Laws take checked parameters.
    pub fn check(&self) -> Result<(), ParamsError> {
        let finite = |x: f64| x.is_finite();
        let rules: [(&'static str, f64, bool, &'static str); 6] = [
            (
                "temperature",
                self.temperature,
                finite(self.temperature) && self.temperature >= 0.0,
                "a number of at least 0",
            ),
            ("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "between 0 and 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                finite(self.repetition_penalty) && self.repetition_penalty > 0.0,
                "a number above 0",
            ),
            ("presence_penalty", self.presence_penalty, finite(self.presence_penalty), "a number"),
            ("frequency_penalty", self.frequency_penalty, finite(self.frequency_penalty), "a number"),
        ];
        let bias =
            self.logit_bias.iter().map(|&(_, x)| ("logit_bias", x, x < f64::INFINITY, "below plus infinity"));
        match rules.into_iter().chain(bias).find(|rule| !rule.2) {
            Some((name, found, _, range)) => Err(ParamsError { name, range, found }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_out_of_range_is_named() {
        assert_eq!(SamplingParams::default().check(), Ok(()));
        assert_eq!(SamplingParams::greedy().check(), Ok(()));
        let refused = |change: fn(&mut SamplingParams)| {
            let mut params = SamplingParams::default();
            change(&mut params);
            params.check().unwrap_err().to_string()
        };
        assert_eq!(refused(|p| p.temperature = -1.0), "temperature must be a number of at least 0, found -1");
        assert_eq!(refused(|p| p.top_p = 0.0), "top_p must be above 0 and at most 1, found 0");
        assert!(refused(|p| p.temperature = f64::NAN).starts_with("temperature"));
        assert!(refused(|p| p.min_p = 1.5).starts_with("min_p"));
        assert!(refused(|p| p.repetition_penalty = 0.0).starts_with("repetition_penalty"));
        assert!(refused(|p| p.presence_penalty = f64::INFINITY).starts_with("presence_penalty"));
        assert!(refused(|p| p.frequency_penalty = f64::NAN).starts_with("frequency_penalty"));
        assert!(refused(|p| p.logit_bias = vec![(3, f64::INFINITY)]).starts_with("logit_bias"));
    }
}
