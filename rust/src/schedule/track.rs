//! How drafts have fared: what a request's past rounds, and the engine's, say about the next one.

/// About how many observations count, of a request and of the engine.
const REQUEST_MEMORY: f64 = 50.0;
const ENGINE_MEMORY: f64 = 100.0;
/// The weight of the engine's acceptance in a request's, in observations: it reflects how far requests of one
/// kind differ (`tests/simulation`). With only a few, five blocks in a row that fail by chance would end a
/// draft that pays.
const SHRINKAGE: f64 = 10.0;
/// The most rounds between two tries. A try costs about a tenth of a round, and a draft that has become
/// better waits no longer than this.
const LONGEST_PAUSE: u32 = 64;
/// The acceptance assumed before any draft was seen, and its weight in observations.
const PRIOR: (f64, f64) = (0.8, 4.0);
/// The weight of the acceptance that a calibration found, in observations; it is of other prompts.
const CALIBRATED: f64 = 20.0;

/// By position of the block: how often it was kept, out of the times that its prefix was. Both counts fade.
#[derive(Debug, Clone, Default)]
struct Tally {
    hits: Vec<f64>,
    seen: Vec<f64>,
}

impl Tally {
    fn grow(&mut self, positions: usize, hits: f64, seen: f64) {
        if self.seen.len() < positions {
            self.hits.resize(positions, hits);
            self.seen.resize(positions, seen);
        }
    }

    fn add(&mut self, slot: usize, kept: f64, weight: f64, memory: f64) {
        let keep = 1.0 - weight / memory;
        self.hits[slot] = keep * self.hits[slot] + weight * kept;
        self.seen[slot] = keep * self.seen[slot] + weight;
    }

    /// Makes all observations count for less; the acceptance stays the same.
    fn age(&mut self, by: f64, floor: f64) {
        for (hits, seen) in self.hits.iter_mut().zip(&mut self.seen) {
            let by = if *seen > floor { f64::max(by, floor / *seen) } else { 1.0 };
            *hits *= by;
            *seen *= by;
        }
    }
}

/// What became of one request's block.
#[derive(Debug, Clone, Copy)]
pub struct Outcome<'a> {
    /// Tokens drafted.
    pub drafted: usize,
    /// Their confidences, as the plan saw them; empty without a confidence head.
    pub confidences: &'a [f32],
    /// Tokens that the target checked.
    pub verified: usize,
    /// Tokens kept. If they are fewer than verified, the next one was rejected.
    pub accepted: usize,
}

impl Outcome<'_> {
    /// The positions of which something is known, each with whether it was kept (0 or 1, or an estimate
    /// between) and the probability that it was reached. A position behind the last one verified is judged by
    /// its confidence: if it were left out, only blocks of high confidence would be seen there.
    fn positions(&self) -> impl Iterator<Item = (usize, f64, f64)> + '_ {
        let known = if self.accepted < self.verified { self.accepted + 1 } else { self.verified };
        let told = (0..known).map(|slot| (slot, f64::from(u8::from(slot < self.accepted)), 1.0));
        let guesses =
            if known == self.verified && self.accepted == self.verified { self.confidences } else { &[] };
        let mut reached = 1.0;
        told.chain(guesses.iter().enumerate().skip(known).map(move |(slot, &c)| {
            let (c, weight) = (f64::from(c), reached);
            reached *= c;
            (slot, c, weight)
        }))
    }
}

/// One request's record.
#[derive(Debug, Clone, Default)]
pub struct Track {
    tally: Tally,
    /// Rounds with a draft.
    pub(super) drafted: u32,
    /// When it tries again after its drafts failed.
    pub(super) pause: Pause,
}

impl Track {
    pub(super) fn add(&mut self, outcome: &Outcome<'_>) {
        self.tally.grow(outcome.drafted, 0.0, 0.0);
        for (slot, kept, weight) in outcome.positions().filter(|(slot, ..)| *slot < outcome.drafted) {
            self.tally.add(slot, kept, weight, REQUEST_MEMORY);
        }
        self.drafted = self.drafted.wrapping_add(1);
    }

    /// Counts a round in which no request drafted: the acceptance of this one approaches the engine's.
    pub(super) fn age(&mut self) {
        self.tally.age(0.98, 0.0);
    }

    /// The probability that each position is kept if the one before it is: the request's own record, shrunk
    /// towards the engine's.
    pub(super) fn acceptance<'a>(&'a self, engine: &'a Record) -> impl Iterator<Item = f64> + 'a {
        engine.acceptance().enumerate().map(|(slot, engine)| {
            let hits = self.tally.hits.get(slot).copied().unwrap_or(0.0);
            let seen = self.tally.seen.get(slot).copied().unwrap_or(0.0);
            (hits + SHRINKAGE * engine) / (seen + SHRINKAGE)
        })
    }
}

/// The engine's record of all requests of a kind: greedy or sampled.
#[derive(Debug, Clone)]
pub(super) struct Record {
    tally: Tally,
    tells: Vec<Tells>,
    /// Blocks judged.
    pub(super) blocks: u32,
}

/// Running means of predicted survival, of real survival, and of their product.
#[derive(Debug, Clone, Copy, Default)]
struct Tells {
    seen: f64,
    predicted: f64,
    real: f64,
    both: f64,
}

impl Record {
    pub(super) fn new(gamma: usize) -> Self {
        let mut tally = Tally::default();
        tally.grow(gamma, PRIOR.0 * PRIOR.1, PRIOR.1);
        Self { tally, tells: vec![Tells::default(); gamma], blocks: 0 }
    }

    /// Starts from the acceptance that a calibration found; positions behind its last one are assumed to
    /// equal it.
    pub(super) fn expect(&mut self, acceptance: &[f64]) {
        let Some(&last) = acceptance.last() else { return };
        let known = acceptance.iter().copied().chain(std::iter::repeat(last));
        for ((hits, seen), kept) in self.tally.hits.iter_mut().zip(&mut self.tally.seen).zip(known) {
            (*hits, *seen) = (CALIBRATED * kept, CALIBRATED);
        }
    }

    pub(super) fn add(&mut self, outcome: &Outcome<'_>) {
        let gamma = self.tells.len();
        self.blocks = self.blocks.saturating_add(1);
        for (slot, kept, weight) in outcome.positions().filter(|(slot, ..)| *slot < gamma) {
            self.tally.add(slot, kept, weight, ENGINE_MEMORY);
        }
        let refused = outcome.accepted < outcome.verified;
        let mut predicted = 1.0;
        for (slot, &c) in outcome.confidences.iter().enumerate().take(gamma) {
            predicted *= f64::from(c);
            if slot < outcome.verified || refused {
                self.tells[slot].add(predicted, f64::from(u8::from(slot < outcome.accepted)));
            }
        }
    }

    /// Counts a round in which no request drafted: new rounds will count for more.
    pub(super) fn age(&mut self) {
        self.tally.age(0.99, 8.0);
    }

    /// The probability that each position is kept if the one before it is.
    pub(super) fn acceptance(&self) -> impl Iterator<Item = f64> + '_ {
        self.tally.hits.iter().zip(&self.tally.seen).map(|(hits, seen)| hits / seen)
    }

    /// The probability that each position is kept with all before it.
    pub(super) fn survival(&self) -> Vec<f64> {
        let mut reached = 1.0;
        self.acceptance()
            .map(|kept| {
                reached *= kept;
                reached
            })
            .collect()
    }

    /// How far apart good and bad blocks are at each position, as far as the confidences tell them apart
    /// beforehand, as a share of the mean survival: the square root of the covariance of predicted and real
    /// survival. A head that always says the same, or guesses, has no spread.
    pub(super) fn spread(&self) -> impl Iterator<Item = f64> + '_ {
        self.tells.iter().map(|tells| {
            let covariance = tells.both - tells.predicted * tells.real;
            let sure = tells.seen / (tells.seen + 20.0);
            if covariance <= 0.0 || tells.real <= 0.0 { 0.0 } else { sure * covariance.sqrt() / tells.real }
        })
    }
}

impl Tells {
    fn add(&mut self, predicted: f64, real: f64) {
        self.seen = (self.seen + 1.0).min(ENGINE_MEMORY);
        let step = 1.0 / self.seen;
        self.predicted += step * (predicted - self.predicted);
        self.real += step * (real - self.real);
        self.both += step * (predicted * real - self.both);
    }
}

/// When to try a draft again that did not pay: after 8 rounds, and twice as many after each try that did not
/// pay either, up to [`LONGEST_PAUSE`]; half as many after a try that did.
#[derive(Debug, Clone)]
pub(super) struct Pause {
    length: u32,
    waited: u32,
    /// Tokens that the try has to gain, while one is under way.
    price: Option<f64>,
}

impl Default for Pause {
    fn default() -> Self {
        Self { length: 8, waited: 0, price: None }
    }
}

impl Pause {
    /// Counts a round without a draft; true if it is time for a try.
    pub(super) fn is_over(&mut self) -> bool {
        self.waited += 1;
        self.waited > self.length
    }

    /// Begins a try, which pays if it gains at least `price` tokens.
    pub(super) fn try_for(&mut self, price: f64) {
        self.waited = 0;
        self.price = Some(price);
    }

    /// Ends a try, if one was under way, that gained this many tokens.
    pub(super) fn settle(&mut self, gained: usize) {
        if let Some(price) = self.price.take() {
            self.length = if gained as f64 >= price {
                (self.length / 2).max(2)
            } else {
                (self.length * 2).min(LONGEST_PAUSE)
            };
        }
    }

    /// Starts over, because drafting pays again.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}
