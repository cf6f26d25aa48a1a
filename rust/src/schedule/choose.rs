//! Who drafts, and how far: decided before the draft, from past rounds only, hence sound under every rule.
//!
//! Over many rounds the engine makes (mean tokens of a round) / (mean seconds of a round) tokens a second, so a round
//! is planned for the largest expected tokens / expected seconds, plain decoding being the plan that drafts nothing.
//! Requests are taken in by falling expected gain; for each number of drafting requests the tokens of all of them are
//! walked by falling expected survival, over the whole list, so that steps of the cost table are seen through.
//!
//! Exact where requests are ordered (one's survival is nowhere below the next one's) and, within an order, for every
//! cost table; for up to 8 requests every number is tried, for more the powers of two and then the neighbourhood of
//! the best. Not exact where two requests cross, one better at the first position, the other at later ones.

use super::cost::CostTable;

/// What a request's draft is expected to do.
#[derive(Debug, Clone, Copy)]
pub struct Hope<'a> {
    /// Survival by position, non-increasing, as far as the request has room.
    pub survival: &'a [f64],
    /// How far apart good and bad blocks are, as a share of the survival: the plan after the draft will verify more
    /// of the good ones. As long as `survival` or longer.
    pub spread: &'a [f64],
}

impl Hope<'_> {
    /// Tokens that the whole block is expected to gain.
    pub(super) fn gain(&self) -> f64 {
        self.survival.iter().sum()
    }
}

/// The best plan found.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Tokens to draft, one entry for each hope.
    pub lengths: Vec<usize>,
    /// Expected tokens per second; the context feed apart, which no plan changes.
    pub rate: f64,
    /// The same of decoding without a draft.
    pub plain: f64,
    /// The gain expected of the first 0, 1, 2, ... tokens of the target pass beside the anchors, in the order in which
    /// they are worth it, to the end of the plan.
    pub horizon: Vec<f64>,
}

/// One position of a block in one of two equally likely cases, or in all if they do not differ.
#[derive(Debug, Clone, Copy)]
struct Item {
    survival: f64,
    weight: f64,
    rank: u32,
    slot: u32,
    /// Whether it is the first case of its position, with which the token is drafted.
    is_first: bool,
}

/// How far the best walk for a number of drafting requests goes, and its tokens per second.
#[derive(Debug, Clone, Copy)]
struct Best {
    rate: f64,
    drafting: usize,
    items: usize,
}

/// The best plan of a round of `running` requests of which those of `hopes` may draft.
pub fn choose(running: usize, hopes: &[Hope<'_>], cost: &CostTable) -> Choice {
    let search = Search::new(running, hopes, cost);
    let plain = running as f64 / cost.round_seconds(running, running);
    let mut best = Best { rate: plain, drafting: 0, items: 0 };
    for drafting in 1..=hopes.len() {
        if drafting <= 8 || drafting.is_power_of_two() || drafting == hopes.len() {
            search.improve(&mut best, drafting);
        }
    }
    let mut step = best.drafting.next_power_of_two() / 4;
    while best.drafting > 8 && step > 0 {
        let around = best.drafting;
        search.improve(&mut best, around - step);
        search.improve(&mut best, (around + step).min(hopes.len()));
        step /= 2;
    }
    Choice { lengths: search.lengths(&best), rate: best.rate, plain, horizon: search.horizon(&best) }
}

/// The best plan in which one request drafts, the first of `hopes`, whether it pays or not: tokens to draft, and
/// the tokens that it has to gain to pay for itself at `rate` tokens per second.
pub(super) fn attempt(running: usize, hope: Hope<'_>, cost: &CostTable, rate: f64) -> (usize, f64) {
    let search = Search::new(running, std::slice::from_ref(&hope), cost);
    let mut best = Best { rate: 0.0, drafting: 0, items: 0 };
    search.improve(&mut best, 1);
    // Of a single token little can be learned.
    let tokens = search.lengths(&best)[0].max(2).min(hope.survival.len());
    let more = cost.pass_seconds(running + tokens) - cost.pass_seconds(running);
    (tokens, rate * (more + cost.draft_seconds(1, tokens)))
}

/// Whether drafting makes more tokens per second than not, if all `drafting` requests have the same survival.
pub(super) fn pays(running: usize, drafting: usize, survival: &[f64], cost: &CostTable) -> bool {
    let plain = running as f64 / cost.round_seconds(running, running);
    let (mut tokens, mut width) = (running as f64, running);
    survival.iter().enumerate().any(|(slot, survival)| {
        tokens += drafting as f64 * survival;
        width += drafting;
        let seconds =
            cost.round_seconds(width, running) + cost.draft_seconds(drafting, drafting * (slot + 1));
        tokens > plain * seconds
    })
}

struct Search<'a> {
    running: usize,
    cost: &'a CostTable,
    /// Hopes by falling gain.
    ranked: Vec<usize>,
    /// By falling survival.
    items: Vec<Item>,
}

impl<'a> Search<'a> {
    fn new(running: usize, hopes: &[Hope<'_>], cost: &'a CostTable) -> Self {
        let gains: Vec<f64> = hopes.iter().map(Hope::gain).collect();
        let mut ranked: Vec<usize> = (0..hopes.len()).collect();
        ranked.sort_unstable_by(|&a, &b| gains[b].total_cmp(&gains[a]).then(a.cmp(&b)));
        let mut items = Vec::with_capacity(2 * hopes.iter().map(|hope| hope.survival.len()).sum::<usize>());
        for (rank, &hope) in (0..).zip(&ranked) {
            add_items(&mut items, rank, &hopes[hope]);
        }
        items.sort_unstable_by(|a: &Item, b| {
            b.survival.total_cmp(&a.survival).then(a.slot.cmp(&b.slot)).then(a.rank.cmp(&b.rank))
        });
        Self { running, cost, ranked, items }
    }

    /// Looks for a better plan among those in which the first `drafting` of the ranked requests draft.
    fn improve(&self, best: &mut Best, drafting: usize) {
        let mut pass = self.cost.pass.walk();
        let mut seconds = self.cost.round_seconds
            + self.cost.request_seconds * self.running as f64
            + self.cost.draft_seconds(drafting, 0);
        let (mut tokens, mut width) = (self.running as f64, self.running as f64);
        let bar = drafting as u32;
        for (i, item) in self.items.iter().enumerate() {
            if item.rank >= bar {
                continue;
            }
            tokens += item.survival * item.weight;
            width += item.weight;
            if item.is_first {
                seconds += self.cost.token_seconds;
            }
            let whole = pass(width) + seconds;
            if tokens > best.rate * whole {
                *best = Best { rate: tokens / whole, drafting, items: i + 1 };
            }
        }
    }

    fn taken(&self, best: &Best) -> impl Iterator<Item = &Item> {
        self.items[..best.items].iter().filter(|item| (item.rank as usize) < best.drafting)
    }

    fn horizon(&self, best: &Best) -> Vec<f64> {
        let (mut horizon, mut width, mut gain) = (vec![0.0], 0.0, 0.0);
        for item in self.taken(best) {
            width += item.weight;
            gain += item.weight * item.survival;
            if width >= horizon.len() as f64 {
                horizon.push(gain);
            }
        }
        horizon
    }

    /// Tokens to draft, by the order in which the hopes came.
    fn lengths(&self, best: &Best) -> Vec<usize> {
        let mut lengths = vec![0; self.ranked.len()];
        self.taken(best)
            .filter(|item| item.is_first)
            .for_each(|item| lengths[self.ranked[item.rank as usize]] += 1);
        lengths
    }
}

/// A position is worth more than its mean survival where the plan can tell a good block from a bad one: half of the
/// blocks are taken to be as good as the spread says, half as bad.
fn add_items(items: &mut Vec<Item>, rank: u32, hope: &Hope<'_>) {
    let (mut good, mut bad) = (1.0f64, 1.0f64);
    for (slot, (&mean, &spread)) in (0..).zip(hope.survival.iter().zip(hope.spread)) {
        let share = spread.min(1.0).min((good - mean).max(0.0) / mean.max(f64::MIN_POSITIVE));
        good = (mean * (1.0 + share)).min(good);
        bad = (mean * (1.0 - share)).min(bad);
        if good - bad < 0.02 * mean {
            (good, bad) = (mean, mean);
            items.push(Item { survival: mean, weight: 1.0, rank, slot, is_first: true });
        } else {
            items.push(Item { survival: good, weight: 0.5, rank, slot, is_first: true });
            items.push(Item { survival: bad, weight: 0.5, rank, slot, is_first: false });
        }
    }
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
