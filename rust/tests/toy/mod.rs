//! A toy to run the engine over, and what tests need to talk to it.

#![allow(dead_code, unused_imports, reason = "each test uses its part of it")]

mod runner;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::noise::Noise;
use dspark_core::params::SamplingParams;
use dspark_core::schedule::Policy;
use dspark_core::stop::StopIds;

pub use runner::{Caches, GAMMA, Random, ToyRunner, VOCAB};

/// Collects a request's updates.
#[derive(Clone, Default)]
pub struct Inbox(Arc<Mutex<Update>>);

impl Sink for Inbox {
    fn update(&mut self, update: Update) {
        self.0.lock().unwrap().merge(update);
    }
}

impl Inbox {
    pub fn tokens(&self) -> Vec<u32> {
        self.0.lock().unwrap().tokens.clone()
    }

    pub fn text(&self) -> Option<String> {
        self.0.lock().unwrap().text.clone()
    }

    pub fn is_over(&self) -> bool {
        self.0.lock().unwrap().finish.is_some()
    }

    pub fn finish<T>(&self, read: impl FnOnce(&Finish) -> T) -> T {
        read(self.0.lock().unwrap().finish.as_ref().expect("the request has ended"))
    }
}

/// The configuration of a small engine.
pub fn config(rule: Rule, block_size: usize) -> EngineConfig {
    EngineConfig {
        rule,
        policy: Policy::Fixed,
        gamma: GAMMA,
        block_size,
        markov_candidates: None,
        calibrations: Vec::new(),
        max_batch_size: 8,
        prefill_chunk_size: 5,
        max_kv_tokens: 4096,
        max_queue_size: 64,
    }
}

/// An engine over the toy model, with a block of `block_size`.
pub fn engine(rule: Rule, block_size: usize, runner: ToyRunner) -> (Engine<ToyRunner>, Arc<Queue>) {
    with(config(rule, block_size), runner, Arc::default())
}

/// An engine over the toy model.
pub fn with(
    config: EngineConfig,
    runner: ToyRunner,
    stats: Arc<StatsBoard>,
) -> (Engine<ToyRunner>, Arc<Queue>) {
    let queue = Arc::new(Queue::new(&config));
    (Engine::new(config, runner, queue.clone(), stats), queue)
}

/// A request without stops.
pub fn request(id: RequestId, prompt: &[u32], params: SamplingParams, max_tokens: usize) -> (Request, Inbox) {
    let inbox = Inbox::default();
    let request = Request {
        id,
        prompt: prompt.to_vec(),
        params,
        drafts: true,
        noise: Noise { seed: 7 + id, sample: 0 },
        max_tokens,
        stop_ids: StopIds::default(),
        stop_text: None,
        deadline: None,
        submitted: Instant::now(),
        cancelled: Arc::new(AtomicBool::new(false)),
        sink: Box::new(inbox.clone()),
    };
    (request, inbox)
}

/// Runs requests together until all have ended.
pub fn serve(rule: Rule, block_size: usize, runner: ToyRunner, requests: Vec<Request>, inboxes: &[Inbox]) {
    let (mut engine, queue) = engine(rule, block_size, runner);
    for request in requests {
        assert!(queue.submit(request).is_ok());
    }
    for _ in 0..10_000 {
        if inboxes.iter().all(Inbox::is_over) {
            return;
        }
        engine.step();
    }
    panic!("a request never ended");
}

/// Shows tokens as letters.
pub struct Letters;

impl Letters {
    pub fn letter(token: u32) -> char {
        char::from(b'a' + token as u8)
    }
}

impl Detokenizer for Letters {
    fn push(&mut self, token: u32) -> String {
        Letters::letter(token).to_string()
    }

    fn flush(&mut self) -> String {
        String::new()
    }
}
