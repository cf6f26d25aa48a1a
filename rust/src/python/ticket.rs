//! The client's end of a request: a mailbox that rounds fill and any thread may empty.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine::{Failure, Finish, FinishReason, Sink, StopReason, Update};
use crate::python::errors::to_py;

/// How often a waiting thread looks for Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// What has arrived and was not fetched yet.
#[derive(Default)]
pub(super) struct Mailbox {
    pending: Mutex<Option<Update>>,
    arrived: Condvar,
    /// Wakes an event loop; called on the engine's thread.
    notify: Option<Py<PyAny>>,
}

impl Mailbox {
    pub(super) fn new(notify: Option<Py<PyAny>>) -> Self {
        Mailbox { notify, ..Mailbox::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Update>> {
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The engine's end of the mailbox.
pub(super) struct Delivery {
    pub(super) mailbox: Arc<Mailbox>,
    /// Without it only the end of the request wakes the client.
    pub(super) streams: bool,
    /// The request's own flag.
    pub(super) cancelled: Arc<AtomicBool>,
    /// Whether the client was sent the end.
    pub(super) is_over: bool,
}

impl Drop for Delivery {
    /// A panic can lose a request between two lists of the engine; its client gets an error and does not wait
    /// for ever.
    fn drop(&mut self) {
        if !self.is_over && std::thread::panicking() {
            let finish = Finish::unserved(FinishReason::Error, Some(Failure::ended()));
            self.update(Update { finish: Some(finish), ..Update::default() });
        }
    }
}

impl Sink for Delivery {
    fn update(&mut self, update: Update) {
        self.is_over |= update.finish.is_some();
        let wakes = self.streams || self.is_over;
        {
            let mut pending = self.mailbox.lock();
            match pending.as_mut() {
                Some(earlier) => earlier.merge(update),
                None => *pending = Some(update),
            }
        }
        if !wakes {
            return;
        }
        self.mailbox.arrived.notify_all();
        if let Some(notify) = &self.mailbox.notify {
            let woken = Python::attach(|py| notify.call0(py).is_ok());
            if !woken {
                // The event loop is closed: nobody is left to wake or to take the rest.
                self.cancelled.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// A submitted request. Dropping it cancels the request.
#[pyclass(frozen, module = "dspark._core")]
pub struct Ticket {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) cancelled: Arc<AtomicBool>,
}

#[pymethods]
impl Ticket {
    /// Waits for the next update, or with `whole` for the last one; returns everything not fetched before as
    /// `(token_ids, text, logprobs, finish)`. Interruptible by Ctrl-C.
    #[pyo3(signature = (whole = false))]
    fn wait(&self, py: Python<'_>, whole: bool) -> PyResult<PyUpdate> {
        loop {
            let update = py.detach(|| self.wait_until(Instant::now() + SIGNAL_INTERVAL, whole));
            if let Some(update) = update {
                return to_tuple(py, update);
            }
            py.check_signals()?;
        }
    }

    /// What has arrived and was not fetched before, or `None`.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<PyUpdate>> {
        let update = self.mailbox.lock().take();
        update.map(|update| to_tuple(py, update)).transpose()
    }

    /// Ends the request within a round; its last update says "abort".
    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

impl Ticket {
    fn wait_until(&self, deadline: Instant, whole: bool) -> Option<Update> {
        let mut pending = self.mailbox.lock();
        loop {
            if pending.as_ref().is_some_and(|update| !whole || update.finish.is_some()) {
                return pending.take();
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            pending = self.mailbox.arrived.wait_timeout(pending, left).unwrap_or_else(|p| p.into_inner()).0;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// `(token_ids, text, logprobs, finish)`.
type PyUpdate = (Vec<u32>, Option<String>, Vec<Py<PyDict>>, Option<Py<PyDict>>);

fn to_tuple(py: Python<'_>, update: Update) -> PyResult<PyUpdate> {
    let logprobs = update.logprobs.iter().map(|row| {
        let dict = PyDict::new(py);
        dict.set_item(row.token, row.logprob)?;
        for &(token, logprob) in &row.top {
            dict.set_item(token, logprob)?;
        }
        Ok(dict.unbind())
    });
    let logprobs = logprobs.collect::<PyResult<_>>()?;
    let finish = update.finish.map(|finish| finish_to_dict(py, finish)).transpose()?;
    Ok((update.tokens, update.text, logprobs, finish))
}

fn finish_to_dict(py: Python<'_>, finish: Finish) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    let reason = match finish.reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
        FinishReason::Error => "error",
    };
    dict.set_item("reason", reason)?;
    match finish.stop {
        Some(StopReason::Token(token)) => dict.set_item("stop", token)?,
        Some(StopReason::Text(text)) => dict.set_item("stop", text)?,
        None => dict.set_item("stop", py.None())?,
    }
    dict.set_item("error", finish.error.map(|failure| to_py(&failure).into_value(py)))?;
    let rounds = finish.rounds.into_iter();
    let rounds: Vec<_> =
        rounds.map(|r| (r.drafted, r.verified, r.accepted, r.confidence, r.committed)).collect();
    dict.set_item("rounds", rounds)?;
    let timing = finish.timing;
    for (name, spent) in [
        ("queue_s", timing.queue),
        ("prefill_s", timing.prefill),
        ("draft_s", timing.draft),
        ("verify_s", timing.verify),
        ("sample_s", timing.sample),
        ("total_s", timing.total),
    ] {
        dict.set_item(name, spent.as_secs_f64())?;
    }
    let updates: Vec<_> = timing.updates.into_iter().map(|(at, tokens)| (at.as_secs_f64(), tokens)).collect();
    dict.set_item("updates", updates)?;
    dict.set_item("bad_draft_rows", finish.bad_draft_rows)?;
    dict.set_item("reused", finish.reused)?;
    dict.set_item("preemptions", finish.preemptions)?;
    let skipped = PyDict::new(py);
    skipped.set_item("slower", finish.skipped.slower)?;
    skipped.set_item("failing", finish.skipped.failing)?;
    skipped.set_item("broken", finish.skipped.broken)?;
    dict.set_item("skipped", skipped)?;
    Ok(dict.unbind())
}
