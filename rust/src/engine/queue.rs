//! Where requests wait, and how other threads reach the engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::engine::Request;
use crate::schedule::Policy;

/// The engine's door: any thread may submit, wake or close it.
#[derive(Default)]
pub struct Queue {
    waiting: Mutex<VecDeque<Request>>,
    changed: Condvar,
    closed: AtomicBool,
    /// The policy from the next round on, if it changes.
    policy: Mutex<Option<Policy>>,
}

impl Queue {
    /// Adds a request, or gives it back if the engine is closed.
    pub fn submit(&self, request: Request) -> Result<(), Box<Request>> {
        let mut waiting = self.lock();
        if self.is_closed() {
            return Err(Box::new(request));
        }
        waiting.push_back(request);
        self.changed.notify_one();
        Ok(())
    }

    /// Ends the engine after its current round; what runs or waits is aborted.
    pub fn close(&self) {
        let _waiting = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Sets another policy, in force from the next round on.
    pub fn set_policy(&self, policy: Policy) {
        *self.policy.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(policy);
    }

    /// The policy that was set since the last look.
    pub(super) fn take_policy(&self) -> Option<Policy> {
        self.policy.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// Whether [`Self::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Lets the engine look at cancelled requests that still wait.
    pub fn wake(&self) {
        let _waiting = self.lock();
        self.changed.notify_all();
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        let (taken, kept): (VecDeque<_>, VecDeque<_>) =
            waiting.drain(..).partition(|request| condition(request));
        *waiting = kept;
        Vec::from(taken)
    }

    /// Takes the first waiting request if `condition` holds for it.
    pub(super) fn pop_if(&self, condition: impl FnOnce(&Request) -> bool) -> Option<Request> {
        let mut waiting = self.lock();
        if condition(waiting.front()?) { waiting.pop_front() } else { None }
    }

    /// The waiting requests. A panic elsewhere cannot leave the list half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, VecDeque<Request>> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
