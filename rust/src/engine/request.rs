//! A request: what is asked, and what comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::accept::TokenLogprobs;
use crate::engine::{RequestId, StopText};
use crate::noise::Noise;
use crate::params::SamplingParams;
use crate::schedule::Skipped;
use crate::stop::StopIds;

/// Where a request's updates go. Called on the engine's thread: it must return at once.
pub trait Sink: Send {
    /// Takes what one round committed.
    fn update(&mut self, update: Update);
}

/// Everything the engine needs to know of one request.
pub struct Request {
    /// The caller's name for it, unique among all requests of an engine: caches are kept under it.
    pub id: RequestId,
    /// Token ids; never empty.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub params: SamplingParams,
    /// Whether the request may draft; if not, nothing is spent on the draft.
    pub drafts: bool,
    /// The request's own noise: seed and index within `n`.
    pub noise: Noise,
    /// The most tokens to generate, the context window already taken into account.
    pub max_tokens: usize,
    /// Ids that end the request.
    pub stop_ids: StopIds,
    /// Strings that end the request, with the detokenizer that shows them the text.
    pub stop_text: Option<StopText>,
    /// When the request is aborted if it has not ended.
    pub deadline: Option<Instant>,
    /// When it was made; its times count from then.
    pub submitted: Instant,
    /// Set from any thread to end it within a round.
    pub cancelled: Arc<AtomicBool>,
    /// Where updates go.
    pub sink: Box<dyn Sink>,
}

impl Request {
    /// The most positions that the request can take. Its last rounds draft less, so the rows of a verify pass
    /// add none.
    pub(super) fn demand(&self) -> usize {
        self.prompt.len() + self.max_tokens
    }

    /// Whether the request should stop before its next round.
    pub fn is_over(&self, now: Instant) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.deadline.is_some_and(|deadline| now >= deadline)
    }
}

/// What a request's client learns after a round.
#[derive(Debug, Default)]
pub struct Update {
    /// Tokens committed, in order.
    pub tokens: Vec<u32>,
    /// Text that is certain not to be cut; only for requests with stop strings.
    pub text: Option<String>,
    /// One entry per token if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Present in the last update.
    pub finish: Option<Finish>,
}

/// Why a request ended, and its statistics.
#[derive(Debug)]
pub struct Finish {
    /// The kind of end.
    pub reason: FinishReason,
    /// What stopped it, unless it was an end token.
    pub stop: Option<StopReason>,
    /// What failed.
    pub error: Option<Failure>,
    /// One record per round.
    pub rounds: Vec<Round>,
    /// Where the time went.
    pub timing: Timing,
    /// Draft rows from which nothing could be drawn.
    pub bad_draft_rows: u32,
    /// Tokens of the prompt whose rows came from the caches of another request.
    pub reused: usize,
    /// How often its caches were given up for others and made again.
    pub preemptions: u32,
    /// Rounds that the policy left without a draft.
    pub skipped: Skipped,
}

impl Finish {
    /// The end of a request that never ran.
    pub fn unserved(reason: FinishReason, error: Option<Failure>) -> Self {
        Finish {
            reason,
            stop: None,
            error,
            rounds: Vec::new(),
            timing: Timing::default(),
            bad_draft_rows: 0,
            skipped: Skipped::default(),
            reused: 0,
            preemptions: 0,
        }
    }
}

/// The kinds of end, named as in the public result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, a stop id or a stop string.
    Stop,
    /// `max_tokens` or the context window.
    Length,
    /// Cancelled, timed out, or the engine closed.
    Abort,
    /// It failed.
    Error,
}

/// What stopped a request, if there is something to report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// One of the request's own stop ids.
    Token(u32),
    /// A stop string.
    Text(String),
}

/// A request's failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The target's logits were unusable.
    Numerics(String),
    /// A pass of the models failed.
    Runner(String),
    /// It does not fit.
    Capacity(String),
    /// Too many requests wait already; there may be room later.
    QueueFull(String),
}

impl Failure {
    /// The failure of requests whose engine has ended.
    pub fn ended() -> Self {
        Failure::Runner("the engine has failed and ended".into())
    }
}

/// What one round did for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafted tokens that the target checked.
    pub verified: usize,
    /// Drafted tokens kept.
    pub accepted: usize,
    /// Tokens committed: accepted and one more, fewer in the round that ends the request.
    pub committed: usize,
    /// One probability per drafted token; empty without a confidence head.
    pub confidence: Vec<f32>,
}

/// Where a request's time went. A pass that a batch shares counts in full for each of its requests.
#[derive(Debug, Clone, Default)]
pub struct Timing {
    /// From submission to the start of its prefill.
    pub queue: Duration,
    /// Prefill passes, including those after a preemption.
    pub prefill: Duration,
    /// Draft passes, context updates and Markov chains.
    pub draft: Duration,
    /// Target passes.
    pub verify: Duration,
    /// Acceptance.
    pub sample: Duration,
    /// From submission to the last token.
    pub total: Duration,
    /// Each update's time since submission, and its number of tokens.
    pub updates: Vec<(Duration, usize)>,
}

impl Update {
    /// Appends a later update.
    pub fn merge(&mut self, later: Update) {
        self.tokens.extend(later.tokens);
        self.logprobs.extend(later.logprobs);
        if let Some(text) = later.text {
            self.text.get_or_insert_default().push_str(&text);
        }
        if later.finish.is_some() {
            self.finish = later.finish;
        }
    }
}
