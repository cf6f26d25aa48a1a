//! A running request: its tokens, its statistics, and how it ends.

use std::time::{Duration, Instant};

use crate::accept::{TokenLogprobs, Verdict};
use crate::chain::Chain;
use crate::engine::aside::Aside;
use crate::engine::cached::Cached;
use crate::engine::{
    Failure, Finish, FinishReason, Latencies, Request, RequestId, Round, RunnerError, Stats, StopReason,
    Timing, Update,
};
use crate::history::History;
use crate::law::Workspace;
use crate::noise::Counted;
use crate::schedule::{Depth, Lesson, Outcome, Prospect, Skipped, Track};
use crate::stop::StopHit;

/// State of a request between rounds, from its admission on.
pub(super) struct Active {
    /// The request as submitted, except that its prompt has moved to `cached`.
    pub(super) request: Request,
    /// Its place in the order of admission, which a preemption does not change.
    pub(super) admission: u64,
    pub(super) cached: Cached,
    pub(super) history: History,
    pub(super) workspace: Workspace,
    /// This round's draft.
    pub(super) chain: Chain,
    /// The anchor, then the drafted tokens that the target checks; during prefill, the prompt's last token.
    pub(super) rows: Vec<u32>,
    pub(super) timing: Timing,
    pub(super) finish: Option<(FinishReason, Option<StopReason>, Option<Failure>)>,
    /// Prompt tokens that came from the caches of another request.
    pub(super) reused: usize,
    pub(super) preemptions: u32,
    /// Tokens of the prompt; the text follows it in `cached`.
    prompt: usize,
    /// How its drafts have fared.
    track: Track,
    /// Whether it pauses drafting because drafts have failed for it alone.
    pub(super) aside: Aside,
    /// What the policy has decided about this round's draft.
    pub(super) depth: Depth,
    skipped: Skipped,
    rounds: Vec<Round>,
    bad_draft_rows: u32,
    update: Update,
}

impl Active {
    pub(super) fn new(mut request: Request, admission: u64, now: Instant) -> Self {
        let timing = Timing { queue: now - request.submitted, ..Timing::default() };
        let tokens = std::mem::take(&mut request.prompt);
        Active {
            admission,
            history: History::new(&tokens),
            workspace: Workspace::default(),
            chain: Chain::default(),
            rows: tokens.last().copied().into_iter().collect(),
            timing,
            finish: None,
            reused: 0,
            preemptions: 0,
            prompt: tokens.len(),
            track: Track::default(),
            aside: Aside::default(),
            depth: Depth::default(),
            skipped: Skipped::default(),
            rounds: Vec::new(),
            bad_draft_rows: 0,
            update: Update::default(),
            cached: Cached { tokens, drafted: request.drafts, ..Cached::default() },
            request,
        }
    }

    /// Whether its first token is still to be drawn. If it is not, a prefill is one after a preemption, and
    /// the anchor is known.
    pub(super) fn is_fresh(&self) -> bool {
        self.generated() == 0
    }

    /// Rows that the caches must hold before the next round: those of all committed tokens but the anchor.
    pub(super) fn goal(&self) -> usize {
        self.cached.tokens.len() - usize::from(!self.is_fresh())
    }

    /// Tokens that wait for their prefill pass.
    pub(super) fn unfilled(&self) -> usize {
        self.goal() - self.cached.rows
    }

    /// The most rows that the caches can ever hold.
    pub(super) fn demand(&self) -> usize {
        self.prompt + self.request.max_tokens
    }

    /// Tokens of the text so far.
    fn generated(&self) -> usize {
        self.cached.tokens.len() - self.prompt
    }

    /// The last committed token; before any was generated, the prompt's last one.
    pub(super) fn anchor(&self) -> u32 {
        self.cached.tokens[self.cached.tokens.len() - 1]
    }

    /// The noise of the coming round, counted by the absolute position of its anchor.
    pub(super) fn noise(&self) -> Counted {
        Counted::new(self.request.noise, (self.cached.tokens.len() - 1) as u32)
    }

    /// How many tokens of a block of `block_size` this round can use; one place is for the corrected or bonus
    /// token.
    pub(super) fn room(&self, block_size: usize) -> usize {
        let left = (self.request.max_tokens - self.generated()).saturating_sub(1);
        if self.request.drafts { left.min(block_size) } else { 0 }
    }

    /// The policy's input before a round of blocks of up to `block_size` tokens.
    pub(super) fn prospect(&mut self, block_size: usize) -> Prospect<'_> {
        Prospect {
            room: self.room(block_size),
            greedy: self.request.params.is_greedy(),
            track: &mut self.track,
        }
    }

    /// The policy's input after a round; `None` for a request that failed in it.
    pub(super) fn lesson(&mut self) -> Option<Lesson<'_>> {
        let round = self.rounds.last()?;
        let verified = match &self.finish {
            Some((FinishReason::Error, ..)) => return None,
            // Ended by a drafted token: those after it were not judged.
            Some(_) if round.committed == round.accepted => round.accepted,
            _ => round.verified,
        };
        let outcome = Outcome {
            drafted: round.drafted,
            confidences: &round.confidence,
            verified,
            accepted: round.accepted,
        };
        Some(Lesson { track: &mut self.track, greedy: self.request.params.is_greedy(), outcome })
    }

    /// Drops this round's draft, so that only the anchor is verified.
    pub(super) fn drop_draft(&mut self) {
        self.chain.recycle(&mut self.workspace);
        self.rows.truncate(1);
        // Its context may have to catch up before it drafts again.
        self.depth.tokens = 0;
    }

    /// Commits what `verdict` kept of this round's `verified` tokens; stops at the first token that ends the
    /// request.
    pub(super) fn commit(&mut self, verdict: Verdict, verified: usize, is_round: bool) {
        let Verdict { accepted, token, logprobs } = verdict;
        let mut logprobs = logprobs.into_iter();
        let mut committed = 0;
        for k in 0..=accepted {
            let next = if k < accepted { self.rows[1 + k] } else { token };
            committed += 1;
            if self.push(next, logprobs.next()) {
                break;
            }
        }
        if self.finish.is_none() {
            // The accepted tokens are already in the history; the last one is added here.
            self.history.push(token);
            if self.generated() >= self.request.max_tokens {
                self.finish = Some((FinishReason::Length, None, None));
            }
        }
        if is_round {
            let Chain { ids, confidence, bad_rows, .. } = &mut self.chain;
            self.bad_draft_rows += *bad_rows;
            self.skipped.add(self.depth.skipped);
            self.rounds.push(Round {
                drafted: ids.len(),
                verified,
                accepted: accepted.min(committed),
                committed,
                confidence: std::mem::take(confidence),
            });
        }
    }

    /// Commits one token; true if it ends the request.
    fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> bool {
        self.cached.tokens.push(token);
        self.update.tokens.push(token);
        self.update.logprobs.extend(logprobs);
        let may_stop = self.generated() >= self.request.params.min_tokens as usize;
        let hit = self.request.stop_ids.check(token).filter(|_| may_stop);
        // The text is read even if nothing may stop yet: a string that begins here may end the request later.
        // A string that is completed by a stop id is cut out of the text, too.
        let found = self.request.stop_text.as_mut().and_then(|text| text.push(token, may_stop));
        let stop = match (hit, found) {
            (Some(StopHit::End), _) => None,
            (Some(StopHit::Token(id)), _) => Some(StopReason::Token(id)),
            (None, Some(string)) => Some(StopReason::Text(string)),
            (None, None) => return false,
        };
        self.finish = Some((FinishReason::Stop, stop, None));
        true
    }

    /// The request, and how many rows of this round's verify pass its caches keep; `None` once it has ended.
    pub(super) fn kept(&mut self) -> Option<(RequestId, usize)> {
        let kept = self.rounds.last()?.committed;
        if self.finish.is_some() {
            return None;
        }
        self.cached.rows += kept;
        Some((self.request.id, kept))
    }

    /// Whether the caches may serve other requests after this one has ended: not if it failed.
    pub(super) fn leaves_a_prefix(&self) -> bool {
        !matches!(self.finish, Some((FinishReason::Error, ..)))
    }

    /// Adds what this round did to the engine's totals.
    pub(super) fn report(&self, stats: &mut Stats, latencies: &mut Latencies, now: Instant) {
        if self.update.tokens.is_empty() {
            return;
        }
        latencies.record(
            now - self.request.submitted,
            self.update.tokens.len(),
            self.timing.updates.last(),
            now,
        );
        stats.tokens += self.update.tokens.len() as u64;
        if let Some(round) = self.rounds.last() {
            stats.rounds += 1;
            stats.drafted += round.drafted as u64;
            stats.verified += round.verified as u64;
            stats.accepted += round.accepted as u64;
            stats.bad_draft_rows += u64::from(self.chain.bad_rows);
            stats.skipped.add(self.depth.skipped);
        }
    }

    /// Ends the request unless it has ended.
    pub(super) fn end(&mut self, reason: FinishReason, failure: Option<Failure>) {
        self.finish.get_or_insert((reason, None, failure));
    }

    /// Ends the request because something of its own failed in the runner.
    pub(super) fn fail(&mut self, error: &RunnerError) {
        self.end(FinishReason::Error, Some(Failure::Runner(error.to_string())));
    }

    /// Sends what this round committed, and if the request has ended, its statistics.
    pub(super) fn send(&mut self, now: Instant) {
        let at = now - self.request.submitted;
        if !self.update.tokens.is_empty() {
            self.timing.updates.push((at, self.update.tokens.len()));
        }
        if self.update.tokens.is_empty() && self.finish.is_none() {
            return;
        }
        let mut update = std::mem::take(&mut self.update);
        let over = self.finish.is_some();
        update.text = self.request.stop_text.as_mut().map(|text| text.take(over));
        if let Some((reason, stop, error)) = self.finish.take() {
            self.timing.total = at;
            update.finish = Some(Finish {
                reason,
                stop,
                error,
                rounds: std::mem::take(&mut self.rounds),
                timing: std::mem::take(&mut self.timing),
                bad_draft_rows: self.bad_draft_rows,
                reused: self.reused,
                preemptions: self.preemptions,
                skipped: self.skipped,
            });
        }
        self.request.sink.update(update);
    }
}

/// Adds the time of one pass to every request that took part, and returns it.
pub(super) fn charge<'a>(
    requests: impl Iterator<Item = &'a mut Active>,
    field: fn(&mut Timing) -> &mut Duration,
    since: Instant,
) -> Duration {
    let spent = since.elapsed();
    for active in requests {
        *field(&mut active.timing) += spent;
    }
    spent
}
