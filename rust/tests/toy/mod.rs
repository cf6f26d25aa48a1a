//! A model small enough to check by hand: logits are a fixed function of the last two tokens.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dspark_core::accept::Rule;
use dspark_core::chain::Heads;
use dspark_core::engine::*;
use dspark_core::noise::Noise;
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Rows};
use dspark_core::schedule::Policy;
use dspark_core::stop::StopIds;

pub const VOCAB: usize = 11;
pub const GAMMA: usize = 4;

/// Rows that a toy pass leaves.
pub struct Owned(Vec<f64>);

impl PassRows for Owned {
    fn rows(&self) -> Rows<'_> {
        Rows::F64(Matrix::contiguous(&self.0, VOCAB))
    }
}

/// The target's logits after `before, last`; the draft's are the same, but for a shift of its `error`.
pub fn logits(before: u32, last: u32, error: f64) -> Vec<f64> {
    let wave = |x: u32| (f64::from(x) * 1.7).sin() * 2.0;
    (0..VOCAB as u32).map(|x| wave(x * 3 + before * 5 + last * 7) + error * wave(x + last)).collect()
}

/// Keeps what every request's caches would hold, so that a wrong commit is seen.
#[derive(Default)]
pub struct ToyRunner {
    pub error: f64,
    /// The token whose presence in the committed text makes the target's rows useless.
    pub poison: Option<u32>,
    pub fail_verify: bool,
    /// Rows of every part of a prompt, in order.
    pub parts: Vec<usize>,
    pub cached: HashMap<RequestId, Vec<u32>>,
    pub verified: HashMap<RequestId, Vec<u32>>,
    pub released: Arc<Mutex<Vec<RequestId>>>,
}

impl ToyRunner {
    fn row(&self, context: &[u32]) -> Vec<f64> {
        let last = context[context.len() - 1];
        if self.poison == Some(last) {
            return vec![f64::NAN; VOCAB];
        }
        logits(if context.len() > 1 { context[context.len() - 2] } else { 0 }, last, 0.0)
    }
}

impl ModelRunner for ToyRunner {
    type Rows = Owned;

    fn prefill(&mut self, items: &[(RequestId, &[u32], bool)]) -> Result<Owned, RunnerError> {
        let mut rows = Vec::new();
        for (id, part, _) in items {
            self.parts.push(part.len());
            self.cached.entry(*id).or_default().extend_from_slice(part);
            rows.extend(self.row(&self.cached[id]));
        }
        Ok(Owned(rows))
    }

    fn draft(&mut self, items: &[(RequestId, u32)]) -> Result<DraftPass<Owned>, RunnerError> {
        let error = self.error;
        let rows = items.iter().flat_map(|(id, anchor)| {
            let before = *self.cached[id].last().expect("a prompt");
            // Without a Markov head every slot but the first guesses from the anchor alone.
            (0..GAMMA as u32).flat_map(move |slot| logits(before, anchor + slot, error))
        });
        Ok(DraftPass { base: Owned(rows.collect()), hidden: None })
    }

    fn verify(&mut self, items: &[(RequestId, &[u32])]) -> Result<Owned, RunnerError> {
        if self.fail_verify {
            return Err(RunnerError("out of memory".into()));
        }
        let mut rows = Vec::new();
        for (id, tokens) in items {
            let mut context = self.cached[id].clone();
            for &token in *tokens {
                context.push(token);
                rows.extend(self.row(&context));
            }
            self.verified.insert(*id, tokens.to_vec());
        }
        Ok(Owned(rows))
    }

    fn commit(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError> {
        for (id, kept) in items {
            let tokens = self.verified[id][..*kept].to_vec();
            self.cached.get_mut(id).expect("a live request").extend(tokens);
        }
        Ok(())
    }

    fn release(&mut self, ids: &[RequestId]) {
        for id in ids {
            self.cached.remove(id);
        }
        self.released.lock().unwrap().extend(ids);
    }

    fn heads(&self) -> Heads<'_> {
        Heads::default()
    }
}

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

/// An engine over the toy model, with a block of `block_size`.
pub fn engine(rule: Rule, block_size: usize, runner: ToyRunner) -> (Engine<ToyRunner>, Arc<Queue>) {
    let config = EngineConfig {
        rule,
        policy: Policy::Fixed,
        gamma: GAMMA,
        block_size,
        markov_candidates: None,
        calibrations: Vec::new(),
        max_batch_size: 8,
        prefill_chunk_size: 5,
        max_kv_tokens: 4096,
    };
    let queue = Arc::<Queue>::default();
    (Engine::new(config, runner, queue.clone(), Arc::default()), queue)
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
