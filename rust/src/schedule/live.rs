//! The cost table, kept up to date by the rounds themselves.
//!
//! Each measured pass is compared with the initial table, and a log ratio is kept for each width seen, a few
//! dozen at most. Most of the effect of a measurement is on all widths alike, the rest on its own: a machine
//! that gets busier is busier at all of them. A step is clipped, upwards more tightly than downwards (a pass
//! can be slow for a hundred reasons, and fast for one), so one slow round moves the table by a few percent.

use super::cost::CostTable;
use super::curve::{Curve, Point};

/// What one round did, and the seconds that it took.
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundTime {
    /// Requests in the draft pass, and its seconds.
    pub drafting: usize,
    /// See `drafting`.
    pub draft: f64,
    /// Tokens drafted, and seconds of the chains.
    pub drafted: usize,
    /// See `drafted`.
    pub chain: f64,
    /// Requests in the target pass.
    pub requests: usize,
    /// Tokens in the target pass, and seconds of the pass and of what is decided on its rows.
    pub tokens: usize,
    /// See `tokens`.
    pub verify: f64,
    /// Seconds of handing what was kept to the draft's contexts.
    pub feed: f64,
    /// The whole round.
    pub total: f64,
}

/// Roughly how many rounds without a draft the running mean of their feeds covers. Feeds come in bursts,
/// after rows have waited for hundreds of rounds, so they are not clipped.
const FEED_MEMORY: f64 = 512.0;
/// Rounds from one refit to the next.
const REFIT: u32 = 8;
/// How much of a measured deviation a log ratio takes on: that of every width, that of the measured width in
/// addition, and that of a new width.
const SHARED: f64 = 0.16;
const OWN: f64 = 0.04;
const NEW: f64 = 0.3;
/// Recent measurements after which a width is known well enough to fully move all widths.
const KNOWN: f64 = 8.0;
/// The limits within which one measurement counts, as log ratios.
const UP: f64 = 0.25;
const DOWN: f64 = -0.7;
/// If a width that was not seen for some tens of rounds is faster by this much, that is no accident, and half
/// of the difference is taken on at once. Widths that were expensive are visited rarely, so a few visits must
/// be enough to correct them.
const MUCH_FASTER: f64 = -0.2;
/// How much of the count of recent visits is left a round later; widths without recent visits are judged by
/// the others.
const RECENT: f64 = 0.98;
/// How fast a width without recent visits approaches the others; otherwise, a width once thought to be too
/// expensive would never be tried again.
const FORGET: f64 = 0.01;

/// A [`CostTable`] that follows measurements. Memory is bounded: widths are exact up to 16, beyond that four
/// in an octave.
#[derive(Debug, Clone)]
pub struct LiveCosts {
    start: CostTable,
    table: CostTable,
    pass: Ratios,
    draft: Ratios,
    rounds: u32,
}

impl LiveCosts {
    /// The table before anything was measured.
    pub fn new(start: CostTable) -> Self {
        Self { table: start.clone(), start, pass: Ratios::default(), draft: Ratios::default(), rounds: 0 }
    }

    /// The table as of the last refit.
    pub fn table(&self) -> &CostTable {
        &self.table
    }

    /// Learns from a round; true if the table was refitted.
    pub fn add(&mut self, round: &RoundTime) -> bool {
        self.pass.age();
        self.draft.age();
        if round.tokens > 0 && is_time(round.verify) {
            let expected =
                self.start.pass.at(round.tokens as f64) + self.start.request_seconds * round.requests as f64;
            self.pass.add(round.tokens, (round.verify / expected).ln());
        }
        if round.drafting > 0 && is_time(round.draft) {
            let seconds = round.draft + round.feed;
            // A table without times of drafting starts with the first draft pass.
            let start = self.start.draft.get_or_insert_with(|| {
                Curve::through(&[Point { x: round.drafting as f64, y: seconds, weight: 1.0 }])
            });
            self.draft.add(round.drafting, (seconds / start.at(round.drafting as f64)).ln());
        }
        let table = &mut self.table;
        follow(&mut table.token_seconds, round.chain, round.drafted);
        if round.drafting == 0 && round.requests > 0 && round.feed >= 0.0 {
            let each = round.feed / round.requests as f64;
            table.plain_feed_seconds += (each - table.plain_feed_seconds) / FEED_MEMORY;
        }
        let rest = round.total - round.draft - round.chain - round.verify - round.feed;
        follow(&mut table.fixed_seconds, rest, 1);
        self.rounds += 1;
        let is_due = self.rounds.is_multiple_of(REFIT);
        if is_due {
            self.refit();
        }
        is_due
    }

    fn refit(&mut self) {
        self.pass.settle();
        self.draft.settle();
        self.table.pass = self.pass.refitted(&self.start.pass);
        self.table.request_seconds = self.start.request_seconds * self.pass.elsewhere.exp();
        if let Some(start) = &self.start.draft {
            self.table.draft = Some(self.draft.refitted(start));
        }
    }
}

fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds > 0.0
}

/// Moves a mean of seconds per thing towards a measurement.
fn follow(mean: &mut f64, seconds: f64, things: usize) {
    if things == 0 || !is_time(seconds) {
        return;
    }
    let each = seconds / things as f64;
    *mean = if *mean > 0.0 { *mean * (0.2 * (each / *mean).ln().clamp(DOWN, UP)).exp() } else { each };
}

/// Log ratios of measured to expected seconds, by width.
#[derive(Debug, Clone, Default)]
struct Ratios {
    /// By ascending width.
    cells: Vec<Cell>,
    /// The log ratio of widths that were not measured.
    elsewhere: f64,
}

#[derive(Debug, Clone)]
struct Cell {
    width: usize,
    ratio: f64,
    recent: f64,
}

impl Ratios {
    fn add(&mut self, width: usize, ratio: f64) {
        let width = quantised(width);
        let at = match self.cells.binary_search_by_key(&width, |cell| cell.width) {
            Ok(at) => at,
            Err(at) => {
                self.cells.insert(at, Cell { width, ratio: self.ratio(width as f64), recent: 0.0 });
                at
            }
        };
        let (recent, off) = (self.cells[at].recent, ratio - self.cells[at].ratio);
        let error = off.clamp(DOWN, UP);
        // A width that is hardly known moves itself, but not the others.
        let shared = SHARED * error * (recent / KNOWN).min(1.0);
        self.cells.iter_mut().for_each(|cell| cell.ratio += shared);
        self.elsewhere += shared;
        let cell = &mut self.cells[at];
        let is_forgiven = off < MUCH_FASTER && recent < 0.5;
        cell.ratio += if is_forgiven { 0.5 * off } else { error * f64::max(OWN, NEW / (recent + 1.0)) };
        cell.recent += 1.0;
    }

    /// Counts a round that has passed.
    fn age(&mut self) {
        for cell in &mut self.cells {
            cell.recent *= RECENT;
            cell.ratio += FORGET * (1.0 - cell.recent.min(1.0)) * (self.elsewhere - cell.ratio);
        }
    }

    /// Takes widths that were never seen to be as far off as those seen lately.
    fn settle(&mut self) {
        let recent: f64 = self.cells.iter().map(|cell| cell.recent).sum();
        if recent > 0.0 {
            self.elsewhere = self.cells.iter().map(|cell| cell.recent * cell.ratio).sum::<f64>() / recent;
        }
    }

    /// The log ratio assumed for a width: that of the nearest one seen, with a weight that falls with the
    /// distance (0 from an octave on).
    fn ratio(&self, width: f64) -> f64 {
        let far = |cell: &Cell| (width / cell.width as f64).log2().abs();
        let nearest = self.cells.iter().min_by(|a, b| far(a).total_cmp(&far(b)));
        let Some((cell, near)) = nearest.map(|cell| (cell, 1.0 - far(cell).min(1.0))) else {
            return self.elsewhere;
        };
        near * cell.ratio + (1.0 - near) * self.elsewhere
    }

    /// The curve that the measurements were compared with, corrected by them.
    fn refitted(&self, start: &Curve) -> Curve {
        let seen = self.cells.iter().map(|cell| {
            let x = cell.width as f64;
            Point { x, y: start.at(x) * cell.ratio.exp(), weight: 1.0 + cell.recent }
        });
        let unseen = start.points().filter(|(x, _)| !self.cells.iter().any(|cell| cell.width as f64 == *x));
        let mut points: Vec<Point> =
            unseen.map(|(x, y)| Point { x, y: y * self.ratio(x).exp(), weight: 1.0 }).chain(seen).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        Curve::through(&points)
    }
}

/// The width that stands for `width`: itself up to 16, then the lower end of a quarter of an octave.
fn quantised(width: usize) -> usize {
    if width <= 16 {
        return width;
    }
    let step = 1 << (width.ilog2() - 2);
    width / step * step
}

#[cfg(test)]
#[path = "live_tests.rs"]
mod tests;
