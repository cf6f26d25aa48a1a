//! A simulated machine and simulated requests: what the planner decides about, without models.

use std::num::NonZeroUsize;

use dspark_core::accept::Rule;
use dspark_core::noise::{Noise, Purpose};
use dspark_core::schedule::*;

pub const GAMMA: usize = 7;

/// What passes really take.
#[derive(Clone)]
pub struct Machine {
    pub pass: fn(usize) -> f64,
    pub draft: fn(usize) -> f64,
    pub token: f64,
    /// Of the context, after a round with a draft.
    pub feed: f64,
    /// Everything takes this many times as long.
    pub busy: f64,
    /// Spread of the log of each time.
    pub noise: f64,
}

/// Nearly flat to 64 tokens, then proportional.
pub fn gpu() -> Machine {
    let pass = |t: usize| 0.010 + 0.0001 * t as f64 + 0.0003 * t.saturating_sub(64) as f64;
    Machine {
        pass,
        draft: |r| 0.0025 + 0.00001 * r as f64,
        token: 0.00001,
        feed: 0.0004,
        busy: 1.0,
        noise: 0.03,
    }
}

/// Every token costs nearly as much as the next.
pub fn cpu() -> Machine {
    let pass = |t: usize| 0.020 + 0.006 * t as f64;
    Machine { pass, draft: |r| 0.004 + 0.002 * r as f64, token: 0.0003, feed: 0.001, busy: 1.0, noise: 0.03 }
}

/// A little model on an idle processor: rows cost next to nothing, and a draft a tenth of a pass.
pub fn idle() -> Machine {
    let pass = |t: usize| 0.016 + 0.0003 * t as f64;
    Machine {
        pass,
        draft: |r| 0.002 + 0.0005 * r as f64,
        token: 0.00002,
        feed: 0.001,
        busy: 1.0,
        noise: 0.05,
    }
}

/// A kernel that takes tokens by eights.
pub fn steps() -> Machine {
    let pass = |t: usize| 0.008 + 0.006 * t.div_ceil(8) as f64;
    Machine {
        pass,
        draft: |r| 0.003 + 0.0001 * r as f64,
        token: 0.00002,
        feed: 0.0004,
        busy: 1.0,
        noise: 0.03,
    }
}

impl Machine {
    /// The table as it is measured at the start.
    pub fn table(&self) -> CostTable {
        let widths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512];
        let points: Vec<_> = widths.map(|t| (t, self.busy * (self.pass)(t))).to_vec();
        let draft: Vec<_> =
            [1, 2, 4, 8, 16, 32, 64].map(|r| (r, self.busy * ((self.draft)(r) + self.feed))).to_vec();
        CostTable::new(&points)
            .and_then(|table| table.with_draft(&draft)?.with_token_seconds(self.busy * self.token))
            .and_then(|table| table.with_fixed_seconds(self.busy * 0.0005))
            .unwrap()
    }
}

/// How a request's head speaks of its draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Head {
    /// The truth.
    Right,
    /// The truth, with 1.5 added to its logit.
    Sure,
    /// The truth, with 4 taken from its logit.
    Modest,
    /// Always the same.
    Constant,
    /// No head.
    None,
}

/// A request whose tokens are kept with a chance of their own: `mean` on average, more in good blocks and less in bad
/// ones.
#[derive(Clone)]
pub struct Client {
    pub mean: f64,
    pub spread: f64,
    pub head: Head,
    pub track: Track,
}

pub fn clients(count: usize, mean: f64, head: Head) -> Vec<Client> {
    (0..count).map(|_| Client { mean, spread: 0.25, head, track: Track::default() }).collect()
}

/// What a round came to.
pub struct Went {
    pub account: Account,
    pub depths: Vec<Depth>,
}

/// What a stretch of rounds came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Account {
    pub tokens: f64,
    pub seconds: f64,
    /// Blocks drafted, over all requests.
    pub blocks: usize,
}

impl Account {
    pub fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }
}

pub struct World {
    pub machine: Machine,
    pub clients: Vec<Client>,
    pub planner: Planner,
    noise: Noise,
    clock: u32,
}

pub fn throughput(machine: &Machine, lag: usize) -> Policy {
    Policy::Throughput { cost: machine.table(), lag: NonZeroUsize::new(lag) }
}

impl World {
    pub fn new(machine: Machine, clients: Vec<Client>, policy: Policy) -> Self {
        let planner = Planner::new(policy, Rule::Rejection, GAMMA);
        World { machine, clients, planner, noise: Noise { seed: 5, sample: 0 }, clock: 0 }
    }

    fn uniform(&self, request: usize, slot: usize, what: u32) -> f64 {
        self.noise.uniform(self.clock, (request * 64 + slot) as u32 * 4 + what, Purpose::Draft)
    }

    fn time(&self, seconds: f64, what: usize) -> f64 {
        let bell: f64 = (0..4).map(|i| self.uniform(1000 + what, i, 3)).sum::<f64>() - 2.0;
        self.machine.busy * seconds * (self.machine.noise * bell * 1.7).exp()
    }

    /// One round; `drafts` false: nobody may draft.
    pub fn round(&mut self, drafts: bool) -> Went {
        self.clock += 1;
        let room = if drafts { GAMMA } else { 0 };
        let mut prospects: Vec<_> =
            self.clients.iter_mut().map(|c| Prospect { room, greedy: false, track: &mut c.track }).collect();
        let depths = self.planner.depths(&mut prospects);
        let offsets = self.planner.offsets(false).map_or([0.0; GAMMA], |o| o.try_into().unwrap());
        let (mut real, mut said) = (Vec::new(), Vec::new());
        for (r, (client, depth)) in self.clients.iter().zip(&depths).enumerate() {
            let block = if self.uniform(r, 63, 0) < 0.5 { client.spread } else { -client.spread };
            let mut chances = Vec::new();
            let mut confidences = Vec::new();
            for (slot, offset) in offsets.into_iter().enumerate().take(depth.tokens) {
                let own = 0.3 * (self.uniform(r, slot, 1) - 0.5);
                let chance = (client.mean + client.mean.min(1.0 - client.mean) * (block + own) * 2.0)
                    .clamp(0.01, 0.99);
                let logit = (chance / (1.0 - chance)).ln();
                let sigmoid = |x: f64| (1.0 / (1.0 + (-x).exp())) as f32;
                chances.push(chance);
                confidences.extend(match client.head {
                    Head::Right => Some(sigmoid(logit + offset)),
                    Head::Sure => Some(sigmoid(logit + 1.5 + offsets[slot])),
                    Head::Modest => Some(sigmoid(logit - 4.0 + offsets[slot])),
                    Head::Constant => Some(sigmoid(1.0 + offsets[slot])),
                    Head::None => None,
                });
            }
            real.push(chances);
            said.push(confidences);
        }
        let drafted: Vec<_> = depths.iter().map(|depth| depth.tokens).collect();
        let drafts: Vec<_> = drafted
            .iter()
            .zip(&said)
            .map(|(&drafted, confidences)| Draft { drafted, limit: drafted, confidences })
            .collect();
        let lengths = self.planner.plan(&drafts, false).unwrap();
        let accepted: Vec<usize> = lengths
            .iter()
            .zip(&real)
            .enumerate()
            .map(|(r, (&length, chances))| {
                (0..length).take_while(|&slot| self.uniform(r, slot, 2) < chances[slot]).count()
            })
            .collect();
        let drafting = drafted.iter().filter(|&&d| d > 0).count();
        let requests = self.clients.len();
        let width = requests + lengths.iter().sum::<usize>();
        let total: usize = drafted.iter().sum();
        let mut time = RoundTime {
            drafting,
            draft: if drafting > 0 { self.time((self.machine.draft)(drafting), 0) } else { 0.0 },
            drafted: total,
            chain: self.time(self.machine.token * total as f64, 1),
            requests,
            tokens: width,
            verify: self.time((self.machine.pass)(width), 2),
            feed: if drafting > 0 { self.time(self.machine.feed, 4) } else { 0.0 },
            total: 0.0,
        };
        time.total = time.draft + time.chain + time.verify + time.feed + self.time(0.0005, 3);
        let committed = requests + accepted.iter().sum::<usize>();
        let lessons = self.clients.iter_mut().enumerate().map(|(r, client)| Lesson {
            track: &mut client.track,
            greedy: false,
            outcome: Outcome {
                drafted: drafted[r],
                confidences: &said[r],
                verified: lengths[r],
                accepted: accepted[r],
            },
        });
        self.planner.learn(lessons);
        self.planner.timed(&time);
        Went { account: Account { tokens: committed as f64, seconds: time.total, blocks: drafting }, depths }
    }

    pub fn run(&mut self, rounds: usize) -> Account {
        self.stretch(rounds, true)
    }

    pub fn stretch(&mut self, rounds: usize, drafts: bool) -> Account {
        let mut sum = Account::default();
        for _ in 0..rounds {
            let round = self.round(drafts).account;
            sum.tokens += round.tokens;
            sum.seconds += round.seconds;
            sum.blocks += round.blocks;
        }
        sum
    }
}

/// Tokens per second of plain decoding and of `fixed` on the same machine.
pub fn others(machine: &Machine, clients: &[Client], rounds: usize) -> (f64, f64) {
    let world = || World::new(machine.clone(), clients.to_vec(), Policy::Fixed);
    (world().stretch(rounds, false).rate(), world().run(rounds).rate())
}
