//! A cost table from passes over many (tokens, requests): what tokens cost, and what requests cost.

use super::cost::{CostError, CostTable};
use super::curve::{Curve, Point};

/// One timed target pass: (tokens, requests, seconds).
pub type Pass = (usize, usize, f64);

/// Steps of the search for a; each shrinks the interval to 2/3.
const STEPS: usize = 80;

impl CostTable {
    /// Fits pass(tokens, requests) = f(tokens) + a * requests by least squares of the relative errors, with f
    /// non-decreasing and a at least 0. The best f at a given a is an isotonic regression, and the error that
    /// it leaves is convex in a, so a is found by narrowing an interval. If the passes cannot tell the two
    /// apart, a is 0.
    ///
    /// # Errors
    /// [`CostError`] if there is no pass, one without tokens or with fewer tokens than requests, or a time
    /// that is not a finite number above 0.
    pub fn fit(passes: &[Pass]) -> Result<Self, CostError> {
        if passes.is_empty() {
            return Err(CostError::Empty);
        }
        for &(tokens, requests, seconds) in passes {
            if tokens == 0 {
                return Err(CostError::NoTokens);
            }
            if requests > tokens {
                return Err(CostError::Requests { tokens, requests });
            }
            if !(seconds.is_finite() && seconds > 0.0) {
                return Err(CostError::Seconds { tokens, seconds });
            }
        }
        let mut passes = passes.to_vec();
        passes.sort_by_key(|&(tokens, ..)| tokens);
        // However expensive requests are, f must stay above 0.
        let dearest =
            passes.iter().filter(|p| p.1 > 0).map(|p| p.2 / p.1 as f64).fold(f64::INFINITY, f64::min);
        let (mut low, mut high) = (0.0, if dearest.is_finite() { 0.999 * dearest } else { 0.0 });
        for _ in 0..STEPS {
            let third = (high - low) / 3.0;
            if error(&passes, low + third) <= error(&passes, high - third) {
                high -= third;
            } else {
                low += third;
            }
        }
        let none = error(&passes, 0.0);
        let a = 0.5 * (low + high);
        let a = if error(&passes, a) < none * (1.0 - 1e-6) - 1e-12 { a } else { 0.0 };
        Self::of(best(&passes, a)).with_request_seconds(a)
    }
}

/// The best f if a request costs `a`.
fn best(sorted: &[Pass], a: f64) -> Curve {
    let mut points: Vec<Point> = Vec::new();
    for &(tokens, requests, seconds) in sorted {
        let (x, y, weight) = (tokens as f64, seconds - a * requests as f64, seconds.powi(-2));
        match points.last_mut().filter(|last| last.x == x) {
            Some(last) => {
                last.y = (last.y * last.weight + y * weight) / (last.weight + weight);
                last.weight += weight;
            }
            None => points.push(Point { x, y, weight }),
        }
    }
    Curve::through(&points)
}

/// The sum of squared relative errors that the best f leaves.
fn error(sorted: &[Pass], a: f64) -> f64 {
    let f = best(sorted, a);
    sorted.iter().map(|&(t, r, s)| ((f.at(t as f64) + a * r as f64 - s) / s).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_token_and_a_request_cost() {
        let f = |tokens: usize| 0.010 + 0.001 * tokens.max(4) as f64;
        let mut passes = Vec::new();
        for requests in [1, 2, 4, 8, 16] {
            for each in [1, 2, 4, 8] {
                let (tokens, noise) = (requests * each, [0.99, 1.01][(requests + each) % 2]);
                passes.push((tokens, requests, noise * (f(tokens) + 0.0007 * requests as f64)));
            }
        }
        let table = CostTable::fit(&passes).unwrap();
        assert!((table.request_seconds() / 0.0007 - 1.0).abs() < 0.3, "{}", table.request_seconds());
        for &(tokens, requests, _) in &passes {
            let true_seconds = f(tokens) + 0.0007 * requests as f64;
            let found = table.round_seconds(tokens, requests);
            assert!((found / true_seconds - 1.0).abs() < 0.03, "{tokens} of {requests}: {found}");
        }
    }

    #[test]
    fn requests_that_cannot_be_told_from_tokens_cost_nothing() {
        let table = CostTable::fit(&[(1, 1, 0.01), (2, 2, 0.011), (8, 8, 0.02)]).unwrap();
        assert_eq!(table.request_seconds(), 0.0);
        assert_eq!(table.points().collect::<Vec<_>>(), [(1, 0.01), (2, 0.011), (8, 0.02)]);
    }

    #[test]
    fn what_is_no_pass_is_refused() {
        assert_eq!(CostTable::fit(&[]).unwrap_err(), CostError::Empty);
        assert_eq!(CostTable::fit(&[(0, 0, 1.0)]).unwrap_err(), CostError::NoTokens);
        let error = CostTable::fit(&[(2, 3, 1.0)]).unwrap_err();
        assert_eq!(error.to_string(), "a target pass of 3 requests has at least 3 tokens, found 2");
        for bad in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            assert!(matches!(CostTable::fit(&[(2, 1, bad)]), Err(CostError::Seconds { tokens: 2, .. })));
        }
    }
}
