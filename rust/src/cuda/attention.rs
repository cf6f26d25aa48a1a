//! Attention of verify passes and draft blocks: how the keys of a pass are split over blocks, and a layer's launches.
//!
//! The kernel is `cuda/kernels/attention.cuh`; the structs here mirror its structs.

mod shape;

use std::ops::Range;

use crate::attention::{Heads, Reach};
use crate::cuda::{CudaError, Device};

pub use shape::{Element, MOST_ROWS, SIZES};
use shape::{Shape, TILE, check, entries};

/// Fewer keys are not worth a block of their own.
const LEAST_KEYS: usize = 128;

/// Blocks that each multiprocessor should get.
const BLOCKS_EACH: usize = 2;

/// One request's rows, and where its cache lies.
///
/// Position t of key head h of layer l is at `cache + l * layer_stride + h * head_stride + place(t) * head size`
/// numbers, `place(t) = pages[t / page] * page + t % page`; value heads follow the key heads.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Address of the cache on the device.
    pub cache: u64,
    /// Numbers from one layer to the next.
    pub layer_stride: usize,
    /// Numbers from one head to the next.
    pub head_stride: usize,
    /// Address of its page numbers (int32) on the device; 0 if there is no page table, so that place(t) = t.
    pub pages: u64,
    /// Cached positions.
    pub length: usize,
    /// New rows, written behind the cached positions; 0 for a request that has none.
    pub rows: usize,
}

/// One layer's call; all addresses are the device's.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// Which layer of the caches.
    pub index: usize,
    /// Which of the pass's kinds of visibility.
    pub reach: usize,
    /// Rows `[rows, query heads + key heads + value heads, size]`: queries scaled, both rotated.
    pub input: u64,
    /// Numbers from one row to the next.
    pub row_stride: usize,
    /// Output `[rows, query heads * size]`.
    pub output: u64,
    /// Address of a copy of [`Pass::table`].
    pub table: u64,
    /// Address of room for [`Pass::workspace`] float32 numbers.
    pub workspace: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ReachArgs {
    causal: i32,
    window: i32,
    anchored: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Args {
    heads: u64,
    out: u64,
    sums: u64,
    states: u64,
    segments: u64,
    chunks: u64,
    splits: u64,
    row_stride: i64,
    layer: i32,
    key_heads: i32,
    groups: i32,
    queries: i32,
    page_shift: i32,
    reach: ReachArgs,
}
const _: () = assert!(size_of::<Args>() == 96, "AttendArgs of attention.cuh");

/// Words of the table for a chunk of a segment's keys, and for the slots of a segment that is split.
const CHUNK_WORDS: usize = 4;
const SPLIT_WORDS: usize = 3;

/// The launches of a layer with one kind of visibility.
#[derive(Debug, Clone)]
struct Way {
    reach: Reach,
    /// Words of the table.
    chunks: Range<usize>,
    splits: Range<usize>,
}

/// The attention of one pass: shapes of the launches, and the table that the kernel reads.
#[derive(Debug, Clone)]
pub struct Pass {
    element: Element,
    heads: Heads,
    page_shift: u32,
    rows: usize,
    query_tiles: usize,
    table: Vec<i64>,
    ways: Vec<Way>,
    slots: usize,
}

impl Pass {
    /// A pass of these requests, whose layers see what one of `reaches` says.
    ///
    /// `page` is the number of positions of a page, a power of two. The split is made for a device with so many
    /// `multiprocessors`: results depend on that number, and on all lengths, within rounding.
    ///
    /// # Errors
    /// What the kernel does not support.
    pub fn new(
        element: Element,
        heads: Heads,
        page: usize,
        requests: &[Request],
        reaches: &[Reach],
        multiprocessors: usize,
    ) -> Result<Pass, CudaError> {
        check(element, heads, page, requests).map_err(CudaError::Unsuitable)?;
        let rows = requests.iter().map(|request| request.rows).max().unwrap_or(0);
        let tiles = (rows * heads.groups).div_ceil(TILE).max(1);
        let query_tiles = tiles.div_ceil(tiles.div_ceil(Shape::of(element, heads.size).most_tiles));
        let mut pass = Pass {
            element,
            heads,
            page_shift: page.ilog2(),
            rows,
            query_tiles,
            table: Vec::new(),
            ways: Vec::new(),
            slots: 0,
        };
        let mut first = 0;
        for request in requests {
            let Request { cache, layer_stride, head_stride, pages, length, rows } = *request;
            pass.table
                .extend([cache, layer_stride as u64, head_stride as u64, pages].map(|word| word as i64));
            pass.table.extend([length, rows, first].map(|word| word as i64));
            first += rows;
        }
        let blocks = (BLOCKS_EACH * multiprocessors).div_ceil(heads.keys * tiles.div_ceil(query_tiles));
        for &reach in reaches {
            pass.add_way(reach, requests, blocks);
        }
        Ok(pass)
    }

    /// Cuts what the requests' rows see into about `blocks` chunks.
    fn add_way(&mut self, reach: Reach, requests: &[Request], blocks: usize) {
        // From the first key that the first row sees to the last row.
        let seen = |request: &Request| match request {
            Request { rows: 0, .. } => 0..0,
            Request { rows, length, .. } => reach.of(0, *rows, *length).0..length + rows,
        };
        let total: usize = requests.iter().map(|request| seen(request).len()).sum();
        // What a chunk leaves behind, 4 bytes for each query and column, is at most a quarter of what it reads.
        let least = LEAST_KEYS.max(8 * self.rows * self.heads.groups / self.element.bytes());
        let wanted = total.div_ceil(blocks).max(least);
        let (mut slots, mut splits) = (0, Vec::new());
        let start = self.table.len();
        for (number, request) in requests.iter().enumerate() {
            let seen = seen(request);
            // Rounded to the nearest: if many requests are worth a block each, none is split.
            let pieces = ((seen.len() + wanted / 2) / wanted).max(1);
            let size = seen.len().div_ceil(pieces).next_multiple_of(2 * TILE).max(1);
            let count = seen.len().div_ceil(size);
            for from in seen.clone().step_by(size) {
                let slot = if count > 1 { (slots + (from - seen.start) / size) as i64 } else { -1 };
                let to = seen.end.min(from + size);
                self.table.extend([number as i64, from as i64, to as i64, slot]);
            }
            if count > 1 {
                splits.extend([number as i64, slots as i64, count as i64]);
                slots += count;
            }
        }
        let chunks = start..self.table.len();
        self.table.extend(splits);
        self.ways.push(Way { reach, splits: chunks.end..self.table.len(), chunks });
        self.slots = self.slots.max(slots);
    }

    /// The table that the kernel reads, to be copied to the device once for all layers.
    pub fn table(&self) -> &[i64] {
        &self.table
    }

    /// Number of float32 values of device memory that a layer's chunks leave their states in.
    pub fn workspace(&self) -> usize {
        self.states() * (self.heads.size + 2)
    }

    fn states(&self) -> usize {
        self.slots * self.heads.keys * self.rows * self.heads.groups
    }

    /// Launches a layer: writes the new keys and values behind the cached ones, and attends.
    ///
    /// # Errors
    /// If `layer` is not suitable, or if the driver refuses.
    pub fn layer(&self, device: &Device, stream: u64, layer: &Layer) -> Result<(), CudaError> {
        let Some(way) = self.ways.get(layer.reach) else {
            return Err(CudaError::Unsuitable(format!(
                "attention has no kind of visibility {}",
                layer.reach
            )));
        };
        if !(layer.row_stride * self.element.bytes()).is_multiple_of(16)
            || ![layer.input, layer.output, layer.table, layer.workspace]
                .iter()
                .all(|at| at.is_multiple_of(16))
        {
            return Err(CudaError::Unsuitable(format!(
                "attention needs rows at multiples of 16 bytes, found {layer:?}"
            )));
        }
        let Heads { keys, groups, size } = self.heads;
        let word = |at: usize| layer.table + 8 * at as u64;
        let args = Args {
            heads: layer.input,
            out: layer.output,
            sums: layer.workspace,
            states: layer.workspace + (4 * self.states() * size) as u64,
            segments: layer.table,
            chunks: word(way.chunks.start),
            splits: word(way.splits.start),
            row_stride: layer.row_stride as i64,
            layer: layer.index as i32,
            key_heads: keys as i32,
            groups: groups as i32,
            queries: (self.rows * groups) as i32,
            page_shift: self.page_shift as i32,
            reach: ReachArgs {
                causal: i32::from(way.reach.causal),
                window: way.reach.window.map_or(0, |window| window.min(i32::MAX as usize / 2) as i32),
                anchored: i32::from(way.reach.anchored),
            },
        };
        let (attend, merge) = entries(self.element, size);
        let shape = Shape::of(self.element, size);
        let tiles = (self.rows * groups).div_ceil(TILE * self.query_tiles);
        let chunks = way.chunks.len() / CHUNK_WORDS;
        if chunks > 0 {
            let grid = [chunks as u32, keys as u32, tiles as u32];
            let block = (32 * shape.parts * self.query_tiles) as u32;
            device.launch(attend, grid, block, shape.shared(self.query_tiles) as u32, stream, &args)?;
        }
        let splits = way.splits.len() / SPLIT_WORDS;
        if splits > 0 {
            let grid = [splits as u32, self.rows as u32, (keys * groups).div_ceil(4) as u32];
            device.launch(merge, grid, 128, 0, stream, &args)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
