//! Chains and acceptance by kernels: plans are made here and run by Python's `Sampler`, in torch's memory.

use std::collections::HashMap;

use pyo3::PyClass;
use pyo3::prelude::*;

use crate::accept::{NumericsError, Rule};
use crate::chain::Chain;
use crate::cuda::sampling::{self, ChainPlan, DeviceDrafts, DraftLaws, Verify};
use crate::engine::{Block, ChainBlock, DraftPass, Judgement, RequestId, RunnerError};
use crate::params::SamplingParams;
use crate::python::device_heads::DeviceHeadTensors;
use crate::python::errors::{RequestError, log};
use crate::python::sampling::{PyChain, PyVerify};
use crate::python::tensors::Tensor;

/// A `dspark.kernels.sampler.Sampler`.
pub struct Sampler {
    object: Py<PyAny>,
    heads: DeviceHeadTensors,
    /// What the last chains left.
    drafted: Option<Drafted>,
}

/// Laws of drafted tokens in the device's memory.
struct Drafted {
    laws: DraftLaws,
    /// The first row of each request's laws.
    first_rows: HashMap<RequestId, usize>,
    /// Keeps the memory alive.
    _memory: Py<PyAny>,
}

/// The outcome's bytes, the addresses of table and scratch memory, and the object that keeps these alive.
type Run = (Vec<u8>, u64, u64, Py<PyAny>);

impl Sampler {
    /// Wraps a Python object with `heads`, `device` and `run(plan)`.
    pub fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let heads = object.getattr("heads")?;
        let heads = DeviceHeadTensors::from_py(heads.cast()?)?;
        let sampler = Sampler { object: object.clone().unbind(), heads, drafted: None };
        for owner in sampler.heads.owners() {
            sampler.check_device("a head of the draft", owner.bind(object.py()))?;
        }
        Ok(sampler)
    }

    /// Whether it decides for such a request.
    pub fn serves(&self, rule: Rule, params: &SamplingParams) -> bool {
        sampling::serves(rule, params).is_ok()
    }

    /// See `ModelRunner::chain`.
    pub fn chain(
        &mut self,
        rule: Rule,
        gamma: usize,
        pass: &DraftPass<Tensor>,
        blocks: &[ChainBlock<'_>],
    ) -> Result<Vec<Chain>, RunnerError> {
        self.drafted = None;
        self.check_devices([("draft logits", Some(&pass.base)), ("draft states", pass.hidden.as_ref())])?;
        let hidden = pass.hidden.as_ref().map(Tensor::device_rows);
        let heads = self.heads.view();
        let plan = ChainPlan::new(rule, gamma, &pass.base.device_rows(), hidden.as_ref(), &heads, blocks);
        let plan = plan.map_err(|error| RunnerError(error.to_string()))?;
        let (plan, (outcome, table, scratch, memory)) = self.run(PyChain::of(plan))?;
        let first_rows = blocks.iter().enumerate().map(|(i, block)| (block.request, i * gamma)).collect();
        let plan = &plan.get().plan;
        self.drafted = Some(Drafted { laws: plan.laws(table, scratch), first_rows, _memory: memory });
        Ok(plan.read(&outcome, blocks))
    }

    /// See `ModelRunner::judge`.
    pub fn judge(
        &self,
        rule: Rule,
        logits: &Tensor,
        blocks: &[Block<'_>],
    ) -> Result<Vec<Result<Judgement, NumericsError>>, RunnerError> {
        self.check_devices([("target logits", Some(logits))])?;
        let first = |block: &Block<'_>| {
            let known = self.drafted.as_ref().and_then(|drafted| drafted.first_rows.get(&block.request));
            known.copied().unwrap_or_default()
        };
        let firsts: Vec<_> = blocks.iter().map(first).collect();
        let drafts =
            self.drafted.as_ref().map_or(DeviceDrafts::None, |drafted| DeviceDrafts::Chained(drafted.laws));
        let plan = Verify::new(rule, &logits.device_rows(), drafts, blocks, &firsts);
        let plan = plan.map_err(|error| RunnerError(error.to_string()))?;
        let (plan, (outcome, ..)) = self.run(PyVerify(plan))?;
        Ok(plan.get().0.read(&outcome))
    }

    /// Refuses rows on another device than the kernels run on, where their addresses mean nothing.
    fn check_devices<const N: usize>(&self, rows: [(&str, Option<&Tensor>); N]) -> Result<(), RunnerError> {
        Python::attach(|py| {
            let given = rows.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
            given.into_iter().try_for_each(|(name, tensor)| self.check_device(name, tensor.owner().bind(py)))
        })
        .map_err(|error: PyErr| RunnerError(error.to_string()))
    }

    fn check_device(&self, name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (expected, found) = (self.object.bind(tensor.py()).getattr("device")?, tensor.getattr("device")?);
        if expected.eq(&found)? {
            return Ok(());
        }
        Err(RequestError::new_err(format!(
            "{name}: the kernels run on {expected}, and this tensor is on {found}"
        )))
    }

    /// Lets Python run a plan.
    fn run<T: PyClass + Into<PyClassInitializer<T>>>(&self, plan: T) -> Result<(Py<T>, Run), RunnerError> {
        Python::attach(|py| {
            let plan = Py::new(py, plan)?;
            let run = self.object.bind(py).call_method1("run", (&plan,))?.extract()?;
            Ok((plan, run))
        })
        .map_err(|error: PyErr| {
            let message = format!("sampling failed: {error}");
            Python::attach(|py| log(py, &message, error));
            RunnerError(message)
        })
    }
}
