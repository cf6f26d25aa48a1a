//! Log-probabilities as they are reported to the user.

use super::real::Real;
use super::soft::Soft;
use super::truncate::{Budget, keep_top};
use super::workspace::Workspace;
use super::{Form, Law};

/// The log-probability of a token and of the most probable tokens in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// The most probable tokens and their log-probabilities, falling; ties in ascending id. Tokens
    /// without probability are not listed.
    pub top: Vec<(u32, f64)>,
}

impl Law<'_> {
    /// The log-probabilities of `token` and of the `n` most probable tokens.
    pub fn logprobs(&self, token: u32, n: u32, workspace: &mut Workspace) -> TokenLogprobs {
        let top = match &self.0 {
            Form::Point(only) => vec![(*only, 0.0); (n > 0).into()],
            Form::F32(soft) => soft.top(n, workspace),
            Form::F64(soft) => soft.top(n, workspace),
        };
        TokenLogprobs { token, logprob: self.log_prob(token), top }
    }
}

impl<F: Real> Soft<'_, F> {
    fn top(&self, n: u32, workspace: &mut Workspace) -> Vec<(u32, f64)> {
        if n == 0 {
            return Vec::new();
        }
        let budget = Budget::Tokens(n as usize);
        let largest = keep_top(&self.logits, self.shift, budget, workspace);
        let normaliser = self.total.ln();
        let mut top: Vec<(u32, f64)> = largest
            .iter()
            .map(|&i| {
                let log_weight = self.logits[i as usize].log_weight(self.shift);
                (self.id(i as usize), log_weight - normaliser)
            })
            .collect();
        workspace.ids.push(largest);
        // The sort is stable, and the tokens are in ascending id before it.
        top.sort_by(|a, b| b.1.total_cmp(&a.1));
        top
    }
}
