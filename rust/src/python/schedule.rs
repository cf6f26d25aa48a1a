//! Plans, cost tables and calibration for people who have their own loop.

use pyo3::prelude::*;

use crate::calibration::Calibration;
use crate::python::errors::ConfigError;
use crate::python::params::parse_rule;
use crate::schedule::plan::{self, Draft, Survivals};
use crate::schedule::{CostTable, Foresight};

fn refused(error: impl std::fmt::Display) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// Seconds of a target pass by the number of tokens in it.
///
/// `points` are measured `(tokens, seconds)`; noise is smoothed so that more tokens never cost less.
/// `round_seconds` is what a round costs beside the pass (drafting, say), `request_seconds` what each request
/// adds to it. Raises `ConfigError` for an empty table, a repeated width, or a time that is not above 0.
#[pyclass(frozen, name = "CostTable", module = "dspark._core")]
pub struct PyCostTable(pub(super) CostTable);

#[pymethods]
impl PyCostTable {
    #[new]
    #[pyo3(signature = (points, *, round_seconds = 0.0, request_seconds = 0.0))]
    fn new(points: Vec<(usize, f64)>, round_seconds: f64, request_seconds: f64) -> PyResult<Self> {
        let table = CostTable::new(&points).and_then(|table| table.with_round_seconds(round_seconds));
        table.and_then(|table| table.with_request_seconds(request_seconds)).map(PyCostTable).map_err(refused)
    }

    /// The smoothed points.
    #[getter]
    fn points(&self) -> Vec<(usize, f64)> {
        self.0.points().collect()
    }

    /// Seconds of a pass over `tokens` tokens.
    fn seconds(&self, tokens: usize) -> f64 {
        self.0.pass_seconds(tokens)
    }

    /// SPS(B) of the paper (section 3.2.2): passes per second.
    fn steps_per_second(&self, tokens: usize) -> f64 {
        self.0.steps_per_second(tokens)
    }
}

/// Sequential temperature scaling (paper, section 3.2.1): one temperature per position of the block, dividing the
/// logit of the confidence there. Raises `ConfigError` for a table of another length or a temperature not above 0.
#[pyclass(frozen, name = "Calibration", module = "dspark._core")]
pub struct PyCalibration(pub(super) Calibration);

#[pymethods]
impl PyCalibration {
    #[new]
    fn new(temperatures: Vec<f64>, block_size: usize) -> PyResult<Self> {
        Calibration::new(temperatures, block_size).map(PyCalibration).map_err(refused)
    }

    /// The temperatures.
    #[getter]
    fn temperatures(&self) -> Vec<f64> {
        self.0.temperatures().to_vec()
    }

    /// Calibrated confidences of a block or its beginning.
    fn apply(&self, mut confidences: Vec<f32>) -> PyResult<Vec<f32>> {
        self.0.apply(&mut confidences).map_err(refused)?;
        Ok(confidences)
    }
}

/// Verify lengths of a batch that maximise the expected throughput (paper, Algorithm 1).
///
/// `confidences[r][k]` is c_k of request r; `limits[r]` bounds its length. By default the search stops at the first
/// drop, which is sound under every rule. `foresight=True` searches the whole list; it needs `rule="coupled"` or
/// `greedy=True`, because elsewhere it changes the distribution of the output (paper, Appendix A), and raises
/// `ConfigError` otherwise.
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

/// Leading tokens to verify: all before the first confidence below `threshold`.
#[pyfunction]
pub fn threshold_prefix(confidences: Vec<f32>, threshold: f64) -> usize {
    crate::schedule::threshold_prefix(&confidences, threshold)
}
