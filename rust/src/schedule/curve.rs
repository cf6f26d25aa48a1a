//! A curve of seconds through measured points that never falls.

/// Seconds against a count (tokens, requests): non-decreasing, linear between points, constant below the
/// first.
///
/// Beyond the last point it continues with the mean slope of the whole curve, because the last two points
/// alone may be a step or a plateau of the kernel. A single point extends as a constant.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Curve {
    x: Vec<f64>,
    y: Vec<f64>,
    slope_beyond: f64,
}

/// One measurement: the count, the seconds, and its weight when noise is smoothed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) weight: f64,
}

impl Curve {
    /// The curve nearest to points in ascending order of x, of which there is at least one.
    pub(super) fn through(sorted: &[Point]) -> Self {
        let y = pool_adjacent_violators(sorted);
        let x: Vec<f64> = sorted.iter().map(|p| p.x).collect();
        let last = x.len() - 1;
        let slope_beyond = match last {
            0 => 0.0,
            _ => (y[last] - y[0]) / (x[last] - x[0]),
        };
        Self { x, y, slope_beyond }
    }

    /// Seconds at `x`.
    pub(super) fn at(&self, x: f64) -> f64 {
        self.within(x, self.x.partition_point(|&known| known < x))
    }

    /// Seconds at `x`, where `right` is the first point not below it.
    fn within(&self, x: f64, right: usize) -> f64 {
        let last = self.x.len() - 1;
        if right == 0 {
            return self.y[0];
        }
        if right > last {
            return self.y[last] + self.slope_beyond * (x - self.x[last]);
        }
        let (x0, x1) = (self.x[right - 1], self.x[right]);
        let (y0, y1) = (self.y[right - 1], self.y[right]);
        // Clamped: the rounding of a long segment must not make the curve fall.
        (y0 + (y1 - y0) * ((x - x0) / (x1 - x0))).clamp(y0, y1)
    }

    /// Reads the curve at values of x that never decrease, so that a search over hundreds of them needs no
    /// bisection.
    pub(super) fn walk(&self) -> impl FnMut(f64) -> f64 + '_ {
        let mut right = 0;
        move |x| {
            while right < self.x.len() && self.x[right] < x {
                right += 1;
            }
            self.within(x, right)
        }
    }

    /// The smoothed points.
    pub(super) fn points(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.x.iter().copied().zip(self.y.iter().copied())
    }
}

/// The non-decreasing sequence nearest to the measured one in weighted squares (isotonic regression):
/// whenever a block is not above the one before it, the two become their mean.
fn pool_adjacent_violators(sorted: &[Point]) -> Vec<f64> {
    struct Block {
        y: f64,
        weight: f64,
        points: usize,
    }
    let mut blocks: Vec<Block> = Vec::with_capacity(sorted.len());
    for point in sorted {
        let mut block = Block { y: point.y, weight: point.weight, points: 1 };
        while let Some(before) = blocks.pop_if(|before| before.y >= block.y) {
            let weight = before.weight + block.weight;
            block.y = (before.y * before.weight + block.y * block.weight) / weight;
            block.weight = weight;
            block.points += before.points;
        }
        blocks.push(block);
    }
    blocks.iter().flat_map(|b| std::iter::repeat_n(b.y, b.points)).collect()
}
