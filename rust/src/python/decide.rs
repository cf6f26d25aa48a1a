//! Acceptance and drafting for those who have their own loop.

use std::ops::Range;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rayon::prelude::*;

use crate::accept::{self, AcceptError, Rule, Verdict};
use crate::chain::{self, ChainSettings};
use crate::history::History;
use crate::law::Workspace;
use crate::noise::{Counted, Injected, Noise, RoundNoise};
use crate::params::SamplingParams;
use crate::python::errors::{NumericsError, RequestError};
use crate::python::params::{parse_rule, sampling_params};
use crate::python::runner::HeadTensors;
use crate::python::tensors::Tensor;
use crate::rows::Rows;
use crate::threads;

/// The counted noise of one round: a function of the seed, the absolute `position` of the round's anchor, and
/// the `sample` within n. Use every (seed, position, sample) for one round only.
#[pyclass(frozen, name = "Noise", module = "dspark._core")]
pub struct PyNoise(pub Counted);

#[pymethods]
impl PyNoise {
    #[new]
    #[pyo3(signature = (seed, position, sample = 0))]
    fn new(seed: u64, position: u32, sample: u32) -> Self {
        PyNoise(Counted::new(Noise { seed, sample }, position))
    }
}

/// Uniform numbers in [0, 1) given by the caller, one for each slot, in place of `Noise`: for tests and for
/// loops with a generator of their own. Only the ratio rules use them. The bonus token of a block of L is
/// drawn with `resample[L]`.
#[pyclass(frozen, name = "Uniforms", module = "dspark._core")]
pub struct PyUniforms(Injected);

#[pymethods]
impl PyUniforms {
    #[new]
    #[pyo3(signature = (*, draft = vec![], accept = vec![], resample = vec![]))]
    fn new(draft: Vec<f64>, accept: Vec<f64>, resample: Vec<f64>) -> PyResult<Self> {
        if [&draft, &accept, &resample].into_iter().flatten().any(|u| !(0.0..1.0).contains(u)) {
            return Err(RequestError::new_err("uniform numbers must be in [0, 1)"));
        }
        Ok(PyUniforms(Injected { draft, accept, resample, ..Injected::default() }))
    }
}

/// Either kind of noise.
#[derive(FromPyObject)]
pub enum AnyNoise<'py> {
    /// By seed and position.
    Counted(PyRef<'py, PyNoise>),
    /// Given by the caller.
    Injected(PyRef<'py, PyUniforms>),
}

impl AnyNoise<'_> {
    /// The noise itself; given numbers must suit the rule and be enough for `slots` drafted tokens.
    fn for_block(&self, rule: Rule, slots: usize) -> PyResult<Box<dyn RoundNoise + Send>> {
        match self {
            AnyNoise::Counted(noise) => Ok(Box::new(noise.0)),
            AnyNoise::Injected(_) if rule == Rule::Coupled => {
                Err(RequestError::new_err("the rule \"coupled\" draws Gumbel noise: use Noise, not Uniforms"))
            }
            AnyNoise::Injected(given)
                if given.0.accept.len() < slots || given.0.resample.len() < slots + 1 =>
            {
                Err(RequestError::new_err(format!(
                    "{slots} drafted tokens need {slots} accept and {} resample numbers, found {} and {}",
                    slots + 1,
                    given.0.accept.len(),
                    given.0.resample.len()
                )))
            }
            AnyNoise::Injected(given) => Ok(Box::new(given.0.clone())),
        }
    }
}

/// See `dspark.core.accept_batch`. `params` have all defaults filled in; an error that fails one request
/// takes the place of its result. `history` is `(prompt_ids, output_ids)` of each request.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the arguments of dspark.core.accept_batch")]
pub fn accept_batch(
    py: Python<'_>,
    target_logits: &Bound<'_, PyAny>,
    draft_ids: Vec<Vec<u32>>,
    draft_logits: &Bound<'_, PyAny>,
    rule: &str,
    params: Vec<Bound<'_, PyAny>>,
    noise: Vec<AnyNoise<'_>>,
    history: Vec<(Vec<u32>, Vec<u32>)>,
) -> PyResult<Vec<Py<PyAny>>> {
    let rule = parse_rule(rule)?;
    let target = Tensor::from_py(target_logits, "target_logits")?;
    let drafted: usize = draft_ids.iter().map(Vec::len).sum();
    let draft = match draft_logits.is_none() {
        false => Some(Tensor::from_py(draft_logits, "draft_logits")?),
        true if drafted == 0 || rule == Rule::Coupled => None,
        true => return Err(RequestError::new_err("draft_logits may be None only where nothing was drafted")),
    };
    check_rows("target_logits", &target, drafted + draft_ids.len())?;
    draft.as_ref().map_or(Ok(()), |draft| check_rows("draft_logits", draft, drafted))?;

    let mut blocks = Vec::with_capacity(draft_ids.len());
    let mut start = 0;
    for (i, (((ids, params), noise), (prompt, output))) in
        draft_ids.into_iter().zip(&params).zip(&noise).zip(history).enumerate()
    {
        let sampling = sampling_params(params)?;
        let history = History::after(&prompt, &output);
        let (noise, rows) = (noise.for_block(rule, ids.len())?, start + i..start + i + ids.len() + 1);
        let drafts = start..start + ids.len();
        start += ids.len();
        blocks.push(Block { ids, sampling, history, noise, rows, drafts });
    }
    let is_batch = blocks.len() > 1;
    let verdicts: Vec<_> = py.detach(|| {
        let judge = |block: Block| block.judge(rule, target.rows(), draft.as_ref().map(Tensor::rows));
        if blocks.len() > 1 && threads::are_ours() {
            blocks.into_par_iter().map(judge).collect()
        } else {
            blocks.into_iter().map(judge).collect()
        }
    });
    verdicts
        .into_iter()
        .enumerate()
        .map(|(request, verdict)| match verdict {
            Ok(verdict) => (verdict.accepted, verdict.token).into_py_any(py),
            Err(AcceptError::Numerics(error)) => NumericsError::new_err(error.to_string()).into_py_any(py),
            Err(AcceptError::Shape(message)) if is_batch => {
                Err(RequestError::new_err(format!("request {request}: {message}")))
            }
            Err(AcceptError::Shape(message)) => Err(RequestError::new_err(message)),
        })
        .collect()
}

fn check_rows(name: &str, tensor: &Tensor, expected: usize) -> PyResult<()> {
    if tensor.len() == expected {
        return Ok(());
    }
    Err(RequestError::new_err(format!(
        "{name}: expected {expected} rows for these drafts, found {}",
        tensor.len()
    )))
}

/// One request's part of a batch.
struct Block {
    ids: Vec<u32>,
    sampling: SamplingParams,
    history: History,
    noise: Box<dyn RoundNoise + Send>,
    rows: Range<usize>,
    drafts: Range<usize>,
}

impl Block {
    fn judge(
        mut self,
        rule: Rule,
        target: Rows<'_>,
        draft: Option<Rows<'_>>,
    ) -> Result<Verdict, AcceptError> {
        let (target, history, ws) = (target.slice(self.rows), &mut self.history, &mut Workspace::default());
        let (ids, params, noise) = (&self.ids, &self.sampling, &*self.noise);
        match draft {
            Some(draft) => {
                accept::accept_logits(rule, target, ids, draft.slice(self.drafts), params, history, noise, ws)
            }
            None => accept::accept(rule, target, ids, &[], params, history, noise, ws),
        }
    }
}

/// Drafts one block on the CPU from a backbone's outputs: `base_logits` [gamma, V], `hidden` [gamma, H] (may
/// be `None` if no head reads it) and `heads`, as `dspark.serve.heads.heads_to_core` gives them. Returns the
/// drafted tokens and one confidence for each. `threshold` stops before the first confidence below it.
#[pyfunction]
#[pyo3(signature = (anchor, base_logits, hidden, heads, rule, params, noise, *, limit = None, threshold = None,
                    candidates = None, prompt_ids = vec![], output_ids = vec![]))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python function")]
pub fn draft_chain(
    py: Python<'_>,
    anchor: u32,
    base_logits: &Bound<'_, PyAny>,
    hidden: &Bound<'_, PyAny>,
    heads: &Bound<'_, PyDict>,
    rule: &str,
    params: &Bound<'_, PyAny>,
    noise: PyRef<'_, PyNoise>,
    limit: Option<usize>,
    threshold: Option<f64>,
    candidates: Option<usize>,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
) -> PyResult<(Vec<u32>, Vec<f32>)> {
    let (rule, sampling, noise) = (parse_rule(rule)?, sampling_params(params)?, noise.0);
    let base = Tensor::from_py(base_logits, "base_logits")?;
    let hidden = (!hidden.is_none()).then(|| Tensor::from_py(hidden, "hidden")).transpose()?;
    let heads = HeadTensors::from_py(heads)?;
    let mut history = History::after(&prompt_ids, &output_ids);
    check_heads(&heads.view(), base.rows(), hidden.as_ref().map(Tensor::rows))?;
    let chain = py.detach(|| {
        let settings =
            ChainSettings { limit: limit.unwrap_or(base.len()), threshold, candidates, ..Default::default() };
        chain::draft(
            anchor,
            base.rows(),
            hidden.as_ref().map(Tensor::rows),
            &heads.view(),
            &settings,
            rule,
            &sampling,
            &mut history,
            &noise,
            &mut Workspace::default(),
        )
    });
    Ok((chain.ids, chain.confidence))
}

/// The biased logits [tokens, V] of a chain that drew `tokens[1..]` after the anchor `tokens[0]`; arguments
/// as in `draft_chain`.
#[pyfunction]
pub fn step_logits(
    py: Python<'_>,
    tokens: Vec<u32>,
    base_logits: &Bound<'_, PyAny>,
    hidden: &Bound<'_, PyAny>,
    heads: &Bound<'_, PyDict>,
) -> PyResult<Vec<Vec<f64>>> {
    let base = Tensor::from_py(base_logits, "base_logits")?;
    let hidden = (!hidden.is_none()).then(|| Tensor::from_py(hidden, "hidden")).transpose()?;
    let heads = HeadTensors::from_py(heads)?;
    check_heads(&heads.view(), base.rows(), hidden.as_ref().map(Tensor::rows))?;
    // Detached, because long products wait for a pool whose threads may wait for Python.
    Ok(py.detach(|| {
        chain::step_logits(&tokens, base.rows(), hidden.as_ref().map(Tensor::rows), &heads.view())
    }))
}

fn check_heads(heads: &chain::Heads<'_>, base: Rows<'_>, hidden: Option<Rows<'_>>) -> PyResult<()> {
    heads
        .check(base.cols(), hidden.map(|hidden| hidden.cols()))
        .map_err(|e| RequestError::new_err(e.to_string()))
}
