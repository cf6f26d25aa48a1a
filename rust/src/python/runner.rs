//! The engine's models, reached by calling Python.

use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::accept::{NumericsError, Rule};
use crate::chain::{Chain, ConfidenceHead, Heads, MarkovHead, MarkovKind};
use crate::engine::{
    Block, ChainBlock, DraftPass, Forks, Judgement, ModelRunner, PassRows, RequestId, RunnerError,
};
use crate::params::SamplingParams;
use crate::python::errors::log;
use crate::python::params::unknown_head;
use crate::python::sampler::Sampler;
use crate::python::tensors::Tensor;

/// A Python object with the methods of `dspark.serve.runner.Runner`.
pub struct PyRunner {
    object: Py<PyAny>,
    heads: HeadTensors,
    forks: Forks,
    /// Makes decisions on the models' device, if there are kernels for it.
    sampler: Option<Sampler>,
    /// Requests of the last draft pass.
    drafting: usize,
}

impl PyRunner {
    /// Wraps `object`; `heads` is the dictionary that `dspark.serve.heads.heads_to_core` makes of a draft's
    /// heads. If its attribute `sampler` (`dspark.kernels.sampler`) is not `None`, it makes the decisions, on
    /// the device where the rows lie.
    pub fn new(object: Py<PyAny>, heads: &Bound<'_, PyDict>) -> PyResult<Self> {
        let is = |attribute: &str| object.bind(heads.py()).getattr(attribute)?.extract::<bool>();
        let forks = match (is("can_fork")?, is("forks_at_parts")?) {
            (false, _) => Forks::Never,
            (true, true) => Forks::AtParts,
            (true, false) => Forks::Anywhere,
        };
        let sampler = object.bind(heads.py()).getattr_opt("sampler")?.filter(|sampler| !sampler.is_none());
        let sampler = sampler.map(|sampler| Sampler::new(&sampler)).transpose()?;
        Ok(PyRunner { object, heads: HeadTensors::from_py(heads)?, forks, sampler, drafting: 0 })
    }

    /// Calls a method and reads its answer. An exception is logged with its traceback and fails the pass.
    fn call<T>(
        &self,
        method: &str,
        args: impl for<'py> PyCallArgs<'py>,
        read: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T, RunnerError> {
        Python::attach(|py| {
            self.object.bind(py).call_method1(method, args).and_then(|answer| read(&answer)).map_err(
                |error| {
                    let message = format!("{method} failed: {error}");
                    log(py, &message, error);
                    RunnerError(message)
                },
            )
        })
    }
}

impl ModelRunner for PyRunner {
    type Rows = Tensor;

    fn prefill(&mut self, items: &[(RequestId, &[u32], bool)]) -> Result<Tensor, RunnerError> {
        let (ids, prompts, drafts): (Vec<_>, Vec<_>, Vec<_>) = items.iter().copied().collect();
        self.call("prefill", (ids, prompts, drafts), |rows| Tensor::anywhere(rows, "prefill logits"))
    }

    fn feed(&mut self, ids: &[RequestId]) -> Result<(), RunnerError> {
        self.call("feed", (ids,), |_| Ok(()))
    }

    fn draft(&mut self, items: &[(RequestId, u32)]) -> Result<DraftPass<Tensor>, RunnerError> {
        let (ids, anchors): (Vec<_>, Vec<_>) = items.iter().copied().unzip();
        self.drafting = items.len();
        self.call("draft", (ids, anchors), |answer| {
            let (base, hidden): (Bound<'_, PyAny>, Option<Bound<'_, PyAny>>) = answer.extract()?;
            let hidden = hidden.map(|hidden| Tensor::anywhere(&hidden, "draft states")).transpose()?;
            Ok(DraftPass { base: Tensor::anywhere(&base, "draft logits")?, hidden })
        })
    }

    fn verify(&mut self, items: &[(RequestId, &[u32])]) -> Result<Tensor, RunnerError> {
        let ids: Vec<_> = items.iter().map(|(id, _)| *id).collect();
        let tokens: Vec<_> = items.iter().flat_map(|(_, rows)| rows.iter().copied()).collect();
        let lengths: Vec<_> = items.iter().map(|(_, rows)| rows.len()).collect();
        self.call("verify", (ids, tokens, lengths), |rows| Tensor::anywhere(rows, "verify logits"))
    }

    fn commit(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError> {
        let (ids, kept): (Vec<_>, Vec<_>) = items.iter().copied().unzip();
        self.call("commit", (ids, kept), |_| Ok(()))
    }

    fn reserve(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError> {
        let (ids, positions): (Vec<_>, Vec<_>) = items.iter().copied().unzip();
        self.call("reserve", (ids, positions), |_| Ok(()))
    }

    fn fork(
        &mut self,
        new: RequestId,
        source: RequestId,
        length: usize,
        drafts: bool,
    ) -> Result<usize, RunnerError> {
        self.call("fork", (new, source, length, drafts), |taken| taken.extract())
    }

    fn forks(&self) -> Forks {
        self.forks
    }

    fn release(&mut self, ids: &[RequestId]) {
        // `call` has logged an error, and there is no caller to report it to.
        let _ = self.call("release", (ids,), |_| Ok(()));
    }

    fn heads(&self) -> Heads<'_> {
        self.heads.view()
    }

    fn decides(&self, rule: Rule, params: &SamplingParams) -> bool {
        self.sampler.as_ref().is_some_and(|sampler| sampler.serves(rule, params))
    }

    fn chain(
        &mut self,
        rule: Rule,
        pass: &DraftPass<Tensor>,
        blocks: &[ChainBlock<'_>],
    ) -> Result<Vec<Chain>, RunnerError> {
        let gamma = pass.base.shape().0 / self.drafting.max(1);
        self.sampler.as_mut().ok_or_else(no_sampler)?.chain(rule, gamma, pass, blocks)
    }

    fn judge(
        &mut self,
        rule: Rule,
        logits: &Tensor,
        blocks: &[Block<'_>],
    ) -> Result<Vec<Result<Judgement, NumericsError>>, RunnerError> {
        self.sampler.as_ref().ok_or_else(no_sampler)?.judge(rule, logits, blocks)
    }
}

fn no_sampler() -> RunnerError {
    RunnerError("this runner has no sampler".into())
}

/// The heads' tensors, kept alive.
#[derive(Default)]
pub struct HeadTensors {
    markov: Option<(MarkovTensors, Tensor, Tensor)>,
    confidence: Option<(Tensor, Option<Tensor>, bool)>,
    vocabulary: Option<Vec<u32>>,
}

enum MarkovTensors {
    Vanilla,
    Gated(Tensor, Tensor),
    Rnn(Tensor, Tensor, bool),
}

impl HeadTensors {
    /// Reads `{"markov": {"kind", "w1", "w2", "weight", "bias", "through_anchor"}, "confidence": {"weight",
    /// "bias", "with_markov"}, "vocabulary": [token, ...]}`; each may be absent.
    pub fn from_py(heads: &Bound<'_, PyDict>) -> PyResult<Self> {
        let part = |name: &str| -> PyResult<Option<Bound<'_, PyDict>>> {
            heads.get_item(name)?.map(|part| Ok(part.cast_into::<PyDict>()?)).transpose()
        };
        let tensor =
            |part: &Bound<'_, PyDict>, key: &str| Tensor::from_py(&part.as_any().get_item(key)?, key);
        let markov = part("markov")?
            .map(|part| {
                let kind: String = part.as_any().get_item("kind")?.extract()?;
                let kind = match kind.as_str() {
                    "gated" => MarkovTensors::Gated(tensor(&part, "weight")?, tensor(&part, "bias")?),
                    "rnn" => MarkovTensors::Rnn(
                        tensor(&part, "weight")?,
                        tensor(&part, "bias")?,
                        part.as_any().get_item("through_anchor")?.extract()?,
                    ),
                    "vanilla" => MarkovTensors::Vanilla,
                    _ => return Err(unknown_head(&kind)),
                };
                Ok::<_, PyErr>((kind, tensor(&part, "w1")?, tensor(&part, "w2")?))
            })
            .transpose()?;
        let confidence = part("confidence")?
            .map(|part| {
                let bias = part.get_item("bias")?.filter(|bias| !bias.is_none());
                let bias = bias.map(|bias| Tensor::from_py(&bias, "bias")).transpose()?;
                let with_markov: bool = part.as_any().get_item("with_markov")?.extract()?;
                Ok::<_, PyErr>((tensor(&part, "weight")?, bias, with_markov))
            })
            .transpose()?;
        let vocabulary = heads.get_item("vocabulary")?.map(|tokens| tokens.extract()).transpose()?;
        Ok(HeadTensors { markov, confidence, vocabulary })
    }

    /// The heads as the chain reads them.
    pub fn view(&self) -> Heads<'_> {
        let markov = self.markov.as_ref().map(|(kind, w1, w2)| MarkovHead {
            kind: match kind {
                MarkovTensors::Vanilla => MarkovKind::Vanilla,
                MarkovTensors::Gated(w, b) => MarkovKind::Gated { gate_w: w.rows(), gate_b: b.rows().row(0) },
                MarkovTensors::Rnn(w, b, through_anchor) => MarkovKind::Rnn {
                    joint_w: w.rows(),
                    joint_b: b.rows().row(0),
                    through_anchor: *through_anchor,
                },
            },
            w1: w1.rows(),
            w2: w2.rows(),
        });
        let confidence = self.confidence.as_ref().map(|(weight, bias, with_markov)| ConfidenceHead {
            weight: weight.rows().row(0),
            bias: bias.as_ref().map(|bias| bias.rows().row(0)),
            with_markov: *with_markov,
        });
        Heads { markov, confidence, vocabulary: self.vocabulary.as_deref() }
    }
}
