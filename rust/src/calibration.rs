//! Calibrated confidences: sequential temperature scaling (paper, section 3.2.1, post-hoc calibration).

use thiserror::Error;

use crate::params::SamplingParams;

/// Why a list of temperatures does not calibrate a draft.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum CalibrationError {
    /// One temperature for each position of the block, no more and no fewer.
    #[error("the calibration has {found} temperatures, but the draft's block has {gamma} positions")]
    Length {
        /// Temperatures given.
        found: usize,
        /// Positions of the block.
        gamma: usize,
    },
    /// NaN, infinite, zero or negative.
    #[error("calibration temperature {slot} must be a finite number above 0, found {found}")]
    Temperature {
        /// Position in the block, from 0.
        slot: usize,
        /// What was given.
        found: f64,
    },
    /// Not a probability.
    #[error("confidence {slot} must be from 0 to 1, found {found}")]
    Confidence {
        /// Position in the block, from 0.
        slot: usize,
        /// What was given.
        found: f64,
    },
    /// More positions than the block has, or a number that is not a share.
    #[error("calibration acceptance must be at most {gamma} numbers from 0 to 1, found {found:?}")]
    Acceptance {
        /// What was given.
        found: Vec<f64>,
        /// Positions of the block.
        gamma: usize,
    },
}

/// One temperature for each position of the block; it divides the logit of the confidence there.
///
/// Above 1 it moves confidences towards 1/2 (the head was too sure), below 1 away from it. Confidences are
/// measured against the acceptance under one rule and one sampling regime, so a calibration belongs to the
/// pair that it was fitted for.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    temperatures: Vec<f64>,
    acceptance: Vec<f64>,
}

impl Calibration {
    /// Temperatures for a draft of `gamma` positions.
    ///
    /// # Errors
    /// [`CalibrationError`] unless there are `gamma` temperatures, all finite and above 0.
    pub fn new(temperatures: Vec<f64>, gamma: usize) -> Result<Self, CalibrationError> {
        let found = temperatures.len();
        if found != gamma {
            return Err(CalibrationError::Length { found, gamma });
        }
        match temperatures.iter().position(|t| !(t.is_finite() && *t > 0.0)) {
            Some(slot) => Err(CalibrationError::Temperature { slot, found: temperatures[slot] }),
            None => Ok(Self { temperatures, acceptance: Vec::new() }),
        }
    }

    /// Adds how often each position was kept if the one before it was, in the rounds that this was fitted to,
    /// for as many positions as are known.
    ///
    /// # Errors
    /// [`CalibrationError::Acceptance`] for more positions than the block has, or a number outside of [0, 1].
    pub fn with_acceptance(mut self, acceptance: Vec<f64>) -> Result<Self, CalibrationError> {
        let gamma = self.temperatures.len();
        if acceptance.len() > gamma || acceptance.iter().any(|share| !(0.0..=1.0).contains(share)) {
            return Err(CalibrationError::Acceptance { found: acceptance, gamma });
        }
        self.acceptance = acceptance;
        Ok(self)
    }

    /// See [`Calibration::with_acceptance`]; empty if it is not known.
    pub fn acceptance(&self) -> &[f64] {
        &self.acceptance
    }

    /// The temperatures, one for each position.
    pub fn temperatures(&self) -> &[f64] {
        &self.temperatures
    }

    /// The calibrated logit of position `slot` (from 0, below the block's length).
    pub fn logit(&self, slot: usize, logit: f64) -> f64 {
        logit / self.temperatures[slot]
    }

    /// Calibrates confidences that are probabilities already, in place: sigma(logit(c) / T).
    ///
    /// # Errors
    /// [`CalibrationError`] for more confidences than positions (fewer mean that the block was cut), or for
    /// one that is not a probability.
    pub fn apply(&self, confidences: &mut [f32]) -> Result<(), CalibrationError> {
        let (found, gamma) = (self.temperatures.len(), confidences.len());
        if gamma > found {
            return Err(CalibrationError::Length { found, gamma });
        }
        for (slot, c) in confidences.iter_mut().enumerate() {
            let p = f64::from(*c);
            if !(0.0..=1.0).contains(&p) {
                return Err(CalibrationError::Confidence { slot, found: p });
            }
            *c = sigmoid(self.logit(slot, (p / (1.0 - p)).ln())) as f32;
        }
        Ok(())
    }
}

/// The sampling that a calibration was fitted under; truncation as in [`SamplingParams`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Regime {
    /// 0 or above.
    pub temperature: f64,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f64,
    /// 0 keeps all.
    pub min_p: f64,
}

impl Regime {
    /// How far a request's sampling is from this: first by temperature, then by whether it truncates
    /// differently. Temperatures above 0 differ by their ratio; acceptance at temperature 0 cannot be
    /// compared with that above it (`None`).
    fn distance(&self, params: &SamplingParams) -> Option<(f64, bool)> {
        match (params.temperature > 0.0, self.temperature > 0.0) {
            (true, true) => Some((
                (self.temperature / params.temperature).ln().abs(),
                (self.top_k, self.top_p, self.min_p) != (params.top_k, params.top_p, params.min_p),
            )),
            (false, false) => Some((0.0, false)),
            _ => None,
        }
    }
}

/// The calibration for requests with these parameters: the entry for all requests (`None`) if there is one,
/// else that of the nearest [`Regime`], the first of equally near ones. Requests at temperature 0 need an
/// entry for temperature 0, others one above it; without one they have none.
pub fn fitting<'a>(
    entries: &'a [(Option<Regime>, Calibration)],
    params: &SamplingParams,
) -> Option<&'a Calibration> {
    let distance = |regime: &Option<Regime>| match regime {
        None => Some((-1.0, false)),
        Some(regime) => regime.distance(params),
    };
    let near = entries.iter().filter_map(|(regime, calibration)| Some((distance(regime)?, calibration)));
    near.min_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(_, calibration)| calibration)
}

/// The logistic function, without overflow at either end.
#[inline]
pub fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        (1.0 + (-x).exp()).recip()
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_another_block_is_refused() {
        for found in [0, 6, 8] {
            let error = Calibration::new(vec![1.0; found], 7).unwrap_err();
            assert_eq!(error, CalibrationError::Length { found, gamma: 7 });
        }
        let error = Calibration::new(vec![1.0; 8], 7).unwrap_err();
        let expected = "the calibration has 8 temperatures, but the draft's block has 7 positions";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_temperature_that_is_none_is_refused() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = Calibration::new(vec![1.0, bad], 2).unwrap_err();
            assert!(matches!(error, CalibrationError::Temperature { slot: 1, .. }), "{bad}");
        }
    }

    #[test]
    fn an_acceptance_that_is_none_is_refused() {
        let fitted = || Calibration::new(vec![1.0; 2], 2).unwrap();
        assert_eq!(fitted().with_acceptance(vec![0.5]).unwrap().acceptance(), [0.5]);
        for bad in [vec![0.5; 3], vec![1.1], vec![f64::NAN]] {
            let error = fitted().with_acceptance(bad).unwrap_err();
            assert!(error.to_string().starts_with("calibration acceptance must be at most 2 numbers"));
        }
    }

    #[test]
    fn a_temperature_divides_the_logit_of_its_own_position() {
        let calibration = Calibration::new(vec![2.0, 0.5, 1.0], 3).unwrap();
        assert_eq!([0, 1, 2].map(|k| calibration.logit(k, 1.0)), [0.5, 2.0, 1.0]);
        let mut confidences = [0.9f32, 0.8, 0.7];
        calibration.apply(&mut confidences).unwrap();
        // sqrt(odds 9) = 3, odds 4 squared = 16.
        for (found, expected) in confidences.iter().zip([3.0 / 4.0, 16.0 / 17.0, 0.7]) {
            assert!((found - expected as f32).abs() < 1e-6);
        }
    }

    fn sampling(temperature: f64, top_p: f64) -> SamplingParams {
        SamplingParams { temperature, top_p, ..SamplingParams::default() }
    }

    fn entry(regime: Option<(f64, f64)>, t: f64) -> (Option<Regime>, Calibration) {
        let regime = regime.map(|(temperature, top_p)| Regime { temperature, top_k: 0, top_p, min_p: 0.0 });
        (regime, Calibration::new(vec![t], 1).unwrap())
    }

    fn chosen(entries: &[(Option<Regime>, Calibration)], params: &SamplingParams) -> Option<f64> {
        fitting(entries, params).map(|calibration| calibration.temperatures()[0])
    }

    #[test]
    fn a_request_takes_the_calibration_of_the_nearest_temperature() {
        let kept = [entry(Some((1.0, 1.0)), 1.0), entry(Some((0.0, 1.0)), 2.0), entry(Some((0.4, 1.0)), 3.0)];
        let found = [0.0, 0.1, 0.6, 0.65, 1.0, 7.0].map(|t| chosen(&kept, &sampling(t, 1.0)));
        assert_eq!(found, [2.0, 3.0, 3.0, 1.0, 1.0, 1.0].map(Some));
        assert_eq!(chosen(&kept[1..2], &sampling(0.7, 1.0)), None);
        assert_eq!(chosen(&kept[..1], &sampling(0.0, 1.0)), None);
        let for_all = [entry(Some((0.7, 1.0)), 1.0), entry(None, 5.0)];
        assert_eq!(chosen(&for_all, &sampling(0.7, 1.0)), Some(5.0));
        assert_eq!(chosen(&[], &sampling(0.7, 1.0)), None);
    }

    #[test]
    fn of_a_temperature_it_takes_that_of_its_own_truncation() {
        let kept = [entry(Some((0.7, 0.8)), 1.0), entry(Some((0.7, 1.0)), 2.0), entry(Some((0.9, 0.5)), 3.0)];
        for (top_p, expected) in [(0.8, 1.0), (1.0, 2.0), (0.5, 1.0)] {
            assert_eq!(chosen(&kept, &sampling(0.7, top_p)), Some(expected), "{top_p}");
        }
        // At temperature 0 nothing is truncated.
        assert_eq!(chosen(&[entry(Some((0.0, 1.0)), 4.0)], &sampling(0.0, 0.3)), Some(4.0));
    }

    #[test]
    fn certainty_stays_certain_and_too_many_confidences_are_refused() {
        let calibration = Calibration::new(vec![3.0, 3.0], 2).unwrap();
        let mut confidences = [0.0f32, 1.0];
        calibration.apply(&mut confidences).unwrap();
        assert_eq!(confidences, [0.0, 1.0]);
        assert!(calibration.apply(&mut [0.5; 3]).is_err());
        for bad in [1.5, -0.1, f32::NAN] {
            assert!(calibration.apply(&mut [bad]).is_err());
        }
    }

    #[test]
    fn sigmoid_reaches_both_ends_without_nan() {
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(800.0), 1.0);
        assert_eq!(sigmoid(-800.0), 0.0);
        assert!((sigmoid(-40.0) / (-40f64).exp() - 1.0).abs() < 1e-12);
    }
}
