//! The confidence head: how likely a drafted token is to be kept, estimated before it is drawn.

use crate::calibration::sigmoid;
use crate::linear::Compute;
use crate::rows::Row;

/// c_k = sigma(w . [h_k; W1[x_{k-1}]] + b) (paper, equation 7).
///
/// Given that the tokens before it are kept, c_k estimates the probability that x_k is. It reads the token
/// before x_k and not x_k itself, so a cut by c_k does not select among values of x_k.
#[derive(Debug, Clone, Copy)]
pub struct ConfidenceHead<'a> {
    /// w: as many elements as the hidden size, then, with the Markov feature, as many as the rank.
    pub weight: Row<'a>,
    /// b: one element; 0 if the checkpoint has none.
    pub bias: Option<Row<'a>>,
    /// Whether the previous token's embedding W1[x_{k-1}] is part of the input.
    pub with_markov: bool,
}

impl ConfidenceHead<'_> {
    /// The logit of c_k for the input `[h_k; W1[x_{k-1}]]`; without the Markov feature only h_k is read.
    pub(crate) fn logit<R: Compute>(&self, features: &[R]) -> f64 {
        let bias = self.bias.map_or(0.0, |bias| bias.get(0));
        R::dot(self.weight, &features[..self.weight.len()]).widen() + bias
    }

    /// c_k, calibrated if there is a temperature for its position (paper, section 3.2.1), then corrected by
    /// an offset of its logit.
    pub(crate) fn confidence<R: Compute>(
        &self,
        features: &[R],
        temperature: Option<f64>,
        offset: f64,
    ) -> f32 {
        sigmoid(self.logit(features) / temperature.unwrap_or(1.0) + offset) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn reads_the_hidden_state_then_the_embedding() {
        let weight = [0.5f32, -1.0, 0.25];
        let mut head =
            ConfidenceHead { weight: Row::F32(&weight), bias: Some(Row::F64(&[0.125])), with_markov: true };
        assert_eq!(head.logit(&[2.0f32, 1.0, 4.0]), 1.0 - 1.0 + 1.0 + 0.125);
        head.bias = None;
        assert_eq!(head.logit(&[2.0f64, 1.0, 4.0]), 1.0);
        let hidden_only = ConfidenceHead { weight: Row::F32(&weight[..2]), bias: None, with_markov: false };
        assert_eq!(hidden_only.logit(&[2.0f32, 1.0, 4.0]), 0.0);
    }

    #[test]
    fn a_temperature_divides_the_logit_and_an_offset_moves_it() {
        let weight = [bf16::from_f32(1.0)];
        let head = ConfidenceHead { weight: Row::Bf16(&weight), bias: None, with_markov: false };
        let logit = 9f64.ln();
        assert!((head.confidence(&[logit], None, 0.0) - 0.9).abs() < 1e-6);
        assert!((head.confidence(&[logit], Some(2.0), 0.0) - 0.75).abs() < 1e-6);
        // Odds of 3 to 1, a third of that.
        assert!((head.confidence(&[logit], Some(2.0), -(3f64.ln())) - 0.5).abs() < 1e-6);
    }
}
