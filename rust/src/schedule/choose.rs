//! Which requests draft, and how far: decided before the draft, from past rounds only, so that it is sound
//! under every rule.
//!
//! Over many rounds the engine makes (mean tokens of a round) / (mean seconds of a round) tokens a second, so
//! a round is planned for the largest expected tokens / expected seconds, plain decoding being the plan that
//! drafts nothing. Requests are added by falling expected gain. For each number of drafting requests, the
//! search walks the tokens of all of them by falling expected survival, to the end of the list, so that it
//! does not stop at steps of the cost table.
//!
//! The plan is exact, for every cost table, if requests are ordered (one's survival is nowhere below the next
//! one's). For up to 8 requests every number is tried, for more the powers of two and then the neighbourhood
//! of the best one. The plan is not exact if two requests cross, one better at the first position, the other
//! at later ones.

use super::cost::CostTable;

/// The expected outcome of a request's draft.
#[derive(Debug, Clone, Copy)]
pub struct Hope<'a> {
    /// Survival by position, non-increasing, as far as the request has room.
    pub survival: &'a [f64],
    /// How far apart good and bad blocks are, as a share of the survival: the plan after the draft will
    /// verify more of the good ones. As long as `survival` or longer.
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
    /// Expected tokens per second.
    pub rate: f64,
    /// The same for decoding without drafts.
    pub plain: f64,
    /// The expected gain of the first 0, 1, 2, ... tokens that the target pass has beside the anchors, by
    /// falling survival, to the end of the plan.
    pub horizon: Vec<f64>,
}

/// One position of a block in one of two equally likely cases, or in both if they do not differ.
#[derive(Debug, Clone, Copy)]
struct Item {
    survival: f64,
    /// Survival times the probability of the case.
    gain: f64,
    /// Tokens in the target pass, counted in halves: 1 in one case, 2 in both.
    halves: u8,
    rank: u32,
    /// Whether it is the first case of its position; taking it means that the token is drafted.
    is_first: bool,
}

impl Item {
    /// Whether it belongs to one of the first `drafting` of the ranked requests.
    fn is_of(&self, drafting: usize) -> bool {
        (self.rank as usize) < drafting
    }
}

/// The best walk so far: its tokens per second, its number of drafting requests, and how many items it takes.
#[derive(Debug, Clone, Copy)]
struct Best {
    rate: f64,
    drafting: usize,
    taken: usize,
}

/// The best plan for a round of `running` requests, of which those of `hopes` may draft.
pub fn choose(running: usize, hopes: &[Hope<'_>], cost: &CostTable) -> Choice {
    let mut search = Search::new(running, hopes, cost);
    let plain = running as f64 / cost.plain_seconds(running);
    let mut best = Best { rate: plain, drafting: 0, taken: 0 };
    if hopes.len() <= 8 {
        (1..=hopes.len()).for_each(|drafting| search.improve(&mut best, drafting));
    } else {
        search.narrow(&mut best, hopes.len());
    }
    Choice { lengths: search.lengths(&best), rate: best.rate, plain, horizon: search.horizon(&best) }
}

/// The best plan in which only the request of `hope` drafts, whether that pays or not: tokens to draft, and
/// the tokens that they have to gain to pay for themselves at `rate` tokens per second.
pub(super) fn attempt(running: usize, hope: Hope<'_>, cost: &CostTable, rate: f64) -> (usize, f64) {
    let search = Search::new(running, std::slice::from_ref(&hope), cost);
    let mut best = Best { rate: 0.0, drafting: 0, taken: 0 };
    search.improve(&mut best, 1);
    // Little can be learned from a single token.
    let tokens = search.lengths(&best)[0].max(2).min(hope.survival.len());
    let more = cost.pass_seconds(running + tokens) - cost.pass_seconds(running);
    (tokens, rate * (more + cost.draft_seconds(1, tokens)))
}

/// Whether drafting makes more tokens per second than plain decoding if all `drafting` requests have this
/// survival.
pub(super) fn pays(running: usize, drafting: usize, survival: &[f64], cost: &CostTable) -> bool {
    let plain = running as f64 / cost.plain_seconds(running);
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
    /// Seconds of the target pass with 0, 1, 2, ... half tokens beside the anchors.
    pass: Vec<f64>,
}

impl<'a> Search<'a> {
    fn new(running: usize, hopes: &[Hope<'_>], cost: &'a CostTable) -> Self {
        let gains: Vec<f64> = hopes.iter().map(Hope::gain).collect();
        let mut ranked: Vec<usize> = (0..hopes.len()).collect();
        ranked.sort_unstable_by(|&a, &b| gains[b].total_cmp(&gains[a]).then(a.cmp(&b)));
        let items = by_falling_survival(&all_items(hopes, &ranked));
        let halves: usize = items.iter().map(|item| usize::from(item.halves)).sum();
        let pass =
            (0..=halves).map(|halves| running as f64 + 0.5 * halves as f64).map(cost.pass.walk()).collect();
        Self { running, cost, ranked, items, pass }
    }

    /// Tries `most` drafting requests and the powers of two below it, then the neighbourhood of the best
    /// number.
    fn narrow(&mut self, best: &mut Best, most: usize) {
        self.improve(best, most);
        // In falling order, so that items of requests that no longer draft need not be walked.
        let whole = self.items.clone();
        let mut drafting = most.next_power_of_two() / 2;
        while drafting > 0 {
            self.keep(drafting);
            self.improve(best, drafting);
            drafting /= 2;
        }
        self.items = whole;
        // No step goes beyond twice the best number.
        self.keep(2 * best.drafting);
        let mut step = best.drafting.next_power_of_two() / 4;
        while step > 0 {
            let around = best.drafting;
            self.improve(best, around - step);
            if around < most {
                self.improve(best, most.min(around + step));
            }
            step /= 2;
        }
    }

    /// Drops the items of all but the first `drafting` of the ranked requests.
    fn keep(&mut self, drafting: usize) {
        self.items.retain(|item| item.is_of(drafting));
    }

    /// Looks for a better plan among those in which the first `drafting` of the ranked requests draft.
    fn improve(&self, best: &mut Best, drafting: usize) {
        let fixed = self.cost.fixed_seconds
            + self.cost.request_seconds * self.running as f64
            + self.cost.draft_seconds(drafting, 0);
        let (mut tokens, mut seconds, mut halves, mut taken) = (self.running as f64, fixed, 0, 0);
        let (mut best_tokens, mut best_seconds, mut best_taken) = (best.rate, 1.0, None);
        for item in &self.items {
            // Without a branch, which could not be predicted.
            let takes = usize::from(item.is_of(drafting));
            taken += takes;
            tokens += takes as f64 * item.gain;
            seconds += (takes & usize::from(item.is_first)) as f64 * self.cost.token_seconds;
            halves += takes * usize::from(item.halves);
            let whole = self.pass[halves] + seconds;
            if tokens * best_seconds > best_tokens * whole {
                (best_tokens, best_seconds, best_taken) = (tokens, whole, Some(taken));
            }
        }
        if let Some(taken) = best_taken {
            *best = Best { rate: best_tokens / best_seconds, drafting, taken };
        }
    }

    fn taken(&self, best: &Best) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(|item| item.is_of(best.drafting)).take(best.taken)
    }

    fn horizon(&self, best: &Best) -> Vec<f64> {
        let (mut horizon, mut halves, mut gain) = (vec![0.0], 0, 0.0);
        for item in self.taken(best) {
            halves += usize::from(item.halves);
            gain += item.gain;
            if halves >= 2 * horizon.len() {
                horizon.push(gain);
            }
        }
        horizon
    }

    /// Tokens to draft, in the order in which the hopes were given.
    fn lengths(&self, best: &Best) -> Vec<usize> {
        let mut lengths = vec![0; self.ranked.len()];
        self.taken(best)
            .filter(|item| item.is_first)
            .for_each(|item| lengths[self.ranked[item.rank as usize]] += 1);
        lengths
    }
}

/// Every position of every hope, slot by slot and then rank by rank.
///
/// A position is worth more than its mean survival if the plan can tell a good block from a bad one: half of
/// the blocks are taken to be better by the spread, half to be worse by it.
fn all_items(hopes: &[Hope<'_>], ranked: &[usize]) -> Vec<Item> {
    let longest = hopes.iter().map(|hope| hope.survival.len()).max().unwrap_or(0);
    let mut items = Vec::with_capacity(2 * longest * hopes.len());
    // Survival of the position before, in good and in bad blocks.
    let mut before = vec![(1.0f64, 1.0f64); hopes.len()];
    for slot in 0..longest {
        for (rank, &hope) in ranked.iter().enumerate() {
            let Some((&mean, &spread)) = hopes[hope].survival.get(slot).zip(hopes[hope].spread.get(slot))
            else {
                continue;
            };
            let (good, bad) = &mut before[rank];
            let share = spread.min(1.0).min((*good - mean).max(0.0) / mean.max(f64::MIN_POSITIVE));
            *good = (mean * (1.0 + share)).min(*good);
            *bad = (mean * (1.0 - share)).min(*bad);
            let item = |survival, halves: u8, is_first| {
                let gain = 0.5 * f64::from(halves) * survival;
                Item { survival, gain, halves, rank: rank as u32, is_first }
            };
            if *good - *bad < 0.02 * mean {
                (*good, *bad) = (mean, mean);
                items.push(item(mean, 2, true));
            } else {
                items.push(item(*good, 1, true));
                items.push(item(*bad, 1, false));
            }
        }
    }
    items
}

/// The items by falling survival; ties keep their order. Keys of one machine word sort several times faster
/// than items: they consist of the upper 32 bits of the survival, which is not negative, and the place.
fn by_falling_survival(items: &[Item]) -> Vec<Item> {
    let key = |(place, item): (usize, &Item)| !(item.survival.to_bits() >> 32) << 32 | place as u64;
    let mut keys: Vec<u64> = items.iter().enumerate().map(key).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| items[(key & 0xffff_ffff) as usize]).collect()
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
