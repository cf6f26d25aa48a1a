//! A batch as tables of structs, the memory that kernels need beside them, and the launches.

use super::edits;
use super::layout::{Edit, LAW_BYTES, Plain, RACE_BYTES, Request, Row, SampleArgs, TILE, bytes_of, code};
use super::{DeviceRows, SampleError};
use crate::accept::Rule;
use crate::history::History;
use crate::noise::Counted;
use crate::params::SamplingParams;

/// Assigns offsets in memory that is allocated later.
#[derive(Debug, Default)]
pub(super) struct Arena(u64);

impl Arena {
    /// Reserves room for `count` items of `size` bytes; returns its offset.
    pub fn take(&mut self, count: usize, size: usize) -> u64 {
        let start = self.0;
        self.0 += ((count * size) as u64).next_multiple_of(16);
        start
    }

    pub fn bytes(&self) -> usize {
        self.0 as usize
    }
}

/// Structs that are copied to the device together.
#[derive(Debug, Default)]
pub(super) struct Table(pub Vec<u8>);

impl Table {
    /// Appends values; returns the offset of the first.
    pub fn push<T: Plain>(&mut self, values: &[T]) -> u64 {
        let start = self.0.len().next_multiple_of(16);
        self.0.resize(start, 0);
        self.0.extend_from_slice(bytes_of(values));
        start as u64
    }
}

/// One kernel on its grid.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel.
    pub entry: &'static str,
    /// Blocks of threads.
    pub grid: [u32; 3],
    /// Threads in a block.
    pub block: u32,
    /// Its argument.
    pub args: SampleArgs,
}

/// Threads in a block, by what a kernel works on.
pub(super) const TILE_THREADS: u32 = 128;
pub(super) const ROW_THREADS: u32 = 256;
const CUT_THREADS: u32 = 512;

/// The tables of a batch as they grow.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub rows: Vec<Row>,
    pub requests: Vec<Request>,
    pub edits: Vec<Edit>,
    pub ids: Vec<u32>,
    /// Number of rows that have a copy after bias and penalties.
    pub changed: usize,
    pub truncates: bool,
    pub draws: bool,
}

impl Batch {
    /// Adds a request that has neither rows nor drafted tokens yet.
    pub fn request(
        &mut self,
        params: &SamplingParams,
        history: &History,
        noise: Counted,
        anchor: u32,
    ) -> i32 {
        let (noise, position) = noise.parts();
        let found = edits::edits(params, history);
        self.draws |= !params.is_greedy();
        self.truncates |=
            !params.is_greedy() && (params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0);
        self.requests.push(Request {
            top_p: params.top_p,
            min_p: params.min_p,
            seed: noise.seed,
            inverse_temperature: crate::law::inverse_temperature(params.temperature),
            repetition: params.repetition_penalty as f32,
            presence: params.presence_penalty as f32,
            frequency: params.frequency_penalty as f32,
            top_k: params.top_k,
            sample: noise.sample,
            position,
            anchor,
            kind: i32::from(!params.is_greedy()),
            generated: int(history.generated()),
            min_tokens: params.min_tokens.min(i32::MAX as u32) as i32,
            penalises: i32::from(params.penalises()),
            drafted: 0,
            first_row: int(self.rows.len()),
            first_id: int(self.ids.len()),
            first_draft: 0,
            first_edit: int(self.edits.len()),
            edits: int(found.len()),
        });
        self.edits.extend(found);
        int(self.requests.len() - 1)
    }

    /// Adds row `index` of some logits: the row of the token behind `before` drafted ones of a request. It
    /// gets a copy if bias and penalties may change it (`edited`), or if `copied` is set.
    pub fn row(
        &mut self,
        logits: &DeviceRows,
        index: usize,
        request: i32,
        before: usize,
        edited: bool,
        copied: bool,
    ) {
        let changed = if edited || copied {
            self.changed += 1;
            int(self.changed - 1)
        } else {
            -1
        };
        self.rows.push(Row {
            logits: logits.address + (index * logits.stride * logits.dtype.size()) as u64,
            dtype: code(logits.dtype).unwrap_or_default(),
            columns: int(logits.columns),
            request,
            before: int(before),
            changed,
            edited: i32::from(edited),
        });
    }
}

impl Batch {
    /// The arguments common to all plans: the tables, and for each row of `columns` logits the memory in
    /// which its law is built.
    pub fn args(&self, columns: usize, rule: Rule, table: &mut Table, scratch: &mut Arena) -> SampleArgs {
        let (rows, tiles) = (self.rows.len(), tiles(columns));
        SampleArgs {
            rows: table.push(&self.rows),
            requests: table.push(&self.requests),
            edits: table.push(&self.edits),
            changed: scratch.take(self.changed * columns, 4),
            laws: scratch.take(rows, LAW_BYTES),
            tops: scratch.take(rows * tiles, 8),
            bads: scratch.take(rows * tiles, 4),
            sums: scratch.take(rows * tiles, 8),
            races: scratch.take(rows * tiles, RACE_BYTES),
            tiles: int(tiles),
            columns: int(columns),
            requests_count: int(self.requests.len()),
            rule: i32::from(rule == Rule::Coupled),
            ..SampleArgs::default()
        }
    }
}

/// Kernels count in 32 bits; `check` refuses what does not fit.
pub(super) fn int(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Number of tiles of a row.
pub(super) fn tiles(columns: usize) -> usize {
    columns.div_ceil(TILE)
}

/// Refuses logits that the kernels cannot read.
pub(super) fn check(name: &'static str, logits: &DeviceRows) -> Result<(), SampleError> {
    if code(logits.dtype).is_none() {
        return Err(SampleError(format!(
            "{name}: the kernels read float32, float16 and bfloat16, not float64"
        )));
    }
    if logits.columns == 0 || logits.columns > MOST_COLUMNS {
        let found = logits.columns;
        return Err(SampleError(format!("{name}: expected 1 to {MOST_COLUMNS} columns, found {found}")));
    }
    Ok(())
}

/// Weights of a row are added up in 64 bits, in units of 2^-44 (`cut.cuh`): the most weights of 1 that fit.
pub(super) const MOST_COLUMNS: usize = (1 << 20) - 1;
/// Rows are the blocks of a grid's second dimension, which has at most this many.
const MOST_GRID: usize = 65_535;

/// Refuses batches of more rows than a grid can have, those of draft logits included.
pub(super) fn check_rows(rows: usize) -> Result<(), SampleError> {
    if rows <= MOST_GRID {
        return Ok(());
    }
    Err(SampleError(format!("the kernels take at most {MOST_GRID} rows of logits at once, found {rows}")))
}

impl Batch {
    /// Threads of a block that finds where a row is cut.
    pub fn cut_threads(&self) -> u32 {
        if self.truncates { CUT_THREADS } else { ROW_THREADS }
    }
}
