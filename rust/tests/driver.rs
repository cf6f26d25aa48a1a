//! Runs thousands of requests on a small engine, with everything that can happen to them. After every step
//! the engine's books are audited and the runner's caches compared with them, row by row; in the end every
//! text is that of the request alone.

mod toy;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use dspark_core::schedule::{CostTable, Policy};
use dspark_core::stop::{StopIds, StopStrings};
use toy::{Inbox, Letters, Random, ToyRunner};

/// What a request asks for; enough to make it again.
#[derive(Clone)]
struct Wish {
    id: RequestId,
    prompt: Vec<u32>,
    params: SamplingParams,
    max_tokens: usize,
    drafts: bool,
    stop_ids: Vec<u32>,
    stop: Option<String>,
}

impl Wish {
    /// A request much like others: prompts begin alike, continue an earlier text, or are the same.
    fn random(id: RequestId, random: &mut Random, told: &[Vec<u32>]) -> Wish {
        let tail = |random: &mut Random, most: usize| -> Vec<u32> {
            (0..random.below(most)).map(|_| random.below(toy::VOCAB - 1) as u32).collect()
        };
        let mut prompt = match random.below(4) {
            0 if !told.is_empty() => told[random.below(told.len())].clone(),
            1 => tail(random, 60),
            subject => (0..20 * random.below(6)).map(|i| (i * i + subject) as u32 % 10).collect(),
        };
        prompt.truncate(120);
        if prompt.is_empty() || random.chance(2) {
            prompt.extend(tail(random, 20));
            prompt.push(1);
        }
        let temperature = if random.chance(3) { 0.0 } else { 0.5 + random.below(10) as f64 / 10.0 };
        let params = SamplingParams {
            temperature,
            // The token that spoils the target's rows: most requests exclude it.
            logit_bias: if random.chance(6) { Vec::new() } else { vec![(toy::VOCAB as u32 - 1, -1e9)] },
            top_k: if random.chance(3) { 5 } else { 0 },
            repetition_penalty: if random.chance(4) { 1.2 } else { 1.0 },
            ..SamplingParams::default()
        };
        Wish {
            id,
            prompt,
            params,
            max_tokens: if random.chance(20) { random.below(3) } else { 1 + random.below(100) },
            drafts: !random.chance(4),
            stop_ids: if random.chance(8) { vec![random.below(toy::VOCAB) as u32] } else { Vec::new() },
            stop: random
                .chance(4)
                .then(|| tail(random, 4).iter().map(|&token| Letters::letter(token)).collect()),
        }
    }

    fn request(&self) -> (Request, Inbox) {
        let (mut request, inbox) = toy::request(self.id, &self.prompt, self.params.clone(), self.max_tokens);
        request.drafts = self.drafts;
        request.stop_ids = StopIds::new(&[], &self.stop_ids);
        let strings = self.stop.iter().filter(|string| !string.is_empty()).cloned().collect::<Vec<_>>();
        request.stop_text =
            (!strings.is_empty()).then(|| StopText::new(StopStrings::new(strings, false), Box::new(Letters)));
        (request, inbox)
    }
}

/// One way to run the engine.
#[derive(Clone)]
struct Setting {
    config: EngineConfig,
    at_parts: bool,
    confident: bool,
    /// One in this many calls of the runner fails.
    failing: Option<usize>,
}

impl Setting {
    fn runner(&self, failing: Option<Random>) -> ToyRunner {
        // Otherwise plain decoding is faster, and what is not drafted is not tested.
        let is_slow = failing.is_some() && matches!(self.config.policy, Policy::Throughput { .. });
        ToyRunner {
            error: 0.3,
            slow: Duration::from_micros(if is_slow { 50 } else { 0 }),
            // Not drawn for prompts, so that it is met in what is generated.
            poison: Some(toy::VOCAB as u32 - 1),
            at_parts: self.at_parts,
            confident: self.confident,
            failing: failing.zip(self.failing),
            ..ToyRunner::default()
        }
    }

    /// The outcome of a request that nothing disturbs.
    fn alone(&self, wish: &Wish) -> Inbox {
        let (mut engine, queue) = toy::with(self.config.clone(), self.runner(None), Arc::default());
        let (request, inbox) = wish.request();
        assert!(queue.submit(request).is_ok());
        while !inbox.is_over() {
            engine.step();
        }
        inbox
    }

    /// Whether a request's text has to depend on the request alone.
    fn is_exact(&self, wish: &Wish) -> bool {
        // With plans by throughput, or with a draft that fails, a request's rounds depend on the others.
        let looks_at_the_load =
            matches!(self.config.policy, Policy::Throughput { .. }) || self.failing.is_some();
        // A bad row fails the round that verifies it, and with it what the round would have kept before the row.
        let is_bad = wish.params.logit_bias.is_empty();
        let is_told = self.config.rule == Rule::Coupled || wish.params.temperature == 0.0;
        !looks_at_the_load || is_told && !is_bad
    }
}

/// The results of a run.
#[derive(Default, Debug)]
struct Seen {
    stats: Stats,
    refused: u64,
    /// Number of texts compared to the end, and of those compared up to where they were cut off.
    whole: usize,
    cut: usize,
}

/// Serves `count` random requests and compares everything.
fn drive(setting: &Setting, seed: u64, count: usize) -> Seen {
    let mut random = Random(seed);
    let runner = setting.runner(Some(Random(seed ^ 0xfa11)));
    let (caches, failed) = (runner.caches.clone(), runner.failed.clone());
    let stats = Arc::<StatsBoard>::default();
    let (mut engine, queue) = toy::with(setting.config.clone(), runner, stats.clone());
    let mut told = Vec::new();
    let mut live: Vec<(Wish, Inbox, Arc<std::sync::atomic::AtomicBool>)> = Vec::new();
    let mut ended: Vec<(Wish, Inbox)> = Vec::new();
    let mut next = 0;
    let mut refused = 0;
    for step in 0.. {
        assert!(step < 400 * count, "somebody waits for ever");
        // Bursts, and quiet times in which the engine runs empty.
        let burst = if random.chance(24) { random.below(8) } else { 0 };
        for _ in 0..burst.min(count.saturating_sub(next)) {
            let wish = Wish::random(next as RequestId, &mut random, &told);
            // The samples of one prompt come together.
            for _ in 0..if random.chance(5) { 3 } else { 1 } {
                let wish = Wish { id: next as RequestId, ..wish.clone() };
                let (mut request, inbox) = wish.request();
                if random.chance(12) {
                    // The deadline passes at once or never; ends in between are left to cancelled requests.
                    request.deadline =
                        Some(Instant::now() + Duration::from_secs(3600 * random.below(2) as u64));
                }
                let cancelled = request.cancelled.clone();
                next += 1;
                match queue.submit(request) {
                    Ok(()) => live.push((wish, inbox, cancelled)),
                    Err(failure) => {
                        assert!(matches!(failure, Failure::Capacity(_) | Failure::QueueFull(_)));
                        refused += 1;
                    }
                }
            }
        }
        if !live.is_empty() && random.chance(25) {
            live[random.below(live.len())].2.store(true, Ordering::Relaxed);
        }
        engine.step();
        compare(&engine, &caches.lock().unwrap(), setting.config.max_kv_tokens);
        for (wish, inbox, _) in live.extract_if(.., |(_, inbox, _)| inbox.is_over()) {
            told.push([wish.prompt.as_slice(), &inbox.tokens()].concat());
            ended.push((wish, inbox));
        }
        if next >= count && live.is_empty() {
            break;
        }
    }
    assert_eq!(queue.refused(), refused);
    let mut seen = Seen { stats: stats.read(), refused, ..Seen::default() };
    drop(engine);
    assert!(caches.lock().unwrap().is_empty(), "the runner still knows somebody");
    for (wish, inbox) in &ended {
        let failure = inbox.finish(|finish| matches!(finish.error, Some(Failure::Runner(_))));
        assert_eq!(failure, failed.lock().unwrap().contains(&wish.id), "a failure of {}'s own", wish.id);
        check(setting, wish, inbox, &mut seen);
    }
    seen
}

/// Compares the engine's books with what the runner has.
fn compare(engine: &Engine<ToyRunner>, caches: &HashMap<RequestId, toy::Caches>, total: usize) {
    engine.audit().unwrap();
    let mut reserved = 0;
    let mut known = 0;
    for (id, rows, positions) in engine.caches() {
        let cache = caches.get(&id).unwrap_or_else(|| panic!("the runner does not know request {id}"));
        assert_eq!(cache.rows, rows, "rows of request {id}");
        assert_eq!(cache.reserved, positions, "room of request {id}");
        reserved += positions;
        known += 1;
    }
    assert_eq!(known, caches.len(), "the runner knows somebody who has left");
    assert!(reserved <= total, "{reserved} positions of {total}");
}

/// Compares an outcome with that of the request alone.
fn check(setting: &Setting, wish: &Wish, inbox: &Inbox, seen: &mut Seen) {
    if !setting.is_exact(wish) {
        return;
    }
    let alone = setting.alone(wish);
    let (tokens, expected) = (inbox.tokens(), alone.tokens());
    let same = |a: &Finish, b: &Finish| a.reason == b.reason && a.stop == b.stop && a.error == b.error;
    let disturbed = inbox.finish(|finish| {
        let failed = matches!(finish.error, Some(Failure::Runner(_)));
        failed || finish.reason == FinishReason::Abort
    });
    if disturbed {
        assert!(expected.starts_with(&tokens), "request {}: {tokens:?} of {expected:?}", wish.id);
        seen.cut += 1;
    } else {
        assert_eq!(tokens, expected, "request {}", wish.id);
        assert_eq!(inbox.text(), alone.text(), "request {}", wish.id);
        inbox.finish(|finish| alone.finish(|alone| assert!(same(finish, alone), "{finish:?}\n{alone:?}")));
        seen.whole += 1;
    }
}

fn settings() -> Vec<Setting> {
    let table = CostTable::new(&[(1, 0.010), (8, 0.011), (16, 0.013), (32, 0.018)]).unwrap();
    let policies = [
        Policy::Fixed,
        Policy::Threshold(0.55),
        Policy::Throughput { cost: table.clone(), lag: NonZeroUsize::new(1) },
        Policy::Throughput { cost: table, lag: None },
    ];
    let mut settings = Vec::new();
    for rule in [Rule::Rejection, Rule::Block, Rule::Coupled] {
        for policy in &policies {
            for at_parts in [false, true] {
                for failing in [None, Some(300)] {
                    let config = EngineConfig {
                        policy: policy.clone(),
                        max_batch_size: 8,
                        prefill_chunk_size: if at_parts { 24 } else { 40 },
                        max_kv_tokens: 300,
                        max_queue_size: 10,
                        ..toy::config(rule, toy::GAMMA)
                    };
                    let confident = !matches!(policy, Policy::Fixed);
                    settings.push(Setting { config, at_parts, confident, failing });
                }
            }
        }
    }
    settings
}

#[test]
fn whatever_happens_the_books_add_up_and_texts_are_those_of_the_request_alone() {
    for (i, setting) in settings().iter().enumerate() {
        let seen = drive(setting, 1000 + i as u64, 400);
        let Stats { preemptions, reused_tokens, .. } = seen.stats;
        println!(
            "{i}: {preemptions} preemptions, {reused_tokens} reused, {} refused, {} whole, {} cut",
            seen.refused, seen.whole, seen.cut
        );
        // A run in which nothing happened proves nothing.
        assert!(preemptions > 3 && reused_tokens > 500 && seen.refused > 3, "{seen:?}");
        assert!(seen.whole > 10 && seen.cut > 3, "{seen:?}");
        let Stats { drafted, draft_failures, skipped, .. } = seen.stats;
        let is_planned = matches!(setting.config.policy, Policy::Throughput { .. });
        assert!(drafted > if is_planned { 200 } else { 2000 }, "{seen:?}");
        assert!(draft_failures == 0 || setting.failing.is_some(), "{seen:?}");
        assert!(draft_failures > 0 || setting.failing.is_none() || is_planned, "{seen:?}");
        assert!((skipped.broken > 0) == (draft_failures > 0), "{seen:?}");
        println!("{i}: {drafted} drafted, {draft_failures} drafts failed");
    }
}
