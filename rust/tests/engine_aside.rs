//! Tests of a draft that fails: drafting pauses, and only the target can fail a request.

mod toy;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use dspark_core::schedule::{CostTable, Policy};
use toy::{Inbox, ToyRunner, request};

fn policies() -> [Policy; 4] {
    // Drafting is next to free, so that it is tried whenever it may be.
    let table = CostTable::new(&[(1, 0.010), (64, 0.011)]).unwrap();
    [
        Policy::Fixed,
        Policy::Threshold(0.1),
        Policy::Throughput { cost: table.clone(), lag: NonZeroUsize::new(1) },
        Policy::Throughput { cost: table, lag: None },
    ]
}

/// Runs three requests, of which the last declines the draft; returns their ends and the engine's counts.
fn run(policy: &Policy, runner: ToyRunner, max_tokens: usize) -> ([Inbox; 3], Stats) {
    let stats = Arc::<StatsBoard>::default();
    let config = EngineConfig {
        policy: policy.clone(),
        prefill_chunk_size: 64, // all begin in one round
        ..toy::config(Rule::Coupled, toy::GAMMA)
    };
    let (mut engine, queue) = toy::with(config, runner, stats.clone());
    let inboxes = [0, 1, 2].map(|id| {
        let (mut request, inbox) = request(id, &[3, 1, 4], SamplingParams::default(), max_tokens);
        request.drafts = id < 2;
        assert!(queue.submit(request).is_ok());
        inbox
    });
    while !inboxes.iter().all(Inbox::is_over) {
        engine.step();
        engine.audit().unwrap();
    }
    (inboxes, stats.read())
}

fn toy(fails_once: Option<(&'static str, usize)>) -> ToyRunner {
    // The runner decides, or there would be no call that could fail. Passes are slow, so that drafts pay.
    let slow = Duration::from_micros(200);
    ToyRunner { confident: true, decides_above: Some(0.5), fails_once, slow, ..ToyRunner::default() }
}

#[test]
fn a_draft_that_fails_once_fails_nobody() {
    for policy in &policies() {
        let (whole, sound) = run(policy, toy(None), 60);
        assert_eq!((sound.draft_failures, sound.skipped.broken, sound.draft_failure), (0, 0, None));
        for (what, call) in [("feed", 1), ("draft", 1), ("draft", 3), ("chain", 1), ("chain", 3)] {
            let (found, stats) = run(policy, toy(Some((what, call))), 60);
            for (found, whole) in found.iter().zip(&whole) {
                assert_eq!(found.tokens(), whole.tokens(), "{what} {call}");
                found.finish(|finish| assert_eq!(finish.reason, FinishReason::Length));
            }
            assert_eq!((stats.draft_failures, stats.draft_failure), (1, Some(format!("{what} failed"))));
            let broken = [0, 1, 2].map(|i| found[i].finish(|finish| finish.skipped.broken));
            assert!(broken[0] > 0 && broken[1] > 0 && broken[2] == 0, "{what} {call}: {broken:?}");
            assert_eq!(stats.skipped.broken, broken.iter().sum::<u64>());
            if !matches!(policy, Policy::Throughput { .. }) {
                assert_eq!(broken, [8, 8, 0], "{what} {call}");
                let last = |finish: &Finish| finish.rounds.iter().rev().nth(3).is_some_and(|r| r.drafted > 0);
                assert!(found[0].finish(last), "it drafts again");
            }
        }
    }
}

#[test]
fn a_draft_that_always_fails_is_tried_ever_more_rarely() {
    for policy in &policies() {
        let runner = ToyRunner { fail_draft: true, ..toy(None) };
        let tries = runner.drafts.clone();
        let (found, stats) = run(policy, runner, 300);
        let (whole, _) = run(policy, toy(None), 300);
        for (found, whole) in found.iter().zip(&whole) {
            assert_eq!(found.tokens(), whole.tokens());
            found.finish(|finish| assert!(finish.rounds.iter().all(|round| round.drafted == 0)));
        }
        // In rounds 1, 9, 25, 57, 121, 249: for both requests, then for each, in case only one of them fails.
        let (passes, tries) = (*tries.lock().unwrap() as u64, stats.draft_failures);
        assert!((1..=6).contains(&tries) && (tries..=3 * tries).contains(&passes), "{tries} {passes}");
        assert!(
            (tries, passes) == (6, 18) || matches!(policy, Policy::Throughput { .. }),
            "{tries} {passes}"
        );
        assert_eq!(stats.draft_failure.as_deref(), Some("out of memory"));
    }
}

/// The others continue to draft; the one that fails waits as the engine would, and no text changes.
#[test]
fn a_request_whose_draft_always_fails_costs_the_others_nothing() {
    for policy in &policies() {
        for decides_above in [None, Some(0.5)] {
            let (whole, sound) = run(policy, ToyRunner { decides_above, ..toy(None) }, 300);
            for (fail_draft_of, fail_feed_of) in [(Some(0), None), (None, Some(0))] {
                let failing = ToyRunner { fail_draft_of, fail_feed_of, decides_above, ..toy(None) };
                let (found, stats) = run(policy, failing, 300);
                for (found, whole) in found.iter().zip(&whole) {
                    assert_eq!(found.tokens(), whole.tokens());
                }
                let drafted = |inbox: &Inbox| {
                    inbox.finish(|finish| finish.rounds.iter().filter(|round| round.drafted > 0).count())
                };
                let broken = [0, 1, 2].map(|i| found[i].finish(|finish| finish.skipped.broken));
                assert!(drafted(&found[0]) == 0 && broken[0] > 0, "{broken:?}");
                assert!(broken[2] == 0 && stats.skipped.broken == broken.iter().sum::<u64>());
                // Once the others have ended, it is alone and starts anew.
                assert!((1..=12).contains(&stats.draft_failures), "{}", stats.draft_failures);
                if matches!(policy, Policy::Throughput { .. }) {
                    // If a request tries alone, its failures cannot be told from the draft's.
                    assert!(drafted(&found[1]) > 0, "{broken:?}");
                } else {
                    assert_eq!(drafted(&found[1]), drafted(&whole[1]));
                    assert!(broken[1] == 0 && sound.drafted > stats.drafted);
                }
            }
        }
    }
}

/// A draft of bad rows alone costs its pass for nothing: it is tried ever more rarely, as is reported.
#[test]
fn a_draft_without_a_token_to_draw_is_tried_ever_more_rarely() {
    for policy in &policies() {
        let runner = ToyRunner { bad_drafts: true, decides_above: None, ..toy(None) };
        let tries = runner.drafts.clone();
        let (found, stats) = run(policy, runner, 300);
        let (whole, _) = run(policy, ToyRunner { decides_above: None, ..toy(None) }, 300);
        for (found, whole) in found.iter().zip(&whole) {
            assert_eq!(found.tokens(), whole.tokens());
        }
        let passes = *tries.lock().unwrap();
        assert!((1..=12).contains(&passes), "{passes}");
        let bad_rows = |inbox: &Inbox| inbox.finish(|finish| u64::from(finish.bad_draft_rows));
        let (bad, broken) = (bad_rows(&found[0]), found[0].finish(|finish| finish.skipped.broken));
        assert!(bad > 0 && bad <= 6 && broken > 200, "{bad} {broken}");
        assert_eq!(stats.bad_draft_rows, found.iter().map(bad_rows).sum::<u64>());
    }
}
