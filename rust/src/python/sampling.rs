//! Plans for sampling by kernels: for the runner, and for tests that launch the kernels themselves.
//!
//! A plan has a `table` to be copied to the device, and needs `scratch` bytes of the device's memory for the
//! kernels to write to; the outcome is the part `result = (start, bytes)` of that memory. Both are aligned to
//! 16 bytes and stay until the outcome was read.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::chain::ChainSettings;
use crate::cuda::sampling::{ChainPlan, DeviceDrafts, Launch, Verify};
use crate::engine::{Block, ChainBlock};
use crate::history::History;
use crate::noise::Counted;
use crate::params::SamplingParams;
use crate::python::cuda::PyKernels;
use crate::python::decide::PyNoise;
use crate::python::device_heads::DeviceHeadTensors;
use crate::python::errors::{NumericsError, RequestError};
use crate::python::params::{parse_rule, sampling_params};
use crate::python::tensors::Tensor;

/// One launch: kernel, grid, threads in a block, and the bytes of its parameters.
type PyLaunch<'py> = (&'static str, (u32, u32, u32), u32, Bound<'py, PyBytes>);

/// Launches as Python passes them on, with at most `threads` threads in a block.
fn passed_on<'py>(py: Python<'py>, launches: &[Launch], threads: Option<u32>) -> Vec<PyLaunch<'py>> {
    let pass_on = |launch: &Launch| {
        let [x, y, z] = launch.grid;
        let block = threads.map_or(launch.block, |threads| launch.block.min(threads));
        (launch.entry, (x, y, z), block, PyBytes::new(py, launch.args.bytes()))
    };
    launches.iter().map(pass_on).collect()
}

fn launch(kernels: &PyKernels, launches: &[Launch], stream: u64) -> PyResult<()> {
    for Launch { entry, grid, block, args } in launches {
        kernels.device().launch(entry, *grid, *block, 0, stream, args)?;
    }
    Ok(())
}

/// What a request of a plan owns.
struct Asked {
    params: SamplingParams,
    history: History,
    noise: Counted,
}

/// Reads one entry for each request: parameters with all defaults filled in, noise, `(prompt_ids,
/// output_ids)`.
fn asked(
    params: &[Bound<'_, PyAny>],
    noise: &[PyRef<'_, PyNoise>],
    history: Vec<(Vec<u32>, Vec<u32>)>,
) -> PyResult<Vec<Asked>> {
    if params.len() != noise.len() || params.len() != history.len() {
        return Err(RequestError::new_err("params, noise and history need one entry for each request"));
    }
    params
        .iter()
        .zip(noise)
        .zip(history)
        .map(|((params, noise), (prompt, output))| {
            let history = History::after(&prompt, &output);
            Ok(Asked { params: sampling_params(params)?, history, noise: noise.0 })
        })
        .collect()
}

/// The acceptance of a batch by kernels. Arguments as for `accept_batch`, but with tensors of any device;
/// `draft_logits` may be `None` if the rule reads none, or `(plan, table, scratch, first_rows)` of the
/// `ChainPlan` that drew the tokens: the addresses it ran with, and the first row of each request's laws.
#[pyclass(frozen, name = "VerifyPlan", module = "dspark._core")]
pub struct PyVerify(pub Verify);

/// Where a plan's draft laws come from.
#[derive(FromPyObject)]
enum DraftsOf<'py> {
    Chained(PyRef<'py, PyChain>, u64, u64, Vec<usize>),
    Logits(Bound<'py, PyAny>),
}

#[pymethods]
impl PyVerify {
    #[new]
    fn new(
        target_logits: &Bound<'_, PyAny>,
        draft_ids: Vec<Vec<u32>>,
        draft_logits: Option<DraftsOf<'_>>,
        rule: &str,
        params: Vec<Bound<'_, PyAny>>,
        noise: Vec<PyRef<'_, PyNoise>>,
        history: Vec<(Vec<u32>, Vec<u32>)>,
    ) -> PyResult<Self> {
        let rule = parse_rule(rule)?;
        let target = Tensor::anywhere(target_logits, "target_logits")?.device_rows();
        let asked = asked(&params, &noise, history)?;
        if draft_ids.len() != asked.len() {
            return Err(RequestError::new_err("draft_ids needs one entry for each request"));
        }
        let mut firsts = Vec::with_capacity(asked.len());
        let mut blocks = Vec::with_capacity(asked.len());
        let (mut row, mut draft) = (0, 0);
        for (i, (ids, Asked { params, history, noise })) in draft_ids.iter().zip(&asked).enumerate() {
            let noise = *noise;
            blocks.push(Block { request: i as u64, first_row: row, ids, params, history, noise });
            firsts.push(draft);
            (row, draft) = (row + ids.len() + 1, draft + ids.len());
        }
        let drafts = match draft_logits {
            None => DeviceDrafts::None,
            Some(DraftsOf::Logits(logits)) => {
                DeviceDrafts::Logits(Tensor::anywhere(&logits, "draft_logits")?.device_rows())
            }
            Some(DraftsOf::Chained(chain, table, scratch, rows)) => {
                firsts = rows;
                DeviceDrafts::Chained(chain.plan.laws(table, scratch))
            }
        };
        let plan = Verify::new(rule, &target, drafts, &blocks, &firsts);
        plan.map(PyVerify).map_err(|error| RequestError::new_err(error.to_string()))
    }

    #[getter]
    fn table<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.table())
    }

    #[getter]
    fn scratch(&self) -> usize {
        self.0.scratch()
    }

    #[getter]
    fn result(&self) -> (usize, usize) {
        self.0.result()
    }

    /// The launches over a table and scratch memory at these addresses: (kernel, grid, threads, parameters).
    #[pyo3(signature = (table, scratch, threads = None))]
    fn launches<'py>(
        &self,
        py: Python<'py>,
        table: u64,
        scratch: u64,
        threads: Option<u32>,
    ) -> Vec<PyLaunch<'py>> {
        passed_on(py, &self.0.launches(table, scratch), threads)
    }

    /// Launches the kernels on a stream, and returns at once.
    fn run(&self, kernels: PyRef<'_, PyKernels>, table: u64, scratch: u64, stream: u64) -> PyResult<()> {
        launch(&kernels, &self.0.launches(table, scratch), stream)
    }

    /// For each request how many drafted tokens stay, the token after them, and whether a margin was below
    /// the rounding bound.
    fn read(&self, result: &[u8]) -> PyResult<Vec<(usize, u32, bool)>> {
        check_size(result, self.0.result().1)?;
        let outcomes = self.0.read(result).into_iter();
        outcomes
            .map(|outcome| match outcome {
                Ok(judged) => Ok((judged.verdict.accepted, judged.verdict.token, judged.is_close)),
                Err(error) => Err(NumericsError::new_err(error.to_string())),
            })
            .collect()
    }
}

fn check_size(result: &[u8], expected: usize) -> PyResult<()> {
    if result.len() == expected {
        return Ok(());
    }
    Err(RequestError::new_err(format!("the outcome has {expected} bytes, found {}", result.len())))
}

/// Markov chains of a batch by kernels: `base_logits` [requests * gamma, V] and `hidden`, as the draft pass
/// leaves them, and `heads` as `dspark.serve.heads.heads_to_device` gives them. At most `limit` tokens are
/// drafted, and none from the first confidence below `threshold` on.
#[pyclass(frozen, name = "ChainPlan", module = "dspark._core")]
pub struct PyChain {
    pub plan: ChainPlan,
    anchors: Vec<u32>,
    asked: Vec<Asked>,
    limit: usize,
    threshold: Option<f64>,
}

impl PyChain {
    /// A plan for the engine, which reads the outcome itself.
    pub fn of(plan: ChainPlan) -> Self {
        PyChain { plan, anchors: vec![], asked: vec![], limit: 0, threshold: None }
    }
}

fn blocks<'a>(
    anchors: &'a [u32],
    asked: &'a [Asked],
    limit: usize,
    threshold: Option<f64>,
) -> Vec<ChainBlock<'a>> {
    let block = |(index, (&anchor, asked)): (usize, (&u32, &'a Asked))| ChainBlock {
        request: index as u64,
        index,
        anchor,
        params: &asked.params,
        history: &asked.history,
        noise: asked.noise,
        settings: ChainSettings { limit, threshold, ..ChainSettings::default() },
    };
    anchors.iter().zip(asked).enumerate().map(block).collect()
}

#[pymethods]
impl PyChain {
    #[new]
    #[pyo3(signature = (anchors, base_logits, hidden, heads, rule, params, noise, history, *, gamma, limit = None, threshold = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python constructor")]
    fn new(
        anchors: Vec<u32>,
        base_logits: &Bound<'_, PyAny>,
        hidden: &Bound<'_, PyAny>,
        heads: &Bound<'_, PyDict>,
        rule: &str,
        params: Vec<Bound<'_, PyAny>>,
        noise: Vec<PyRef<'_, PyNoise>>,
        history: Vec<(Vec<u32>, Vec<u32>)>,
        gamma: usize,
        limit: Option<usize>,
        threshold: Option<f64>,
    ) -> PyResult<Self> {
        let rule = parse_rule(rule)?;
        let base = Tensor::anywhere(base_logits, "base_logits")?.device_rows();
        let hidden = (!hidden.is_none()).then(|| Tensor::anywhere(hidden, "hidden")).transpose()?;
        let hidden = hidden.map(|hidden| hidden.device_rows());
        let heads = DeviceHeadTensors::from_py(heads)?;
        let asked = asked(&params, &noise, history)?;
        let limit = limit.unwrap_or(gamma);
        let plan = ChainPlan::new(
            rule,
            gamma,
            &base,
            hidden.as_ref(),
            &heads.view(),
            &blocks(&anchors, &asked, limit, threshold),
        );
        let plan = plan.map_err(|error| RequestError::new_err(error.to_string()))?;
        Ok(PyChain { plan, anchors, asked, limit, threshold })
    }

    #[getter]
    fn table<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.plan.table())
    }

    #[getter]
    fn scratch(&self) -> usize {
        self.plan.scratch()
    }

    #[getter]
    fn result(&self) -> (usize, usize) {
        self.plan.result()
    }

    /// As for `VerifyPlan`.
    #[pyo3(signature = (table, scratch, threads = None))]
    fn launches<'py>(
        &self,
        py: Python<'py>,
        table: u64,
        scratch: u64,
        threads: Option<u32>,
    ) -> Vec<PyLaunch<'py>> {
        passed_on(py, &self.plan.launches(table, scratch), threads)
    }

    /// As for `VerifyPlan`.
    fn run(&self, kernels: PyRef<'_, PyKernels>, table: u64, scratch: u64, stream: u64) -> PyResult<()> {
        launch(&kernels, &self.plan.launches(table, scratch), stream)
    }

    /// For each request its drafted tokens and one confidence for each.
    fn read(&self, result: &[u8]) -> PyResult<Vec<(Vec<u32>, Vec<f32>)>> {
        check_size(result, self.plan.result().1)?;
        let blocks = blocks(&self.anchors, &self.asked, self.limit, self.threshold);
        let chains = self.plan.read(result, &blocks).into_iter();
        Ok(chains.map(|chain| (chain.ids, chain.confidence)).collect())
    }
}
