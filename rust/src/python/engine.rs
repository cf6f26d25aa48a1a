//! The round loop for Python: an engine, run by a thread that Python makes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::calibration::Regime;
use crate::engine::{Engine, EngineConfig, Queue, Request, StatsBoard};
use crate::noise::Noise;
use crate::python::detokenizer::stop_text;
use crate::python::errors::{ConfigError, RequestError, to_py};
use crate::python::params::{number, parse_policy, parse_rule, sampling_params};
use crate::python::runner::PyRunner;
use crate::python::schedule::{PyCalibration, PyCostTable};
use crate::python::stats;
use crate::python::ticket::{Delivery, Mailbox, Ticket};
use crate::schedule::{CostTable, Policy};
use crate::stop::StopIds;

/// (temperature, top_k, top_p, min_p)
type Sampling = (f64, u32, f64, f64);

/// The engine: runs requests in rounds over a `runner` (see `dspark.serve.runner`) and the draft's `heads` as
/// tensors. `run` is the loop; all other methods may be called from any thread.
#[pyclass(frozen, name = "Engine", module = "dspark._core")]
pub struct PyEngine {
    config: EngineConfig,
    /// Taken by `run`.
    runner: Mutex<Option<PyRunner>>,
    queue: Arc<Queue>,
    stats: Arc<StatsBoard>,
    next_id: AtomicU64,
}

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (runner, heads, *, rule, policy, gamma, block_size, max_batch_size, max_kv_tokens, prefill_chunk_size = 512,
                        max_queue_size = 1024, confidence_threshold = None, cost_table = None, markov_candidates = None, calibrations = vec![], budget_lag = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python constructor")]
    fn new(
        runner: Py<PyAny>,
        heads: &Bound<'_, PyDict>,
        rule: &str,
        policy: &str,
        gamma: usize,
        block_size: usize,
        max_batch_size: usize,
        max_kv_tokens: usize,
        prefill_chunk_size: usize,
        max_queue_size: usize,
        confidence_threshold: Option<f64>,
        cost_table: Option<PyRef<'_, PyCostTable>>,
        markov_candidates: Option<usize>,
        calibrations: Vec<(Option<Sampling>, PyRef<'_, PyCalibration>)>,
        budget_lag: Option<usize>,
    ) -> PyResult<Self> {
        if block_size > gamma {
            return Err(ConfigError::new_err(format!(
                "block_size = {block_size} is more than the {gamma} tokens that the draft can draft"
            )));
        }
        if max_queue_size == 0 {
            return Err(ConfigError::new_err("max_queue_size = 0 lets no request in: it must be at least 1"));
        }
        if max_batch_size == 0 {
            return Err(ConfigError::new_err(
                "max_batch_size = 0 lets no request run: it must be at least 1",
            ));
        }
        let regime =
            |(temperature, top_k, top_p, min_p): Sampling| Regime { temperature, top_k, top_p, min_p };
        let calibrations: Vec<_> =
            calibrations.iter().map(|(at, fitted)| (at.map(regime), fitted.0.clone())).collect();
        for (at, calibration) in &calibrations {
            let found = calibration.temperatures().len();
            if found != gamma {
                return Err(ConfigError::new_err(format!(
                    "the calibration has {found} temperatures, but the draft's block has {gamma} positions"
                )));
            }
            if let Some(Regime { temperature, .. }) = at
                && !(temperature.is_finite() && *temperature >= 0.0)
            {
                return Err(ConfigError::new_err(format!(
                    "a calibration is for a sampling temperature of at least 0, or for all (None), not \
                     {temperature:?}"
                )));
            }
        }
        let config = EngineConfig {
            rule: parse_rule(rule)?,
            policy: parse_policy(
                policy,
                confidence_threshold,
                cost_table.map(|table| table.0.clone()),
                budget_lag,
            )?,
            gamma,
            block_size,
            markov_candidates,
            calibrations,
            max_batch_size,
            max_kv_tokens,
            prefill_chunk_size: prefill_chunk_size.max(1),
            max_queue_size,
        };
        let runner = Mutex::new(Some(PyRunner::new(runner, heads)?));
        let queue = Arc::new(Queue::new(&config));
        Ok(PyEngine { config, runner, queue, stats: Arc::default(), next_id: AtomicU64::new(1) })
    }

    /// Serves until `close`, on the thread that calls it. Can be called once.
    fn run(&self, py: Python<'_>) -> PyResult<()> {
        let runner = self.runner.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let runner = runner.ok_or_else(|| ConfigError::new_err("this engine has run already"))?;
        let mut engine = Engine::new(self.config.clone(), runner, self.queue.clone(), self.stats.clone());
        py.detach(move || engine.run());
        Ok(())
    }

    /// Submits a request. `params` is a `SamplingParams` with all defaults filled in; `end_ids` end the
    /// request without a stop reason; `detokenizer` (`push(list[int])`, `flush()`) is needed for stop
    /// strings; `notify` is called on the engine's thread whenever there is something to fetch. `waited` is
    /// how many seconds ago the caller asked; the timeout and all times count from then.
    #[pyo3(signature = (prompt, params, *, seed, sample, max_tokens, end_ids, detokenizer = None, streams = false, notify = None, waited = 0.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python method")]
    fn submit(
        &self,
        prompt: Vec<u32>,
        params: &Bound<'_, PyAny>,
        seed: u64,
        sample: u32,
        max_tokens: usize,
        end_ids: Vec<u32>,
        detokenizer: Option<Py<PyAny>>,
        streams: bool,
        notify: Option<Py<PyAny>>,
        waited: f64,
    ) -> PyResult<Ticket> {
        if prompt.is_empty() {
            return Err(RequestError::new_err(
                "the prompt is empty: at least one token is needed to begin from",
            ));
        }
        let mut rust_params = sampling_params(params)?;
        let stop_ids = StopIds::new(&end_ids, &rust_params.stop_token_ids);
        rust_params.stop_token_ids = stop_ids.iter().collect(); // what ends a text is masked until `min_tokens`, too
        let timeout: Option<f64> = number(params, "timeout")?;
        let stop_text = stop_text(params, detokenizer)?;

        let now = Instant::now();
        let waited = Duration::try_from_secs_f64(waited).unwrap_or_default();
        let submitted = now.checked_sub(waited).unwrap_or(now);
        let mailbox = Arc::new(Mailbox::new(notify));
        let cancelled = Arc::new(AtomicBool::new(false));
        let request = Request {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            prompt,
            params: rust_params,
            drafts: self.config.gamma > 0 && params.getattr("speculative")?.extract()?,
            noise: Noise { seed, sample },
            max_tokens,
            stop_ids,
            stop_text,
            // A deadline beyond the clock's range counts as none.
            deadline: timeout
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .and_then(|timeout| submitted.checked_add(timeout)),
            submitted,
            cancelled: cancelled.clone(),
            sink: Box::new(Delivery {
                mailbox: mailbox.clone(),
                streams,
                cancelled: cancelled.clone(),
                is_over: false,
            }),
        };
        self.queue.submit(request).map_err(|failure| to_py(&failure))?;
        Ok(Ticket { mailbox, cancelled })
    }

    /// Ends `run` after its current round. Running and waiting requests are aborted.
    fn close(&self) {
        self.queue.close();
    }

    /// Continues with another policy from the next round on, for comparing policies on one engine. Without a
    /// cost table, "throughput" uses the one that it had. Raises `ConfigError` as the constructor does.
    #[pyo3(signature = (policy, *, confidence_threshold = None, cost_table = None, budget_lag = None))]
    fn set_policy(
        &self,
        policy: &str,
        confidence_threshold: Option<f64>,
        cost_table: Option<PyRef<'_, PyCostTable>>,
        budget_lag: Option<usize>,
    ) -> PyResult<()> {
        let table = cost_table.map(|table| table.0.clone()).or_else(|| self.live_table());
        self.queue.set_policy(parse_policy(policy, confidence_threshold, table, budget_lag)?);
        Ok(())
    }

    /// What rounds cost now: the table given at the start, kept up to date by the rounds since; `None` if
    /// there never was one.
    fn cost_table(&self) -> Option<PyCostTable> {
        self.live_table().map(PyCostTable)
    }

    /// Totals since the start, times in seconds; latencies of the last minute or two as percentiles, or
    /// `None`. Takes some microseconds, of which the engine waits for a few at most.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats::to_dict(py, &self.stats, &self.queue, self.config.max_kv_tokens)
    }
}

impl PyEngine {
    /// The current table, or before the first round the one to start from.
    fn live_table(&self) -> Option<CostTable> {
        self.stats.read().cost_table.or_else(|| match &self.config.policy {
            Policy::Throughput { cost, .. } => Some(cost.clone()),
            Policy::Fixed | Policy::Threshold(_) => None,
        })
    }
}
