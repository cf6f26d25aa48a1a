//! What must hold between steps; tests check it after every one.

use std::collections::HashSet;

use super::active::Active;
use super::cached::Cached;
use super::pages::Pages;
use super::{Engine, ModelRunner, PAGE_SIZE, RequestId};

impl<M: ModelRunner> Engine<M> {
    /// The requests whose caches the runner should know: the id, the tokens whose rows they hold, and the
    /// positions reserved for them.
    pub fn caches(&self) -> impl Iterator<Item = (RequestId, &[u32], usize)> {
        self.holders().map(|(id, cached)| (id, &cached.tokens[..cached.rows], cached.grant * PAGE_SIZE))
    }

    /// Checks the engine's own bookkeeping between two steps; the error says what is wrong.
    pub fn audit(&self) -> Result<(), String> {
        let granted: usize = self.holders().map(|(_, cached)| cached.grant).sum();
        check(granted == self.pages.used(), || {
            format!("{granted} pages granted, {} counted", self.pages.used())
        })?;
        check(granted <= self.pages.total(), || format!("{granted} pages of {}", self.pages.total()))?;
        let running = self.active.len() + self.prefilling.len();
        check(running <= self.config.max_batch_size, || format!("{running} requests run"))?;

        for list in [&self.active, &self.prefilling, &self.preempted] {
            let in_order = list.is_sorted_by(|a, b| a.admission < b.admission);
            check(in_order, || "requests are not in order of admission".to_owned())?;
        }

        let waiting = self.preempted.iter().map(|active| active.request.id);
        let mut ids = HashSet::new();
        for id in self.holders().map(|(id, _)| id).chain(waiting) {
            check(ids.insert(id), || format!("request {id} is there twice"))?;
        }
        for (id, Cached { rows, grant, .. }) in self.holders() {
            check(*rows <= grant * PAGE_SIZE, || format!("request {id} has {rows} rows in {grant} pages"))?;
        }
        for active in &self.active {
            let whole = !active.is_fresh() && active.unfilled() == 0;
            check(whole, || format!("request {} decodes with holes", active.request.id))?;
        }
        for active in &self.prefilling {
            let covers = Pages::needed(active.goal()) <= active.cached.grant;
            check(covers && active.unfilled() > 0, || {
                format!("request {} prefills wrongly", active.request.id)
            })?;
        }
        for Active { request, cached, .. } in &self.preempted {
            check(cached.rows == 0 && cached.grant == 0, || {
                format!("preempted request {} holds caches", request.id)
            })?;
        }
        for (id, cached) in self.prefixes.iter() {
            let whole = cached.rows >= PAGE_SIZE && cached.rows == cached.tokens.len();
            check(whole, || format!("prefix {id} has {} rows of {}", cached.rows, cached.tokens.len()))?;
        }
        Ok(())
    }
}

fn check(holds: bool, fault: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(fault()) }
}
