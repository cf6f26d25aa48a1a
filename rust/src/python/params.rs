//! Options and sampling parameters as Python gives them.

use std::num::NonZeroUsize;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::accept::Rule;
use crate::params::SamplingParams;
use crate::python::errors::{ConfigError, RequestError};
use crate::schedule::{CostTable, Policy};

/// The acceptance rule of that name.
pub fn parse_rule(name: &str) -> PyResult<Rule> {
    match name {
        "rejection" => Ok(Rule::Rejection),
        "block" => Ok(Rule::Block),
        "coupled" => Ok(Rule::Coupled),
        _ => Err(ConfigError::new_err(format!(
            "acceptance must be \"rejection\", \"block\" or \"coupled\", not {name:?}"
        ))),
    }
}

/// The policy of that name, with what it needs; `lag` is for "throughput" alone, in rounds.
pub fn parse_policy(
    name: &str,
    threshold: Option<f64>,
    cost: Option<CostTable>,
    lag: Option<usize>,
) -> PyResult<Policy> {
    let lag = lag
        .map(|rounds| {
            NonZeroUsize::new(rounds).filter(|_| name == "throughput").ok_or_else(|| {
                ConfigError::new_err("budget_lag is for policy \"throughput\" and must be at least 1")
            })
        })
        .transpose()?;
    match (name, threshold, cost) {
        ("fixed", _, _) => Ok(Policy::Fixed),
        ("threshold", Some(threshold), _) if (0.0..=1.0).contains(&threshold) => {
            Ok(Policy::Threshold(threshold))
        }
        ("threshold", found, _) => Err(ConfigError::new_err(format!(
            "policy \"threshold\" needs a confidence_threshold between 0 and 1, found {found:?}"
        ))),
        ("throughput", _, Some(cost)) => Ok(Policy::Throughput { cost, lag }),
        ("throughput", _, None) => Err(ConfigError::new_err(
            "policy \"throughput\" needs a cost table (cost_table=CostTable([(tokens, seconds), ...]))",
        )),
        _ => Err(ConfigError::new_err(format!(
            "policy must be \"fixed\", \"threshold\" or \"throughput\", not {name:?}"
        ))),
    }
}

/// The error for a head of a kind that `dspark.draft.markov` does not make.
pub fn unknown_head(kind: &str) -> PyErr {
    ConfigError::new_err(format!("a Markov head is \"vanilla\", \"gated\" or \"rnn\", not {kind:?}"))
}

/// Reads a `dspark.SamplingParams` with all defaults filled in.
pub fn sampling_params(object: &Bound<'_, PyAny>) -> PyResult<SamplingParams> {
    let params = SamplingParams {
        temperature: number(object, "temperature")?,
        top_k: number::<i64>(object, "top_k")?.max(0) as u32,
        top_p: number(object, "top_p")?,
        min_p: number(object, "min_p")?,
        repetition_penalty: number(object, "repetition_penalty")?,
        presence_penalty: number(object, "presence_penalty")?,
        frequency_penalty: number(object, "frequency_penalty")?,
        logit_bias: logit_bias(object)?,
        min_tokens: number(object, "min_tokens")?,
        stop_token_ids: number::<Option<_>>(object, "stop_token_ids")?.unwrap_or_default(),
        logprobs: number(object, "logprobs")?,
    };
    params.check().map_err(|error| RequestError::new_err(error.to_string()))?;
    Ok(params)
}

/// The number of that name, or a `RequestError`.
pub fn number<T: for<'a, 'py> FromPyObject<'a, 'py>>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<T> {
    let value = object.getattr(name)?;
    value.extract().map_err(|_| RequestError::new_err(format!("{name} has no usable value: {value}")))
}

fn logit_bias(object: &Bound<'_, PyAny>) -> PyResult<Vec<(u32, f64)>> {
    let bias = object.getattr("logit_bias")?;
    if bias.is_none() {
        return Ok(Vec::new());
    }
    let dict = PyDict::new(object.py());
    dict.update(bias.cast()?)?;
    dict.iter().map(|(token, bias)| Ok((token.extract()?, bias.extract()?))).collect()
}
