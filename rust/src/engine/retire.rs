//! After every pass: clients get what is new, and who has ended leaves.

use std::time::Instant;

use super::{Engine, ModelRunner};

impl<M: ModelRunner> Engine<M> {
    /// Sends what is new to the clients and forgets the requests that ended.
    pub(super) fn retire(&mut self) {
        let now = Instant::now();
        let all = || self.active.iter().chain(&self.prefilling);
        let over = all().filter(|active| active.finish.is_some());
        let ended: Vec<_> = over.map(|active| (active.request.id, active.reserved)).collect();
        // Before the clients, so that who has a result finds it counted.
        self.stats.add(|stats| {
            all().for_each(|active| active.report(stats));
            stats.running = self.active.len() + self.prefilling.len() - ended.len();
            stats.finished += ended.len() as u64;
        });
        for requests in [&mut self.active, &mut self.prefilling] {
            requests.retain_mut(|active| {
                let over = active.finish.is_some();
                active.send(now);
                !over
            });
        }
        if !ended.is_empty() {
            ended.iter().for_each(|(_, reserved)| self.pages.release(*reserved));
            self.runner.release(&ended.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        }
    }
}
