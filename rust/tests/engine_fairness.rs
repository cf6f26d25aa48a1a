//! Tests of fairness among requests: at admission, in the prefill, and when memory runs out.

mod toy;

use std::sync::Arc;

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use toy::{Inbox, ToyRunner, request, serve};

/// Texts of different kinds begin differently.
fn prompt(length: usize, kind: u32) -> Vec<u32> {
    let digits = [kind / 100, kind / 10, kind].map(|digit| digit % 10);
    digits.into_iter().chain((0..).map(|i| (i * i + kind * i) % 10)).take(length).collect()
}

fn submit(queue: &Queue, id: RequestId, prompt: &[u32], max_tokens: usize) -> Inbox {
    let (request, inbox) = request(id, prompt, SamplingParams::default(), max_tokens);
    assert!(queue.submit(request).is_ok());
    inbox
}

fn finish(engine: &mut Engine<ToyRunner>, inboxes: &[&Inbox]) {
    for _ in 0..10_000 {
        if inboxes.iter().all(|inbox| inbox.is_over()) {
            return;
        }
        engine.step();
        engine.audit().unwrap();
    }
    panic!("somebody waits for ever");
}

fn assert_alone(inbox: &Inbox, id: RequestId, prompt: &[u32], max_tokens: usize) {
    let (request, own) = request(id, prompt, SamplingParams::default(), max_tokens);
    serve(Rule::Coupled, toy::GAMMA, ToyRunner::default(), vec![request], std::slice::from_ref(&own));
    assert_eq!(inbox.tokens(), own.tokens(), "request {id}");
}

#[test]
fn who_waits_for_a_prompt_waits_alone() {
    let config = EngineConfig { prefill_chunk_size: 64, ..toy::config(Rule::Coupled, toy::GAMMA) };
    let stats = Arc::<StatsBoard>::default();
    let (mut engine, queue) = toy::with(config, ToyRunner::default(), stats.clone());
    let (long, other) = (prompt(500, 1), prompt(400, 2));
    let (first, same) = (submit(&queue, 0, &long, 5), submit(&queue, 1, &long, 5));
    let (behind, short) = (submit(&queue, 2, &other, 5), submit(&queue, 3, &[7, 8], 5));
    engine.step();
    assert_eq!(stats.read().running, 3, "all but the one that waits for the first one's prompt");
    assert!(!short.tokens().is_empty() && same.tokens().is_empty());
    finish(&mut engine, &[&first, &same, &behind, &short]);
    // Less than a page is not worth waiting for.
    same.finish(|finish| assert!(finish.reused > 499 - PAGE_SIZE));
    for (id, inbox, prompt) in [(0, &first, &long), (1, &same, &long), (2, &behind, &other)] {
        assert_alone(inbox, id, prompt, 5);
    }
}

#[test]
fn who_waits_for_pages_is_not_overtaken() {
    let config = EngineConfig { max_kv_tokens: 20 * PAGE_SIZE, ..toy::config(Rule::Coupled, toy::GAMMA) };
    let (mut engine, queue) = toy::with(config, ToyRunner::default(), Arc::default());
    let first = submit(&queue, 0, &prompt(200, 1), 40);
    let (large, small) = (submit(&queue, 1, &prompt(200, 2), 5), submit(&queue, 2, &[7, 8], 5));
    for _ in 0..10_000 {
        engine.step();
        assert!(small.tokens().is_empty() || first.is_over(), "it fits, and takes what the other waits for");
        if large.is_over() && small.is_over() {
            return;
        }
    }
    panic!("somebody waits for ever");
}

#[test]
fn short_prompts_get_through_beside_a_long_one_which_goes_on() {
    for at_parts in [false, true] {
        let config = EngineConfig {
            prefill_chunk_size: 64,
            max_batch_size: 200,
            max_kv_tokens: 100_000,
            ..toy::config(Rule::Coupled, toy::GAMMA)
        };
        let runner = ToyRunner { at_parts, ..ToyRunner::default() };
        let (caches, prefilled) = (runner.caches.clone(), runner.prefilled.clone());
        let (mut engine, queue) = toy::with(config, runner, Arc::default());
        let text = prompt(1000, 1);
        let long = submit(&queue, 0, &text, 5);
        engine.step();
        let mut shorts = Vec::new();
        for id in 1.. {
            // More than a chunk in every step, so that they take all that the long prompt leaves.
            let lengths = [14, 17, 70];
            for (i, length) in (0..).zip(lengths) {
                shorts.push((length, submit(&queue, 3 * id + i, &prompt(length, (3 * id + i) as u32), 1)));
            }
            let (rows, total) = (caches.lock().unwrap()[&0].rows.len(), *prefilled.lock().unwrap());
            engine.step();
            engine.audit().unwrap();
            assert!(*prefilled.lock().unwrap() - total <= 64, "a step's tokens");
            if !long.tokens().is_empty() {
                break;
            }
            assert!(caches.lock().unwrap()[&0].rows.len() >= (rows + 32).min(992), "the oldest goes on");
            // In the step after its arrival at the latest.
            assert!(id == 1 || shorts[shorts.len() - 6].1.is_over(), "a short prompt gets through");
        }
        finish(&mut engine, &shorts.iter().map(|(_, inbox)| inbox).chain([&long]).collect::<Vec<_>>());
        assert_alone(&long, 0, &text, 5);
    }
}

/// Prompts of equal length do not share a step: the last would be done no sooner, the others later.
#[test]
fn equal_prompts_go_one_after_the_other() {
    let config = EngineConfig { prefill_chunk_size: 50, ..toy::config(Rule::Coupled, toy::GAMMA) };
    let (mut engine, queue) = toy::with(config, ToyRunner::default(), Arc::default());
    let inboxes = [0, 1, 2].map(|id| submit(&queue, id, &prompt(100, id as u32 + 1), 40));
    for through in [0, 1, 1, 2, 2, 3] {
        engine.step();
        assert_eq!(inboxes.iter().filter(|inbox| !inbox.tokens().is_empty()).count(), through);
    }
}

/// A later prompt that was done first is still the one that makes room.
#[test]
fn the_last_admitted_gives_up_its_caches_though_its_prompt_was_through_first() {
    let config = EngineConfig {
        prefill_chunk_size: 32,
        max_kv_tokens: 41 * PAGE_SIZE,
        ..toy::config(Rule::Coupled, toy::GAMMA)
    };
    let (mut engine, queue) = toy::with(config, ToyRunner::default(), Arc::default());
    let (long, short) = (prompt(600, 1), prompt(27, 2));
    let inboxes = [submit(&queue, 0, &long, 20), submit(&queue, 1, &short, 90)];
    let mut through_first = false;
    while !inboxes[0].is_over() {
        engine.step();
        engine.audit().unwrap();
        through_first |= inboxes[0].tokens().is_empty() && !inboxes[1].tokens().is_empty();
    }
    finish(&mut engine, &[&inboxes[1]]);
    assert!(through_first);
    assert_eq!(inboxes[0].finish(|finish| finish.preemptions), 0, "the oldest always goes on");
    assert!(inboxes[1].finish(|finish| finish.preemptions) > 0);
    assert_alone(&inboxes[0], 0, &long, 20);
    assert_alone(&inboxes[1], 1, &short, 90);
}

/// A request that shares a prompt up to the page border can fork it there, wherever chunks were cut.
#[test]
fn the_end_of_a_prompt_is_not_cut_where_forks_need_its_beginning() {
    let text = prompt(40, 1);
    let other = [&text[..33], &[1, 2, 3, 4]].concat();
    // A chunk that is shorter than what is behind the border has to cut it.
    for chunk in (5..60).chain([512]) {
        let config = EngineConfig { prefill_chunk_size: chunk, ..toy::config(Rule::Coupled, toy::GAMMA) };
        let runner = ToyRunner { at_parts: true, ..ToyRunner::default() };
        let (mut engine, queue) = toy::with(config, runner, Arc::default());
        let first = submit(&queue, 0, &text, 50);
        while first.tokens().is_empty() {
            engine.step();
        }
        let second = submit(&queue, 1, &other, 5);
        finish(&mut engine, &[&first, &second]);
        assert!(chunk < 8 || second.finish(|finish| finish.reused) == 32, "{chunk}");
        assert_alone(&first, 0, &text, 50);
        assert_alone(&second, 1, &other, 5);
    }
}
