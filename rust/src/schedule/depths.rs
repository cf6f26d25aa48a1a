//! Before the draft: which requests draft this round, and how far.

use super::choose::{Hope, attempt, choose, pays};
use super::live::LiveCosts;
use super::planner::{Planner, kind, size};
use super::policy::Skip;
use super::track::{Record, Track};

/// A running request before a round.
#[derive(Debug)]
pub struct Prospect<'a> {
    /// The most tokens that it may draft; 0 if it does not draft at all.
    pub room: usize,
    /// Whether its temperature is 0.
    pub greedy: bool,
    /// Its record.
    pub track: &'a mut Track,
}

/// What a request drafts in a round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Depth {
    /// Tokens to draft; the chain stops there.
    pub tokens: usize,
    /// Why there are none although there could have been.
    pub skipped: Option<Skip>,
}

/// A drafting request drafts its whole block every so many rounds; with confidences, this costs a few steps
/// of the chain. And every so many rounds, the target checks two positions more than planned, whatever the
/// confidences say.
const LOOK: u32 = 16;
const DEEP_LOOK: u32 = 64;
/// This many first blocks are verified as far as they were drafted: an untested head is not trusted.
const UNKNOWN: u32 = 16;

impl Planner {
    /// Tokens to draft for each running request, decided from past rounds only.
    ///
    /// A request that does not draft tries again after a growing pause, and so does the engine if no request
    /// drafts. All that is drafted for a try is verified, because a try is there to learn from.
    pub fn depths(&mut self, requests: &mut [Prospect<'_>]) -> Vec<Depth> {
        self.planned = (0, 0);
        self.forced.clear();
        self.expected.clear();
        self.horizon.clear();
        let is_adaptive = self.is_adaptive();
        let Some(cost) = self.costs.as_ref().map(LiveCosts::table).filter(|_| is_adaptive) else {
            return requests.iter().map(|r| Depth { tokens: r.room, skipped: None }).collect();
        };
        let (gamma, running) = (self.gamma, requests.len());
        let mut survival = Vec::with_capacity(running * gamma);
        for request in requests.iter() {
            let mut reached = 1.0;
            for kept in request.track.acceptance(&self.records[kind(request.greedy)]) {
                reached *= kept;
                self.expected.push(kept as f32);
                survival.push(reached);
            }
        }
        let spreads = [0, 1].map(|i| self.records[i].spread().collect::<Vec<_>>());
        let able: Vec<usize> = (0..running).filter(|&r| requests[r].room > 0).collect();
        let hope = |&r: &usize| Hope {
            survival: &survival[r * gamma..r * gamma + requests[r].room.min(gamma)],
            spread: &spreads[kind(requests[r].greedy)],
        };
        let hopes: Vec<_> = able.iter().map(hope).collect();
        let choice = choose(running, &hopes, cost);
        let is_plain = choice.lengths.iter().all(|&tokens| tokens == 0);
        // Would drafting pay if all drafts were as good as the engine's are on average? If so, a request that
        // does worse is the one that fails.
        let average = [0, 1].map(|i| self.records[i].survival());
        let would_pay =
            average.each_ref().map(|survival| !is_plain || pays(running, able.len(), survival, cost));

        let mut depths = vec![Depth::default(); running];
        self.forced.resize(running, 0);
        for ((&r, hope), &tokens) in able.iter().zip(&hopes).zip(&choice.lengths) {
            let (room, greedy) = (hope.survival.len(), requests[r].greedy);
            let Track { pause, drafted, .. } = &mut *requests[r].track;
            let average = &average[kind(greedy)];
            if tokens > 0 {
                pause.reset();
                depths[r].tokens = tokens;
                if self.has_confidence && *drafted % LOOK == LOOK - 1 {
                    depths[r].tokens = room;
                }
                if self.records[kind(greedy)].blocks < UNKNOWN {
                    self.forced[r] = tokens;
                }
                if *drafted % DEEP_LOOK == DEEP_LOOK - 1 {
                    self.forced[r] = room.min(tokens + 2);
                    depths[r].tokens = depths[r].tokens.max(self.forced[r]);
                }
            } else if !is_plain && pause.is_over() {
                let (tokens, price) = attempt(running, *hope, cost, choice.rate);
                pause.try_for(price);
                depths[r].tokens = tokens;
                self.forced[r] = tokens;
            } else {
                let is_worse = hope.gain() < average[..room].iter().sum();
                let is_failing = !is_plain || (would_pay[kind(greedy)] && is_worse);
                depths[r].skipped = Some(if is_failing { Skip::Failing } else { Skip::Slower });
            }
        }
        self.horizon = choice.horizon;
        if !is_plain {
            self.pauses[size(running)].reset();
        } else if let Some(best) =
            (0..able.len()).max_by(|&a, &b| hopes[a].gain().total_cmp(&hopes[b].gain()))
        {
            self.records.iter_mut().for_each(Record::age);
            let pause = &mut self.pauses[size(running)];
            if pause.is_over() {
                let (tokens, price) = attempt(running, hopes[best], cost, choice.plain);
                pause.try_for(price);
                self.forced[able[best]] = tokens;
                depths[able[best]] = Depth { tokens, skipped: None };
            }
            able.iter().for_each(|&r| requests[r].track.age());
        }
        let drafting = depths.iter().filter(|depth| depth.tokens > 0).count();
        self.planned = (drafting, depths.iter().map(|depth| depth.tokens).sum());
        depths
    }
}
