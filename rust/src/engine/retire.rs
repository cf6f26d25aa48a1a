//! After every pass: clients get what is new, and ended requests leave, perhaps with a prefix for others.

use std::time::Instant;

use super::active::Active;
use super::{Engine, Forks, ModelRunner, PAGE_SIZE};

impl<M: ModelRunner> Engine<M> {
    /// Sends clients what is new, and forgets the requests that ended; what their caches hold may be kept.
    pub(super) fn retire(&mut self) {
        let now = Instant::now();
        // Before the clients get theirs, so that a client that has its result finds it counted.
        self.publish(now);
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        let keeps = self.forks != Forks::Never;
        let mut stays = |active: &mut Active| {
            let over = active.finish.is_some();
            let leaves_a_prefix = keeps && active.leaves_a_prefix();
            active.send(now);
            if over {
                let cached = std::mem::take(&mut active.cached);
                let worth = leaves_a_prefix && cached.rows >= PAGE_SIZE;
                if worth { &mut kept } else { &mut dropped }.push((active.request.id, cached));
            }
            !over
        };
        self.active.retain_mut(&mut stays);
        self.prefilling.retain_mut(&mut stays);
        self.preempted.retain_mut(&mut stays);
        for (id, cached) in kept {
            dropped.extend(self.prefixes.keep(id, cached, self.forks));
        }
        self.forget(dropped);
    }

    /// Adds what is new to the statistics.
    pub(super) fn publish(&self, now: Instant) {
        let all = || self.active.iter().chain(&self.prefilling).chain(&self.preempted);
        let mut latencies = self.stats.latencies();
        self.stats.add(|stats| {
            all().for_each(|active| active.report(stats, &mut latencies, now));
            stats.finished += all().filter(|active| active.finish.is_some()).count() as u64;
            let staying = |list: &[Active]| list.iter().filter(|active| active.finish.is_none()).count();
            stats.prefilling = staying(&self.prefilling);
            stats.running = staying(&self.active) + stats.prefilling;
        });
    }
}
