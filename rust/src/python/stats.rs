//! What the engine has done so far, as the dict of `Engine.stats`.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine::{PAGE_SIZE, Percentiles, Queue, StatsBoard};

/// The counts of `board` and `queue`; `max_kv_tokens` is the engine's.
pub(super) fn to_dict<'py>(
    py: Python<'py>,
    board: &StatsBoard,
    queue: &Queue,
    max_kv_tokens: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let stats = board.read();
    let dict = PyDict::new(py);
    // By difference, so that a request on its way from the queue to its place is never missing: code that
    // drains the engine waits until nothing is queued and nothing runs.
    let unfinished = queue.accepted().saturating_sub(stats.finished);
    dict.set_item("queued", unfinished.saturating_sub(stats.running as u64))?;
    dict.set_item("running", stats.running)?;
    dict.set_item("prefilling", stats.prefilling)?;
    for (name, count) in [
        ("refused", queue.refused()),
        ("preemptions", stats.preemptions),
        ("reused_tokens", stats.reused_tokens),
        ("finished", stats.finished),
        ("tokens", stats.tokens),
        ("rounds", stats.rounds),
        ("drafted", stats.drafted),
        ("verified", stats.verified),
        ("accepted", stats.accepted),
        ("passes", stats.passes),
        ("close_decisions", stats.close),
        ("skipped_slower", stats.skipped.slower),
        ("skipped_failing", stats.skipped.failing),
        ("skipped_broken", stats.skipped.broken),
        ("draft_failures", stats.draft_failures),
        ("bad_draft_rows", stats.bad_draft_rows),
    ] {
        dict.set_item(name, count)?;
    }
    for (name, spent) in [
        ("prefill_s", stats.prefill),
        ("draft_s", stats.draft),
        ("feed_s", stats.feed),
        ("chain_s", stats.chain),
        ("verify_s", stats.verify),
        ("accept_s", stats.accept),
        ("round_s", stats.round),
    ] {
        dict.set_item(name, spent.as_secs_f64())?;
    }
    let pages = PyDict::new(py);
    // Not the total of `stats`, which is 0 before the first step.
    let total = max_kv_tokens / PAGE_SIZE;
    for (name, count) in [("total", total), ("used", stats.pages.used), ("kept", stats.pages.kept)] {
        pages.set_item(name, count)?;
    }
    dict.set_item("pages", pages)?;
    dict.set_item("time_to_first_token_s", percentiles(py, board.time_to_first_token())?)?;
    dict.set_item("inter_token_s", percentiles(py, board.inter_token())?)?;
    dict.set_item("draft_failure", stats.draft_failure)?;
    dict.set_item("acceptance_by_position", stats.acceptance_by_position)?;
    dict.set_item("verify_budget", stats.verified as f64 / stats.rounds.max(1) as f64)?;
    Ok(dict)
}

/// `{"p50", "p90", "p99"}` in seconds, each `None` while there is none.
fn percentiles(py: Python<'_>, found: Option<Percentiles>) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("p50", found.map(|found| found.p50.as_secs_f64()))?;
    dict.set_item("p90", found.map(|found| found.p90.as_secs_f64()))?;
    dict.set_item("p99", found.map(|found| found.p99.as_secs_f64()))?;
    Ok(dict)
}
