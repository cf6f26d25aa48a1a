//! Tests of target calls that fail: what is tried again, and which requests end.

mod toy;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use dspark_core::schedule::{CostTable, Policy};
use toy::{Caches, Inbox, ToyRunner, request};

const LENGTHS: [usize; 4] = [30, 7, 50, 18];

/// Runs four requests of different lengths, after one whose prefix is kept.
fn run(config: EngineConfig, runner: ToyRunner, mut after_step: impl FnMut(&Stats)) -> [Inbox; 4] {
    let (stats, caches) = (Arc::<StatsBoard>::default(), runner.caches.clone());
    let (mut engine, queue) = toy::with(config, runner, stats.clone());
    let mut step = || {
        engine.step();
        engine.audit().unwrap();
        compare(&engine, &caches);
        after_step(&stats.read());
    };
    let (kept, kept_inbox) = request(9, &[5; 20], SamplingParams::default(), 1);
    assert!(queue.submit(kept).is_ok());
    step();
    assert!(kept_inbox.is_over());
    let inboxes = [0, 1, 2, 3].map(|id| {
        let params = SamplingParams { temperature: id as f64 / 3.0, ..SamplingParams::default() };
        let (request, inbox) = request(id, &[3, 1, 4, id as u32], params, LENGTHS[id as usize]);
        assert!(queue.submit(request).is_ok());
        inbox
    });
    while !inboxes.iter().all(Inbox::is_over) {
        step();
    }
    inboxes
}

fn compare(engine: &Engine<ToyRunner>, caches: &Arc<Mutex<HashMap<RequestId, Caches>>>) {
    let caches = caches.lock().unwrap();
    assert_eq!(engine.caches().count(), caches.len());
    for (id, rows, positions) in engine.caches() {
        assert_eq!((caches[&id].rows.as_slice(), caches[&id].reserved), (rows, positions), "request {id}");
    }
}

fn config() -> EngineConfig {
    EngineConfig { prefill_chunk_size: 64, ..toy::config(Rule::Coupled, toy::GAMMA) }
}

/// Runners where the core judges all rows, where the runner does, and where each judges some.
fn toys() -> impl Iterator<Item = ToyRunner> {
    let judged = [None, Some(-1.0), Some(0.5)];
    judged.into_iter().map(|decides_above| ToyRunner { error: 0.3, decides_above, ..ToyRunner::default() })
}

fn assert_untouched(found: &Inbox, whole: &Inbox) {
    assert_eq!(found.tokens(), whole.tokens());
    found.finish(|finish| assert_eq!((finish.reason, &finish.error), (FinishReason::Length, &None)));
}

#[test]
fn a_request_that_fails_the_targets_pass_ends_alone() {
    for culprit in 0..4 {
        for runner in toys() {
            let whole = run(
                config(),
                ToyRunner { decides_above: runner.decides_above, ..ToyRunner::default() },
                |_| (),
            );
            let found = run(config(), ToyRunner { fail_verify_of: Some(culprit as u64), ..runner }, |_| ());
            for i in (0..4).filter(|&i| i != culprit) {
                assert_untouched(&found[i], &whole[i]);
            }
            assert_eq!(found[culprit].tokens(), whole[culprit].tokens()[..1], "its prompt had gone through");
            found[culprit].finish(|finish| {
                assert_eq!(finish.error, Some(Failure::Runner("out of memory".into())));
            });
        }
    }
}

/// Each request advances in every round, whether the drafts' rows are too many or those of all requests.
#[test]
fn a_pass_that_is_too_wide_is_made_in_parts() {
    for most_rows in [1, 4] {
        for runner in toys() {
            let whole = run(
                config(),
                ToyRunner { decides_above: runner.decides_above, ..ToyRunner::default() },
                |_| (),
            );
            let found = run(config(), ToyRunner { most_rows: Some(most_rows), ..runner }, |_| ());
            for (i, (found, whole)) in found.iter().zip(&whole).enumerate() {
                assert_untouched(found, whole);
                let drafted =
                    |finish: &Finish| finish.rounds.iter().filter(|round| round.verified > 0).count();
                assert!(
                    found.finish(drafted) == 0 || most_rows > 1 && i == 2,
                    "a pass of one request is narrow"
                );
            }
        }
    }
}

/// Passes with drafted tokens that fail time and again are tried ever more rarely, and this is reported.
#[test]
fn drafts_that_no_pass_can_hold_step_aside() {
    let table = CostTable::new(&[(1, 0.010), (64, 0.011)]).unwrap();
    for policy in [Policy::Fixed, Policy::Throughput { cost: table, lag: None }] {
        let stats = Arc::<StatsBoard>::default();
        let runner = ToyRunner { most_rows: Some(1), ..ToyRunner::default() };
        let passes = runner.passes.clone();
        let (mut engine, queue) = toy::with(EngineConfig { policy, ..config() }, runner, stats.clone());
        let (request, inbox) = request(0, &[3, 1, 4], SamplingParams::default(), 300);
        assert!(queue.submit(request).is_ok());
        while !inbox.is_over() {
            engine.step();
            engine.audit().unwrap();
        }
        let (rounds, broken) = inbox.finish(|finish| {
            assert_eq!(finish.reason, FinishReason::Length);
            (finish.rounds.len(), finish.skipped.broken)
        });
        let twice = *passes.lock().unwrap() - rounds;
        let found = stats.read();
        // The first failure may be for lack of kept prefixes' memory; from the second on, the waits double.
        assert!((2..=8).contains(&twice), "{twice} of {rounds} rounds were made twice");
        assert!(found.draft_failures as usize == twice - 1 && broken > 200, "{found:?}");
        assert_eq!(found.draft_failure.as_deref(), Some("out of memory"));
    }
}

#[test]
fn a_pass_that_fails_once_fails_nobody_and_teaches_nothing() {
    let table = CostTable::new(&[(1, 0.010), (64, 0.011)]).unwrap();
    let throughput = Policy::Throughput { cost: table, lag: NonZeroUsize::new(1) };
    for policy in [Policy::Fixed, throughput] {
        let config = EngineConfig { policy: policy.clone(), ..config() };
        let whole = run(config.clone(), ToyRunner { error: 0.3, ..ToyRunner::default() }, |_| ());
        for call in 2..8 {
            let runner = ToyRunner { error: 0.3, fails_once: Some(("verify", call)), ..ToyRunner::default() };
            let (passes, released) = (runner.passes.clone(), runner.released.clone());
            let (mut before, mut passes_before, mut learned) = (Stats::default(), 0, 0);
            let found = run(config.clone(), runner, |stats| {
                let passes = *passes.lock().unwrap();
                let changes = stats.cost_table != before.cost_table;
                if passes == passes_before + 2 {
                    assert_eq!(passes, call + 1);
                    assert_eq!(stats.passes, before.passes + 1);
                    assert!(!changes && stats.acceptance_by_position == before.acceptance_by_position);
                    assert_eq!(stats.drafted, before.drafted, "the drafts were dropped");
                    assert_eq!(stats.tokens, before.tokens + stats.rounds - before.rounds);
                    assert!(released.lock().unwrap().contains(&9), "the kept prefix made room");
                } else {
                    learned += usize::from(changes);
                }
                (before, passes_before) = (stats.clone(), passes);
            });
            found.iter().zip(&whole).for_each(|(found, whole)| assert_untouched(found, whole));
            assert_eq!(before.draft_failures, 0);
            assert!(learned > 1 || policy == Policy::Fixed, "{learned}");
        }
    }
}

#[test]
fn room_that_kept_prefixes_take_is_room_for_who_runs() {
    let whole = run(config(), ToyRunner::default(), |_| ());
    let mut made_room = 0;
    // The first call is for the request that leaves a prefix, the next four for the others' prompts.
    for call in 1..12 {
        let runner = ToyRunner { fails_once: Some(("reserve", call)), ..ToyRunner::default() };
        let released = runner.released.clone();
        let mut is_gone = false;
        let found = run(config(), runner, |_| is_gone |= released.lock().unwrap().contains(&9));
        found.iter().zip(&whole).for_each(|(found, whole)| assert_untouched(found, whole));
        made_room += usize::from(is_gone);
    }
    assert_eq!(made_room, 4 + 3, "one has all its room from the start");
}

/// The same where memory is taken later: by a copy, or by the prompt's own pass.
#[test]
fn room_that_kept_prefixes_take_is_room_for_prompts() {
    let texts = |fails_once: Option<(&'static str, usize)>| {
        let runner = ToyRunner { fails_once, ..ToyRunner::default() };
        let released = runner.released.clone();
        let (mut engine, queue) = toy::with(config(), runner, Arc::default());
        let mut serve = |id: u64, prompt: &[u32]| {
            let (request, inbox) = request(id, prompt, SamplingParams::default(), 9);
            assert!(queue.submit(request).is_ok());
            while !inbox.is_over() {
                engine.step();
                engine.audit().unwrap();
            }
            inbox
        };
        let kept = [serve(1, &[5; 40]), serve(2, &[7; 40])];
        assert!(released.lock().unwrap().is_empty(), "both are kept");
        let found = serve(3, &[[5; 40].as_slice(), &[1, 2]].concat());
        let unused = released.lock().unwrap().contains(&2);
        found.finish(|finish| assert_eq!(finish.reason, FinishReason::Length, "{:?}", finish.error));
        (kept.map(|inbox| inbox.tokens()), found.tokens(), unused)
    };
    let (kept, found, gone) = texts(None);
    assert!(!gone);
    for fails in [("fork", 1), ("prefill", 3)] {
        assert_eq!(texts(Some(fails)), (kept.clone(), found.clone(), true), "{fails:?}");
    }
}

/// What cannot be copied can be computed: a prefix that is kept is no reason to fail.
#[test]
fn a_prefix_that_cannot_be_copied_fails_nobody() {
    let runner = ToyRunner { fail_fork: true, ..ToyRunner::default() };
    let (mut engine, queue) = toy::with(toy::config(Rule::Coupled, toy::GAMMA), runner, Arc::default());
    for id in 0..3 {
        let (request, inbox) = request(id, &[5; 40], SamplingParams::default(), 9);
        assert!(queue.submit(request).is_ok());
        while !inbox.is_over() {
            engine.step();
            engine.audit().unwrap();
        }
        inbox.finish(|finish| assert_eq!((finish.reason, finish.reused), (FinishReason::Length, 0)));
    }
}
