//! Where requests wait, and how other threads reach the engine.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use super::pages::Pages;
use super::{EngineConfig, Failure, Request};
use crate::schedule::Policy;

/// How many requests are looked at from the head of the queue on, if those before them wait for a prompt to
/// be computed.
const LOOKED_AT: usize = 64;

/// The way to the engine for other threads: any of them may submit requests, set the policy or close it.
pub struct Queue {
    waiting: Mutex<VecDeque<Request>>,
    changed: Condvar,
    closed: AtomicBool,
    failed: AtomicBool,
    accepted: AtomicU64,
    refused: AtomicU64,
    max_queue_size: usize,
    max_kv_tokens: usize,
    /// The policy from the next round on, if it changes.
    policy: Mutex<Option<Policy>>,
}

impl Queue {
    /// The queue of an engine with these bounds.
    pub fn new(config: &EngineConfig) -> Self {
        Queue {
            waiting: Mutex::default(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            max_queue_size: config.max_queue_size,
            max_kv_tokens: config.max_kv_tokens,
            policy: Mutex::default(),
        }
    }

    /// Adds a request. It is refused at once if the engine is closed, if it could never run, or if too many
    /// requests wait already.
    pub fn submit(&self, request: Request) -> Result<(), Failure> {
        let fits = self.check(&request);
        let mut waiting = self.lock();
        if self.is_closed() {
            let has_failed = self.failed.load(Ordering::SeqCst);
            let state = if has_failed { "has failed: its engine has ended" } else { "is closed" };
            return Err(Failure::Capacity(format!("the decoder {state}")));
        }
        let room = fits.and_then(|()| self.room(waiting.len()));
        if room.is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return room;
        }
        waiting.push_back(request);
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
        Ok(())
    }

    /// Refuses a request that would not fit even if it ran alone.
    fn check(&self, request: &Request) -> Result<(), Failure> {
        let demand = request.demand();
        let fits = Pages::needed(demand) <= Pages::new(self.max_kv_tokens).total();
        if fits || request.max_tokens == 0 {
            return Ok(());
        }
        Err(Failure::Capacity(format!(
            "the request can grow to {demand} positions (prompt {}, max_tokens {}), \
             more than max_kv_tokens = {} allows",
            request.prompt.len(),
            request.max_tokens,
            self.max_kv_tokens
        )))
    }

    fn room(&self, waiting: usize) -> Result<(), Failure> {
        if waiting < self.max_queue_size {
            return Ok(());
        }
        Err(Failure::QueueFull(format!(
            "{waiting} requests are waiting already (max_queue_size = {})",
            self.max_queue_size
        )))
    }

    /// Requests that were accepted since the start.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Requests that were refused for lack of room.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Ends the engine after its current round; running and waiting requests are aborted.
    pub fn close(&self) {
        let _waiting = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Closes the queue, and reports from now on that the engine has failed.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Sets another policy, in force from the next round on.
    pub fn set_policy(&self, policy: Policy) {
        *self.policy.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(policy);
    }

    /// Takes the policy that was set since the last call.
    pub(super) fn take_policy(&self) -> Option<Policy> {
        self.policy.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// Whether the engine has ended, or is about to.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Blocks until there is a request or the engine is closed.
    pub(super) fn wait(&self) {
        let mut waiting = self.lock();
        while waiting.is_empty() && !self.is_closed() {
            waiting = self.changed.wait(waiting).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Takes every waiting request that `condition` picks.
    pub(super) fn take_if(&self, mut condition: impl FnMut(&Request) -> bool) -> Vec<Request> {
        let mut waiting = self.lock();
        if !waiting.iter().any(&mut condition) {
            return Vec::new();
        }
        let (taken, kept): (VecDeque<_>, VecDeque<_>) =
            waiting.drain(..).partition(|request| condition(request));
        *waiting = kept;
        Vec::from(taken)
    }

    /// Takes the first waiting request for which `choose` breaks with a value. The search ends if `choose`
    /// breaks with `None`, and after [`LOOKED_AT`] requests, so that a thousand that wait for one prompt are
    /// not compared with it in every step.
    pub(super) fn take_first<T>(
        &self,
        mut choose: impl FnMut(&Request) -> ControlFlow<Option<T>>,
    ) -> Option<(Request, T)> {
        let mut waiting = self.lock();
        let (at, chosen) = waiting
            .iter()
            .enumerate()
            .take(LOOKED_AT)
            .find_map(|(at, request)| Some((at, choose(request).break_value()?)))?;
        let chosen = chosen?;
        Some((waiting.remove(at)?, chosen))
    }

    /// The waiting requests. A panic elsewhere cannot leave the list half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, VecDeque<Request>> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
