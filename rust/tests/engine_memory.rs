//! Many requests in little memory: which are refused or make room, and what is computed once for several.

mod toy;

use std::sync::Arc;

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use toy::{Inbox, ToyRunner, request, serve};

#[test]
fn what_never_fits_is_refused_and_too_many_as_well() {
    let small =
        EngineConfig { max_kv_tokens: 50, max_queue_size: 2, ..toy::config(Rule::Rejection, toy::GAMMA) };
    let (mut engine, queue) = toy::with(small, ToyRunner::default(), Arc::default());
    let submit =
        |id, max_tokens| queue.submit(request(id, &[3; 30], SamplingParams::default(), max_tokens).0);
    // Three whole pages.
    assert!(
        matches!(submit(1, 19), Err(Failure::Capacity(message)) if message.contains("max_kv_tokens = 50"))
    );
    assert!(submit(2, 18).is_ok() && submit(3, 18).is_ok());
    assert!(
        matches!(submit(4, 1), Err(Failure::QueueFull(message)) if message.contains("max_queue_size = 2"))
    );
    engine.step();
    assert!(submit(5, 1).is_ok(), "one has left the queue");
    assert_eq!(queue.refused(), 2);
}

#[test]
fn two_that_do_not_fit_together_take_turns_without_loss() {
    let small = EngineConfig {
        max_kv_tokens: 128,
        prefill_chunk_size: 64,
        ..toy::config(Rule::Rejection, toy::GAMMA)
    };
    let stats = Arc::<StatsBoard>::default();
    let (mut engine, queue) = toy::with(small, ToyRunner::default(), stats.clone());
    let prompts: [&[u32]; 2] = [&[3; 20], &[4; 20]];
    let make = |id: u64| request(id, prompts[id as usize], SamplingParams::default(), 90);
    let (requests, inboxes): (Vec<_>, Vec<_>) = [make(0), make(1)].into_iter().unzip();
    for request in requests {
        assert!(queue.submit(request).is_ok());
    }
    engine.step();
    assert!(inboxes.iter().all(|inbox| !inbox.tokens().is_empty()), "both start: a grant is no demand");
    while !inboxes.iter().all(Inbox::is_over) {
        engine.step();
        engine.audit().unwrap();
    }
    assert_eq!(inboxes[0].finish(|finish| finish.preemptions), 0, "the oldest always goes on");
    assert!(inboxes[1].finish(|finish| finish.preemptions) > 0);
    assert!(stats.read().preemptions > 0);
    for (id, inbox) in inboxes.iter().enumerate() {
        let (request, own) = make(id as u64);
        serve(Rule::Rejection, toy::GAMMA, ToyRunner::default(), vec![request], std::slice::from_ref(&own));
        assert_eq!(inbox.tokens(), own.tokens());
        inbox.finish(|finish| own.finish(|own| assert_eq!(finish.rounds, own.rounds)));
    }
}

/// Runs two requests, one after the other or both at once; returns how many tokens went through the target in
/// prefills, and how many of the second prompt were reused.
fn twice(at_parts: bool, together: bool, prompts: [&[u32]; 2], drafts: [bool; 2]) -> (usize, usize) {
    let runner = ToyRunner { at_parts, ..ToyRunner::default() };
    let prefilled = runner.prefilled.clone();
    let config = EngineConfig { prefill_chunk_size: 64, ..toy::config(Rule::Coupled, toy::GAMMA) };
    let (mut engine, queue) = toy::with(config, runner, Arc::default());
    let inboxes = [0, 1].map(|i| {
        let (mut request, inbox) = request(i as u64, prompts[i], SamplingParams::default(), 8);
        request.drafts = drafts[i];
        assert!(queue.submit(request).is_ok());
        while !together && !inbox.is_over() {
            engine.step();
        }
        inbox
    });
    while !inboxes.iter().all(Inbox::is_over) {
        engine.step();
        engine.audit().unwrap();
    }
    let (request, own) = request(1, prompts[1], SamplingParams::default(), 8);
    serve(Rule::Coupled, 0, ToyRunner::default(), vec![request], std::slice::from_ref(&own));
    assert_eq!(inboxes[1].tokens(), own.tokens());
    (*prefilled.lock().unwrap(), inboxes[1].finish(|finish| finish.reused))
}

#[test]
fn a_prompt_goes_through_the_target_once() {
    let prompt: Vec<u32> = (0..40).map(|i| i * i % 11).collect();
    let longer = [prompt.as_slice(), &[1, 2, 3, 4]].concat();
    let other = [&prompt[..36], &[1, 2, 3, 4]].concat();
    let both = [true, true];
    for together in [false, true] {
        assert_eq!(twice(false, together, [&prompt, &prompt], both), (41, 39));
        assert_eq!(twice(false, together, [&prompt, &longer], both), (44, 40));
        assert_eq!(twice(false, together, [&prompt, &other], both), (44, 36));
        // Recurrent states: the last page border before the prompt's end.
        assert_eq!(twice(true, together, [&prompt, &prompt], both), (48, 32));
        assert_eq!(twice(true, together, [&prompt, &prompt[..32]], both), (40 + 32, 0));
        // A draft context cannot come from a request without one; the other way round, it can be left out.
        assert_eq!(twice(false, together, [&prompt, &prompt], [false, true]), (80, 0));
        assert_eq!(twice(false, together, [&prompt, &prompt], [true, false]), (41, 39));
        // Less than a page is not worth a copy.
        assert_eq!(twice(false, together, [&prompt[..16], &prompt[..16]], both), (32, 0));
    }
}

/// Runs one request alone, then others together; returns how many tokens went through the target in prefills,
/// and which caches were released.
fn behind(runner: ToyRunner, first: &[u32], prompts: &[&[u32]]) -> (usize, Vec<RequestId>) {
    let (prefilled, released) = (runner.prefilled.clone(), runner.released.clone());
    let config = EngineConfig { prefill_chunk_size: 64, ..toy::config(Rule::Coupled, toy::GAMMA) };
    let (mut engine, queue) = toy::with(config, runner, Arc::default());
    for (start, prompts) in [(0, &[first][..]), (1, prompts)] {
        let submit = |(id, prompt): (u64, &&[u32])| {
            let (request, inbox) = request(id, prompt, SamplingParams::default(), 8);
            assert!(queue.submit(request).is_ok());
            inbox
        };
        let inboxes: Vec<_> = (start..).zip(prompts).map(submit).collect();
        while !inboxes.iter().all(Inbox::is_over) {
            engine.step();
            engine.audit().unwrap();
        }
    }
    (*prefilled.lock().unwrap(), released.lock().unwrap().clone())
}

#[test]
fn a_source_that_refused_a_fork_is_not_believed_again() {
    let system: Vec<u32> = (0..40).map(|i| i * i % 11).collect();
    let long = [system.as_slice(), &[7; 60]].concat();
    let short: Vec<_> = (1..4).map(|last| [system.as_slice(), &[last, last]].concat()).collect();
    let prompts: Vec<_> = short.iter().map(Vec::as_slice).collect();
    // The source has forgotten too much, so the first computes the prompt, and the others wait for that one.
    let forgets = ToyRunner { window: Some(40), ..ToyRunner::default() };
    assert_eq!(behind(forgets, &long, &prompts).0, 100 + 42 + 2 + 2);
    assert_eq!(behind(ToyRunner::default(), &long, &prompts).0, 100 + 2 + 2 + 2);
}

#[test]
fn what_can_never_be_forked_is_neither_kept_nor_waited_for() {
    let runner = ToyRunner { never_forks: true, ..ToyRunner::default() };
    let (prefilled, released) = behind(runner, &[3; 40], &[&[3; 40], &[3; 40]]);
    assert_eq!((prefilled, released.len()), (3 * 40, 3));
}

/// In a chat, a turn without the draft reuses what is kept, and leaves the draft's context to the next turn.
#[test]
fn a_turn_without_the_draft_does_not_cost_the_others_their_context() {
    let config = EngineConfig { prefill_chunk_size: 64, ..toy::config(Rule::Coupled, toy::GAMMA) };
    let (mut engine, queue) = toy::with(config, ToyRunner::default(), Arc::default());
    let mut text: Vec<u32> = (0..40).map(|i| i * i % 11).collect();
    let mut reused = Vec::new();
    for (id, drafts) in [true, false, true].into_iter().enumerate() {
        let (mut turn, inbox) = request(id as u64, &text, SamplingParams::default(), 8);
        turn.drafts = drafts;
        assert!(queue.submit(turn).is_ok());
        while !inbox.is_over() {
            engine.step();
            engine.audit().unwrap();
        }
        reused.push(inbox.finish(|finish| finish.reused));
        // The others continue all that the first one's caches hold.
        if id == 0 {
            text.extend(inbox.tokens());
        }
        text.push(1);
    }
    assert!(reused[0] == 0 && reused[1] > 40 && reused[2] == reused[1], "{reused:?}");
}

#[test]
fn a_preempted_request_can_be_cancelled_where_it_waits() {
    let small = EngineConfig {
        max_kv_tokens: 128,
        prefill_chunk_size: 64,
        ..toy::config(Rule::Rejection, toy::GAMMA)
    };
    let stats = Arc::<StatsBoard>::default();
    let (mut engine, queue) = toy::with(small, ToyRunner::default(), stats.clone());
    let (first, first_inbox) = request(1, &[3; 20], SamplingParams::default(), 90);
    let (second, second_inbox) = request(2, &[4; 20], SamplingParams::default(), 90);
    let cancelled = second.cancelled.clone();
    assert!(queue.submit(first).is_ok() && queue.submit(second).is_ok());
    while stats.read().preempted == 0 {
        engine.step();
    }
    cancelled.store(true, std::sync::atomic::Ordering::Relaxed);
    engine.step();
    second_inbox.finish(|finish| assert_eq!(finish.reason, FinishReason::Abort));
    assert!(!first_inbox.is_over() && stats.read().preempted == 0);
    engine.audit().unwrap();
}
