//! Plans, cost tables and calibration for those who have their own loop.

use pyo3::prelude::*;

use crate::calibration::Calibration;
use crate::python::errors::ConfigError;
use crate::python::params::parse_rule;
use crate::schedule::plan::{self, Draft, Survivals};
use crate::schedule::{CostTable, Foresight};

fn refused(error: impl std::fmt::Display) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// Seconds of a round by what it does.
///
/// `points` are measured target passes, `(tokens, seconds)`; noise is smoothed so that more tokens never cost
/// less. `draft` are draft passes, `(drafting requests, seconds)`, smoothed alike; without points drafting
/// counts as free. `round_seconds` is what a round costs beside the passes, `request_seconds` what each
/// request adds to a target pass. Raises `ConfigError` for an empty table, a repeated width, or a time that
/// is not above 0.
#[pyclass(frozen, name = "CostTable", module = "dspark._core")]
pub struct PyCostTable(pub(super) CostTable);

#[pymethods]
impl PyCostTable {
    #[new]
    #[pyo3(signature = (points, *, round_seconds = 0.0, request_seconds = 0.0, draft = vec![]))]
    fn new(
        points: Vec<(usize, f64)>,
        round_seconds: f64,
        request_seconds: f64,
        draft: Vec<(usize, f64)>,
    ) -> PyResult<Self> {
        CostTable::new(&points)
            .and_then(|table| table.with_request_seconds(request_seconds)?.with_fixed_seconds(round_seconds))
            .and_then(|table| table.with_draft(&draft))
            .map(PyCostTable)
            .map_err(refused)
    }

    /// A table from timed target passes `(tokens, requests, seconds)`: f(tokens) + a * requests by least
    /// squares of the relative errors, with f non-decreasing and a at least 0. `draft` as in the constructor;
    /// `token_seconds` is the chain's time for each drafted token, `round_seconds` the rest of a round.
    #[staticmethod]
    #[pyo3(signature = (passes, *, draft = vec![], token_seconds = 0.0, round_seconds = 0.0))]
    fn fit(
        passes: Vec<(usize, usize, f64)>,
        draft: Vec<(usize, f64)>,
        token_seconds: f64,
        round_seconds: f64,
    ) -> PyResult<Self> {
        CostTable::fit(&passes)
            .and_then(|table| table.with_draft(&draft)?.with_token_seconds(token_seconds))
            .and_then(|table| table.with_fixed_seconds(round_seconds))
            .map(PyCostTable)
            .map_err(refused)
    }

    /// Seconds of a pass over `tokens` tokens of `requests` requests.
    #[pyo3(signature = (tokens, requests = 0))]
    fn seconds(&self, tokens: usize, requests: usize) -> f64 {
        self.0.pass_seconds(tokens) + self.0.request_seconds() * requests as f64
    }

    /// SPS(B) of the paper (section 3.2.2): passes per second.
    fn steps_per_second(&self, tokens: usize) -> f64 {
        self.0.steps_per_second(tokens)
    }
}

/// Sequential temperature scaling (paper, section 3.2.1): one temperature per position of the block, dividing
/// the logit of the confidence there. Raises `ConfigError` for a table of another length or a temperature not
/// above 0.
#[pyclass(frozen, name = "Calibration", module = "dspark._core")]
pub struct PyCalibration(pub(super) Calibration);

#[pymethods]
impl PyCalibration {
    #[new]
    #[pyo3(signature = (temperatures, block_size, acceptance = vec![]))]
    fn new(temperatures: Vec<f64>, block_size: usize, acceptance: Vec<f64>) -> PyResult<Self> {
        let calibration = Calibration::new(temperatures, block_size).map_err(refused)?;
        calibration.with_acceptance(acceptance).map(PyCalibration).map_err(refused)
    }

    /// The temperatures.
    #[getter]
    fn temperatures(&self) -> Vec<f64> {
        self.0.temperatures().to_vec()
    }

    /// How often each position was kept if the one before it was, as far as it is known.
    #[getter]
    fn acceptance(&self) -> Vec<f64> {
        self.0.acceptance().to_vec()
    }

    /// The calibrated confidences of a block or its beginning.
    fn apply(&self, mut confidences: Vec<f32>) -> PyResult<Vec<f32>> {
        self.0.apply(&mut confidences).map_err(refused)?;
        Ok(confidences)
    }
}

/// Verify lengths of a batch that maximise the expected throughput (paper, Algorithm 1).
///
/// `confidences[r][k]` is c_k of request r; `limits[r]` bounds its length. By default the search stops at the
/// first drop, which is sound under every rule. `foresight=True` searches the whole list; it needs
/// `rule="coupled"` or `greedy=True`, because elsewhere it changes the distribution of the output (paper,
/// Appendix A), and raises `ConfigError` otherwise.
#[pyfunction]
#[pyo3(name = "plan", signature = (confidences, cost_table, *, limits = None, foresight = false, rule = "rejection", greedy = false))]
pub fn plan_lengths(
    confidences: Vec<Vec<f32>>,
    cost_table: PyRef<'_, PyCostTable>,
    limits: Option<Vec<usize>>,
    foresight: bool,
    rule: &str,
    greedy: bool,
) -> PyResult<Vec<usize>> {
    if limits.as_ref().is_some_and(|limits| limits.len() != confidences.len()) {
        return Err(ConfigError::new_err("plan: limits must have one entry for each request"));
    }
    let drafts: Vec<_> = confidences
        .iter()
        .enumerate()
        .map(|(r, confidences)| {
            let limit = limits.as_ref().map_or(usize::MAX, |limits| limits[r]);
            Draft { drafted: confidences.len(), limit, confidences }
        })
        .collect();
    let survivals = Survivals::new(&drafts).map_err(refused)?;
    if !foresight {
        return Ok(plan::causal(&survivals, &cost_table.0));
    }
    let proof = Foresight::allowed(parse_rule(rule)?, greedy).ok_or_else(|| {
        ConfigError::new_err(format!(
            "a plan with foresight is not lossless under \"{rule}\" above temperature 0"
        ))
    })?;
    Ok(plan::global(&survivals, &cost_table.0, proof))
}

/// Leading tokens to verify: all before the first confidence below `threshold`, a probability.
#[pyfunction]
pub fn threshold_prefix(confidences: Vec<f32>, threshold: f64) -> PyResult<usize> {
    if !(0.0..=1.0).contains(&threshold) {
        return Err(ConfigError::new_err(format!("threshold must be between 0 and 1, not {threshold}")));
    }
    Ok(crate::schedule::threshold_prefix(&confidences, threshold))
}
