//! Inverts the cumulative distribution function of a long row in two steps: first the block, then the token.

use std::ops::Range;

/// Number of weights that share one stored sum: small enough for the innermost cache, large enough that
/// walking over the sums costs nothing.
pub(super) const BLOCK: usize = 1024;

/// One of the runs of `BLOCK` weights that a row consists of; the last may be shorter.
#[derive(Clone, Copy)]
pub(super) struct Block(pub usize);

impl Block {
    /// Indices of its weights in a row of `len`.
    pub fn range(self, len: usize) -> Range<usize> {
        self.0 * BLOCK..((self.0 + 1) * BLOCK).min(len)
    }
}

/// Index of the first weight at which the running sum exceeds `level`.
///
/// `sums` holds the sum of each block, not all of them zero; `fill` writes the weights of one block. A
/// block's sum and the running sum along it are rounded differently. If the running sum therefore never
/// exceeds `level`, or if `level` reaches the total, the result is the last weight above zero.
pub(super) fn find(level: f64, sums: &[f64], fill: impl Fn(Block, &mut [f64; BLOCK])) -> usize {
    let mut left = level;
    let mut chosen = None;
    for (i, &sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        chosen = Some((i, left));
        if left < sum {
            break;
        }
        left -= sum;
    }
    let Some((block, mut left)) = chosen else { return 0 };
    let mut weights = [0.0; BLOCK];
    fill(Block(block), &mut weights);
    let mut last = 0;
    for (i, &weight) in weights.iter().enumerate() {
        if left < weight {
            return block * BLOCK + i;
        }
        if weight > 0.0 {
            last = i;
        }
        left -= weight;
    }
    block * BLOCK + last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_is_where_the_sum_passes_the_level() {
        let weights: Vec<f64> = (0..3000).map(|i| if i % 3 == 0 { 0.0 } else { 0.25 }).collect();
        let sums: Vec<f64> = weights.chunks(BLOCK).map(|run| run.iter().sum()).collect();
        let fill = |block: Block, out: &mut [f64; BLOCK]| {
            let run = &weights[block.range(weights.len())];
            out[..run.len()].copy_from_slice(run);
        };
        let mut below = 0.0;
        for (i, &weight) in weights.iter().enumerate() {
            if weight > 0.0 {
                assert_eq!(find(below, &sums, fill), i);
                assert_eq!(find(below + 0.24, &sums, fill), i);
            }
            below += weight;
        }
        assert_eq!(find(below, &sums, fill), 2999, "a level past the end");
    }
}
