//! Instances of the attention kernel and the shapes of their blocks.

use super::Request;
use crate::attention::Heads;

/// Queries of a warp, and keys that it scores at a time.
pub(super) const TILE: usize = 16;

/// Stages of the ring of keys and values in shared memory.
const STAGES: usize = 4;

/// Head sizes for which there are instances; 16 is that of the embedded models.
pub const SIZES: [usize; 4] = [16, 64, 128, 256];

/// The most rows of a request in a pass.
pub const MOST_ROWS: usize = 32;

/// The element type of keys, values and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// float32
    Single,
    /// float16
    Half,
    /// bfloat16
    Brain,
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        if self == Element::Single { 4 } else { 2 }
    }
}

/// Mirrors `Shape` of attention.cuh.
pub(super) struct Shape {
    head_bytes: usize,
    pub(super) parts: usize,
    pub(super) most_tiles: usize,
}

impl Shape {
    pub(super) fn of(element: Element, size: usize) -> Shape {
        let head_bytes = size * element.bytes();
        let (parts, most_tiles) = match head_bytes {
            0..64 => (1, 4),
            64..=256 => (2, 4),
            257..=512 => (2, 3),
            _ => (1, 2),
        };
        Shape { head_bytes, parts, most_tiles }
    }

    /// Bytes of shared memory: queries, the ring, and the scores that warps exchange.
    pub(super) fn shared(&self, query_tiles: usize) -> usize {
        let exchanged = if self.parts > 1 { self.parts * TILE * TILE * 4 } else { 0 };
        TILE * (query_tiles + STAGES * self.parts) * self.head_bytes + query_tiles * exchanged
    }
}

/// Returns a sentence about what the kernel does not take, if anything.
pub(super) fn check(element: Element, heads: Heads, page: usize, requests: &[Request]) -> Result<(), String> {
    let Heads { keys, groups, size } = heads;
    if !SIZES.contains(&size) || keys == 0 || groups == 0 || keys > 65_535 {
        return Err(format!(
            "attention got {keys} key heads of {size} numbers for {groups} query heads each: expected heads of one of \
             {SIZES:?} numbers"
        ));
    }
    if !page.is_power_of_two() || page > 1 << 30 {
        return Err(format!("attention got pages of {page} positions: expected a power of two"));
    }
    for (number, request) in requests.iter().enumerate() {
        let Request { cache, layer_stride, head_stride, pages, length, rows } = *request;
        let aligned =
            [layer_stride, head_stride].iter().all(|stride| (stride * element.bytes()).is_multiple_of(16));
        if cache == 0 || !cache.is_multiple_of(16) || !aligned || !pages.is_multiple_of(4) {
            return Err(format!(
                "request {number} of a pass has its cache at {cache:#x}, layers {layer_stride} and heads {head_stride} \
                 numbers apart, and pages at {pages:#x}: expected multiples of 16 bytes, and of 4 for the pages"
            ));
        }
        if rows > MOST_ROWS || length + rows > i32::MAX as usize / 2 {
            return Err(format!(
                "request {number} of a pass has {rows} rows behind {length} positions: expected at most {MOST_ROWS}, and \
                 fewer than 2^30 positions"
            ));
        }
    }
    Ok(())
}

/// The names of the kernel and of the merge.
pub(super) fn entries(element: Element, size: usize) -> (&'static str, &'static str) {
    macro_rules! sizes {
        ($name:literal) => {
            match size {
                16 => (concat!("attend_", $name, "_d16"), concat!("merge_", $name, "_d16")),
                64 => (concat!("attend_", $name, "_d64"), concat!("merge_", $name, "_d64")),
                128 => (concat!("attend_", $name, "_d128"), concat!("merge_", $name, "_d128")),
                _ => (concat!("attend_", $name, "_d256"), concat!("merge_", $name, "_d256")),
            }
        };
    }
    match element {
        Element::Single => sizes!("f32"),
        Element::Half => sizes!("f16"),
        Element::Brain => sizes!("bf16"),
    }
}
