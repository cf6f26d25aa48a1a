//! The round loop over a toy model: what is committed, where requests stop, and what clients are told.

mod toy;

use std::sync::atomic::Ordering;

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use dspark_core::stop::{StopIds, StopStrings};
use toy::{Inbox, Letters, ToyRunner, engine, request, serve};

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

fn draft_with(error: f64) -> ToyRunner {
    ToyRunner { error, ..ToyRunner::default() }
}

fn alone(rule: Rule, block_size: usize, error: f64, params: SamplingParams, max_tokens: usize) -> Inbox {
    let (request, inbox) = request(1, &[3, 1, 4], params, max_tokens);
    serve(rule, block_size, draft_with(error), vec![request], std::slice::from_ref(&inbox));
    inbox
}

#[test]
fn greedy_text_does_not_depend_on_the_draft() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    assert_eq!(plain.len(), 40);
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        for block_size in 1..=toy::GAMMA {
            for error in [0.0, 0.3, 3.0] {
                assert_eq!(alone(rule, block_size, error, greedy(), 40).tokens(), plain, "{rule:?} {error}");
            }
        }
    }
}

#[test]
fn a_request_may_decline_the_draft() {
    let (mut plain, plain_inbox) = request(1, &[3, 1, 4], greedy(), 20);
    plain.drafts = false;
    let (other, other_inbox) = request(2, &[3, 1, 4], greedy(), 20);
    let inboxes = [plain_inbox, other_inbox];
    serve(Rule::Rejection, toy::GAMMA, draft_with(0.0), vec![plain, other], &inboxes);
    assert_eq!(inboxes[0].tokens(), inboxes[1].tokens());
    inboxes[0].finish(|finish| assert!(finish.rounds.iter().all(|round| round.drafted == 0)));
    inboxes[1].finish(|finish| assert!(finish.rounds.iter().any(|round| round.drafted > 0)));
}

#[test]
fn something_is_accepted_and_rounds_add_up() {
    let inbox = alone(Rule::Rejection, toy::GAMMA, 0.0, greedy(), 40);
    inbox.finish(|finish| {
        assert_eq!(finish.reason, FinishReason::Length);
        assert!(finish.rounds.iter().any(|round| round.accepted > 0));
        let committed: usize = finish.rounds.iter().map(|round| round.committed).sum();
        assert_eq!(committed + 1, 40, "the prefill's token belongs to no round");
        for round in &finish.rounds {
            assert!(round.accepted <= round.verified && round.verified <= round.drafted);
            assert_eq!(round.committed, round.accepted + 1);
        }
    });
}

#[test]
fn coupled_text_is_that_of_no_draft_at_any_temperature() {
    for temperature in [0.7, 1.0, 1.5] {
        let params = SamplingParams { temperature, top_k: 6, ..SamplingParams::default() };
        let plain = alone(Rule::Coupled, 0, 0.0, params.clone(), 60).tokens();
        for error in [0.0, 0.4] {
            assert_eq!(alone(Rule::Coupled, toy::GAMMA, error, params.clone(), 60).tokens(), plain);
        }
    }
}

#[test]
fn a_request_does_not_see_its_neighbours() {
    let prompts: [&[u32]; 4] = [&[1], &[2, 3, 4, 5, 6, 7, 8], &[9, 9], &[5]];
    let limits = [3, 25, 17, 1];
    let make = |i: usize| request(i as u64, prompts[i], SamplingParams::default(), limits[i]);
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        let (together, boxes): (Vec<_>, Vec<_>) = (0..4).map(make).unzip();
        serve(rule, toy::GAMMA, draft_with(0.4), together, &boxes);
        for (i, inbox) in boxes.iter().enumerate() {
            let (request, own) = make(i);
            serve(rule, toy::GAMMA, draft_with(0.4), vec![request], std::slice::from_ref(&own));
            assert_eq!(inbox.tokens(), own.tokens(), "request {i}");
            assert_eq!(inbox.tokens().len(), limits[i]);
        }
    }
}

#[test]
fn max_tokens_is_exact() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 12).tokens();
    for max_tokens in 0..12 {
        let inbox = alone(Rule::Rejection, toy::GAMMA, 0.0, greedy(), max_tokens);
        assert_eq!(inbox.tokens(), plain[..max_tokens]);
        inbox.finish(|finish| assert_eq!(finish.reason, FinishReason::Length));
    }
}

#[test]
fn an_end_token_ends_wherever_it_comes() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    // Every index of the text, and with it every slot of a block and the bonus.
    for end in plain.clone() {
        let first = plain.iter().position(|&token| token == end).unwrap();
        for own in [false, true] {
            let (mut request, inbox) = request(1, &[3, 1, 4], greedy(), 40);
            let ids = [end, 10_000];
            request.stop_ids = if own { StopIds::new(&[], &ids) } else { StopIds::new(&ids, &[]) };
            serve(Rule::Rejection, toy::GAMMA, draft_with(0.0), vec![request], std::slice::from_ref(&inbox));
            assert_eq!(inbox.tokens(), plain[..=first]);
            inbox.finish(|finish| {
                assert_eq!(finish.reason, FinishReason::Stop);
                assert_eq!(finish.stop, own.then_some(StopReason::Token(end)));
                let committed: usize = finish.rounds.iter().map(|round| round.committed).sum();
                assert_eq!(committed, first, "nothing after the end is counted");
                assert!(finish.rounds.iter().all(|round| round.accepted <= round.committed));
            });
        }
    }
}

#[test]
fn min_tokens_keeps_the_end_away() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    let params = SamplingParams { min_tokens: 9, stop_token_ids: vec![plain[0]], ..greedy() };
    let (mut request, inbox) = request(1, &[3, 1, 4], params, 40);
    request.stop_ids = StopIds::new(&[plain[0]], &[]);
    serve(Rule::Rejection, toy::GAMMA, draft_with(0.0), vec![request], std::slice::from_ref(&inbox));
    assert!(inbox.tokens().len() >= 9);
    assert!(!inbox.tokens()[..9].contains(&plain[0]));
}

#[test]
fn a_stop_string_is_found_across_rounds_and_cut_out() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    let text: String = plain.iter().map(|&token| Letters::letter(token)).collect();
    for start in 0..plain.len() - 3 {
        let string = text[start..start + 3].to_owned();
        let at = text.find(&string).unwrap();
        let (mut request, inbox) = request(1, &[3, 1, 4], greedy(), 40);
        request.stop_text =
            Some(StopText::new(StopStrings::new(vec![string.clone()], false), Box::new(Letters)));
        serve(Rule::Rejection, toy::GAMMA, draft_with(0.0), vec![request], std::slice::from_ref(&inbox));
        assert_eq!(inbox.tokens(), plain[..at + 3]);
        assert_eq!(inbox.text().unwrap(), text[..at]);
        inbox.finish(|finish| assert_eq!(finish.stop, Some(StopReason::Text(string))));
    }
}

#[test]
fn min_tokens_holds_for_stop_strings() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    let text: String = plain.iter().map(|&token| Letters::letter(token)).collect();
    assert_eq!(text.find(&text[..3]), text.rfind(&text[..3]), "it comes once");
    for (min_tokens, expected) in [(2, 3), (3, 3), (4, 40)] {
        let params = SamplingParams { min_tokens, ..greedy() };
        let (mut request, inbox) = request(1, &[3, 1, 4], params, 40);
        let strings = StopStrings::new(vec![text[..3].to_owned()], false);
        request.stop_text = Some(StopText::new(strings, Box::new(Letters)));
        serve(Rule::Rejection, toy::GAMMA, draft_with(0.0), vec![request], std::slice::from_ref(&inbox));
        assert_eq!(inbox.tokens(), plain[..expected], "{min_tokens}");
        assert_eq!(inbox.text().unwrap(), if expected == 3 { "" } else { &text });
    }
}

#[test]
fn a_stop_string_that_ends_with_a_stop_id_is_cut_out_too() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    let text: String = plain.iter().map(|&token| Letters::letter(token)).collect();
    for at in 2..plain.len() {
        let first = plain.iter().position(|&token| token == plain[at]).unwrap();
        if first < 2 {
            continue;
        }
        let (mut request, inbox) = request(1, &[3, 1, 4], greedy(), 40);
        request.stop_ids = StopIds::new(&[], &[plain[at]]);
        let string = text[first - 2..=first].to_owned();
        request.stop_text = Some(StopText::new(StopStrings::new(vec![string], false), Box::new(Letters)));
        serve(Rule::Rejection, toy::GAMMA, draft_with(0.0), vec![request], std::slice::from_ref(&inbox));
        assert_eq!(inbox.text().unwrap(), text[..first - 2]);
        inbox.finish(|finish| assert_eq!(finish.stop, Some(StopReason::Token(plain[at]))));
    }
}

/// In a pass over two requests, NaN, plus infinity or minus infinities alone end the one they belong to.
#[test]
fn useless_logits_fail_their_own_request_only() {
    let plain = alone(Rule::Rejection, 0, 0.0, greedy(), 40).tokens();
    let poison = plain[5];
    let reach = plain.iter().position(|&token| token == poison).unwrap();
    let mut infinite = vec![0.0; toy::VOCAB];
    infinite[3] = f64::INFINITY;
    for (row, why) in [
        (vec![f64::NAN; toy::VOCAB], "NaN"),
        (infinite, "plus infinity"),
        (vec![f64::NEG_INFINITY; toy::VOCAB], "no candidate"),
    ] {
        let (bad, bad_inbox) = request(1, &[3, 1, 4], greedy(), 40);
        let (good, good_inbox) =
            request(2, &[poison + 1], SamplingParams { logit_bias: vec![(poison, -1e9)], ..greedy() }, 40);
        let runner = ToyRunner { poison: Some(poison), poisoned: Some(row), ..ToyRunner::default() };
        serve(Rule::Rejection, toy::GAMMA, runner, vec![bad, good], &[bad_inbox.clone(), good_inbox.clone()]);
        bad_inbox.finish(|finish| {
            assert_eq!(finish.reason, FinishReason::Error);
            let Some(Failure::Numerics(message)) = &finish.error else { panic!("{:?}", finish.error) };
            assert!(message.contains(why), "{message}");
        });
        let committed = bad_inbox.tokens();
        let before = &plain[..=reach];
        assert!(!committed.is_empty() && before.starts_with(&committed), "what was committed before stays");
        assert_eq!(good_inbox.tokens().len(), 40);
    }
}

/// A row that leaves a single token is still one to draw from.
#[test]
fn a_row_with_one_token_left_gives_it() {
    let mut row = vec![f64::NEG_INFINITY; toy::VOCAB];
    row[3] = -5.0;
    let (request, inbox) = request(1, &[1], greedy(), 2);
    let runner = ToyRunner { poison: Some(1), poisoned: Some(row), ..ToyRunner::default() };
    serve(Rule::Rejection, toy::GAMMA, runner, vec![request], std::slice::from_ref(&inbox));
    assert_eq!(inbox.tokens()[0], 3);
}

#[test]
fn a_failed_pass_ends_its_requests_and_the_engine_goes_on() {
    let (request, inbox) = request(1, &[3], greedy(), 9);
    let runner = ToyRunner { fail_verify: true, ..ToyRunner::default() };
    let released = runner.released.clone();
    serve(Rule::Rejection, toy::GAMMA, runner, vec![request], std::slice::from_ref(&inbox));
    inbox.finish(|finish| assert_eq!(finish.error, Some(Failure::Runner("out of memory".into()))));
    assert_eq!(*released.lock().unwrap(), [1]);
}

#[test]
fn cancelled_requests_leave_within_a_round_and_closing_aborts_the_rest() {
    let (mut engine, queue) = engine(Rule::Rejection, toy::GAMMA, draft_with(0.0));
    let (running, running_inbox) = request(1, &[3], SamplingParams::default(), 1000);
    let (other, other_inbox) = request(2, &[4], SamplingParams::default(), 1000);
    let cancelled = running.cancelled.clone();
    assert!(queue.submit(running).is_ok() && queue.submit(other).is_ok());
    engine.step();
    engine.step();
    cancelled.store(true, Ordering::Relaxed);
    let before = running_inbox.tokens().len();
    engine.step();
    assert_eq!(running_inbox.tokens().len(), before);
    running_inbox.finish(|finish| assert_eq!(finish.reason, FinishReason::Abort));
    assert!(!other_inbox.is_over());
    let (late, late_inbox) = request(3, &[4], SamplingParams::default(), 1000);
    assert!(queue.submit(late).is_ok());
    queue.close();
    drop(engine);
    for inbox in [other_inbox, late_inbox] {
        inbox.finish(|finish| assert_eq!(finish.reason, FinishReason::Abort));
    }
    let (refused, _) = request(4, &[4], SamplingParams::default(), 10);
    assert!(queue.submit(refused).is_err());
}

#[test]
fn many_threads_use_one_engine_and_it_closes_while_busy() {
    let (mut engine, queue) = engine(Rule::Rejection, toy::GAMMA, draft_with(0.3));
    let serving = std::thread::spawn(move || engine.run());
    let clients: Vec<_> = (0..4u64)
        .map(|client| {
            let queue = queue.clone();
            std::thread::spawn(move || {
                let mut inboxes = Vec::new();
                for turn in 0..40u64 {
                    let (request, inbox) = request(client * 100 + turn, &[3; 20], greedy(), 30);
                    let cancelled = request.cancelled.clone();
                    if queue.submit(request).is_err() {
                        break;
                    }
                    if turn % 5 == 0 {
                        cancelled.store(true, Ordering::Relaxed);
                    } else if turn < 20 {
                        while !inbox.is_over() {
                            std::thread::yield_now();
                        }
                    }
                    inboxes.push(inbox);
                }
                inboxes
            })
        })
        .collect();
    let inboxes: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    queue.close();
    serving.join().unwrap();
    let whole = inboxes.iter().filter(|inbox| inbox.tokens().len() == 30).count();
    assert!(whole >= 4 * 16, "{whole} were waited for");
    for inbox in &inboxes {
        // The engine is gone, and every client was told.
        inbox.finish(|finish| assert!(matches!(finish.reason, FinishReason::Length | FinishReason::Abort)));
    }
}

/// If the runner judges some requests' rows and the core the others', all get what the core gives them.
#[test]
fn a_runner_may_decide_about_some_requests() {
    for rule in [Rule::Rejection, Rule::Coupled] {
        let run = |decides_above| {
            let runner = ToyRunner { error: 0.4, decides_above, confident: true, ..ToyRunner::default() };
            let (decided, stats) = (runner.decided.clone(), std::sync::Arc::<StatsBoard>::default());
            let (mut engine, queue) = toy::with(toy::config(rule, toy::GAMMA), runner, stats.clone());
            let temperatures = [0.0, 0.5, 0.9, 1.4];
            let inboxes: Vec<_> = (1..)
                .zip(temperatures)
                .map(|(id, temperature)| {
                    let params =
                        SamplingParams { temperature, frequency_penalty: 0.3, ..SamplingParams::default() };
                    let (request, inbox) = request(id, &[3, 1, 4], params, 30);
                    assert!(queue.submit(request).is_ok());
                    inbox
                })
                .collect();
            while !inboxes.iter().all(Inbox::is_over) {
                engine.step();
            }
            let rounds = |inbox: &Inbox| inbox.finish(|finish| finish.rounds.clone());
            let results: Vec<_> = inboxes.iter().map(|inbox| (inbox.tokens(), rounds(inbox))).collect();
            (results, *decided.lock().unwrap(), stats.read().close)
        };
        let (by_core, nothing, close) = run(None);
        assert_eq!((nothing, close), ((0, 0), 0));
        for bound in [0.7, -1.0] {
            let (found, (drawn, judged), close) = run(Some(bound));
            assert_eq!(found, by_core, "{rule:?}");
            assert!(drawn > 10 && judged > drawn, "first tokens are judged too");
            assert_eq!(close, judged as u64);
        }
    }
}

#[test]
fn a_row_that_a_runner_cannot_judge_ends_its_request() {
    let runner = ToyRunner { poison: Some(1), decides_above: Some(-1.0), ..ToyRunner::default() };
    let (request, inbox) = request(1, &[3, 1], greedy(), 9);
    serve(Rule::Rejection, toy::GAMMA, runner, vec![request], std::slice::from_ref(&inbox));
    inbox.finish(|finish| assert!(matches!(finish.error, Some(Failure::Numerics(_)))));
}

/// If the runner fails to judge, at whatever call, the requests that it judges end; those of the core go on.
#[test]
fn a_runner_that_fails_to_judge_ends_those_of_which_it_decides() {
    for call in 1..=5 {
        let run = |fails_once| {
            let runner = ToyRunner {
                error: 0.4,
                decides_above: Some(0.7),
                confident: true,
                fails_once,
                ..ToyRunner::default()
            };
            let hot = |id| request(id, &[3, 1, 4], SamplingParams::default(), 30);
            let (hosted, inbox) = request(2, &[3, 1, 4], greedy(), 30);
            let ((first, first_inbox), (last, last_inbox)) = (hot(1), hot(3));
            let inboxes = [first_inbox, inbox, last_inbox];
            serve(Rule::Rejection, toy::GAMMA, runner, vec![first, hosted, last], &inboxes);
            inboxes
        };
        let (whole, found) = (run(None), run(Some(("judge", call))));
        assert_eq!(found[1].tokens(), whole[1].tokens(), "{call}");
        let error = Some(Failure::Runner("judge failed".into()));
        let mut ended = 0;
        for (hot, whole) in [(&found[0], &whole[0]), (&found[2], &whole[2])] {
            // The first calls are about one prompt alone.
            if hot.finish(|finish| finish.error.is_none()) {
                assert_eq!(hot.tokens(), whole.tokens(), "{call}");
                continue;
            }
            ended += 1;
            hot.finish(|finish| assert_eq!(finish.error, error, "{call}"));
            assert!(hot.tokens().len() < 30 && whole.tokens().starts_with(&hot.tokens()));
        }
        assert!(ended == 2 || (ended == 1 && call <= 3), "{call}: {ended} ended");
    }
}

#[test]
fn a_prompt_that_fails_is_its_own_requests_alone() {
    let prompts: [&[u32]; 3] = [&[3, 1], &[4], &[5, 9]];
    let make = |id: u64| request(id, prompts[id as usize], greedy(), 12);
    let (requests, inboxes): (Vec<_>, Vec<_>) = (0..3).map(make).unzip();
    let runner = ToyRunner { fail_prefill: Some(1), ..ToyRunner::default() };
    let prefilled = runner.prefilled.clone();
    serve(Rule::Rejection, toy::GAMMA, runner, requests, &inboxes);
    inboxes[1].finish(|finish| assert_eq!(finish.error, Some(Failure::Runner("prefill failed".into()))));
    for id in [0, 2] {
        let (request, own) = make(id);
        serve(Rule::Rejection, toy::GAMMA, ToyRunner::default(), vec![request], std::slice::from_ref(&own));
        assert_eq!(inboxes[id as usize].tokens(), own.tokens());
    }
    assert_eq!(*prefilled.lock().unwrap(), 4, "nothing goes through the target twice");
}
