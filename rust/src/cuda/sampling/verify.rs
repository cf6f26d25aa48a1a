//! The acceptance of a batch, decided where its rows are.

use super::edits::changes;
use super::layout::{LAW_BYTES, RawVerdict, Row, SampleArgs};
use super::plan::{Arena, Batch, Launch, ROW_THREADS, TILE_THREADS, Table, check, check_rows, int, tiles};
use super::{DeviceRows, SampleError};
use crate::accept::{NumericsError, Rule, Side, Verdict};
use crate::engine::{Block, Judgement};
use crate::law::BadRow;

/// Where the laws of drafted tokens come from.
#[derive(Clone, Copy, Debug)]
pub enum DeviceDrafts {
    /// Nothing was drafted, or the rule needs no draft laws.
    None,
    /// They are built from logits over the target's vocabulary, under the request's parameters.
    Logits(DeviceRows),
    /// A chain left them.
    Chained(DraftLaws),
}

/// Addresses of the laws that a chain left.
#[derive(Clone, Copy, Debug, Default)]
pub struct DraftLaws {
    pub(super) rows: u64,
    pub(super) changed: u64,
    pub(super) laws: u64,
    /// The column of each target token in a reduced vocabulary, as i32, -1 for none; 0 if columns are tokens.
    pub(super) column: u64,
    pub(super) vocabulary: i32,
}

/// The table to copy to the device, the device memory to allocate, and the launches.
pub struct Verify {
    table: Table,
    scratch: Arena,
    args: SampleArgs,
    result: u64,
    batch: Batch,
    /// Rows of the target; those of draft logits follow.
    rows: usize,
    drafts: DeviceDrafts,
    rule: Rule,
}

/// The most rows of one block.
const MOST_ROWS: usize = 64;

impl Verify {
    /// Lays out the judgement of some blocks over `logits`. `first_drafts` says for each of them where the laws of its
    /// drafted tokens begin among those of `drafts`.
    ///
    /// # Errors
    /// What the kernels do not support, or tokens and rows that do not fit together.
    pub fn new(
        rule: Rule,
        logits: &DeviceRows,
        drafts: DeviceDrafts,
        blocks: &[Block<'_>],
        first_drafts: &[usize],
    ) -> Result<Verify, SampleError> {
        check("target logits", logits)?;
        if let DeviceDrafts::Logits(draft) = &drafts {
            check("draft logits", draft)?;
            if draft.columns != logits.columns {
                let (found, expected) = (draft.columns, logits.columns);
                return Err(SampleError(format!(
                    "draft logits have {found} columns, the target's {expected}"
                )));
            }
        }
        let mut batch = Batch::default();
        for (block, &first_draft) in blocks.iter().zip(first_drafts) {
            add(&mut batch, rule, logits, drafts, block, first_draft)?;
        }
        let rows = batch.rows.len();
        if let DeviceDrafts::Logits(draft) = &drafts {
            let mut first = 0;
            for (i, block) in blocks.iter().enumerate() {
                // The laws made here are packed, whatever rows they are made of.
                batch.requests[i].first_draft = first;
                first += int(block.ids.len());
                for k in 0..block.ids.len() {
                    let edited = changes(block.params, block.history, k);
                    batch.row(draft, first_drafts[i] + k, int(i), k, edited, false);
                }
            }
        }
        check_rows(batch.rows.len())?;
        let mut table = Table::default();
        let mut scratch = Arena::default();
        let tiles = tiles(logits.columns);
        let result = scratch.take(blocks.len(), size_of::<RawVerdict>());
        let args = SampleArgs {
            ids: table.push(&batch.ids),
            residuals: scratch.take(blocks.len() * tiles, 8),
            verdicts: result,
            stride: 1,
            draft_first: if matches!(drafts, DeviceDrafts::Logits(_)) { int(rows) } else { -1 },
            ..batch.args(logits.columns, rule, &mut table, &mut scratch)
        };
        Ok(Verify { table, scratch, args, result, batch, rows, drafts, rule })
    }

    /// The bytes to copy to the device.
    pub fn table(&self) -> &[u8] {
        &self.table.0
    }

    /// Bytes of device memory, aligned to 16, that the kernels write to.
    pub fn scratch(&self) -> usize {
        self.scratch.bytes()
    }

    /// Where in that memory the outcome starts, and how many bytes it has.
    pub fn result(&self) -> (usize, usize) {
        (self.result as usize, self.batch.requests.len() * size_of::<RawVerdict>())
    }

    /// The launches, in order, over a table and scratch memory at these addresses.
    pub fn launches(&self, table: u64, scratch: u64) -> Vec<Launch> {
        let args = self.placed(table, scratch);
        let (tiles, requests) = (args.tiles as u32, args.requests_count as u32);
        if requests == 0 {
            return Vec::new();
        }
        let all = self.batch.rows.len() as u32;
        let mut launches = Vec::new();
        let mut launch = |entry, grid, block| launches.push(Launch { entry, grid, block, args });
        launch("sample_scan", [tiles, all, 1], TILE_THREADS);
        launch("sample_cut", [all, 1, 1], self.batch.cut_threads());
        let draws = self.batch.draws;
        let tests = draws && self.rule == Rule::Rejection;
        if draws {
            launch(if tests { "sample_weigh" } else { "sample_race" }, [tiles, all, 1], TILE_THREADS);
        }
        launch("sample_decide", [requests, 1, 1], ROW_THREADS);
        if tests {
            launch("sample_residual", [tiles, requests, 1], TILE_THREADS);
            launch("sample_finish", [requests, 1, 1], ROW_THREADS);
        }
        launches
    }

    fn placed(&self, table: u64, scratch: u64) -> SampleArgs {
        let mut args = self.args;
        for offset in [&mut args.rows, &mut args.requests, &mut args.edits, &mut args.ids] {
            *offset += table;
        }
        for offset in [
            &mut args.changed,
            &mut args.laws,
            &mut args.tops,
            &mut args.bads,
            &mut args.sums,
            &mut args.races,
            &mut args.residuals,
            &mut args.verdicts,
        ] {
            *offset += scratch;
        }
        match self.drafts {
            DeviceDrafts::None => {}
            DeviceDrafts::Logits(_) => {
                args.draft_rows = args.rows + (self.rows * size_of::<Row>()) as u64;
                args.draft_changed = args.changed;
                args.draft_laws = args.laws + (self.rows * LAW_BYTES) as u64;
            }
            DeviceDrafts::Chained(laws) => {
                args.draft_rows = laws.rows;
                args.draft_changed = laws.changed;
                args.draft_laws = laws.laws;
                args.heads.column = laws.column;
                args.heads.vocabulary = laws.vocabulary;
            }
        }
        args
    }

    /// What the outcome says of each block: its verdict and whether a margin was below the rounding bound.
    pub fn read(&self, result: &[u8]) -> Vec<Result<Judgement, NumericsError>> {
        let word =
            |at: usize| u32::from_ne_bytes([result[at], result[at + 1], result[at + 2], result[at + 3]]);
        (0..self.batch.requests.len())
            .map(|i| {
                let at = i * size_of::<RawVerdict>();
                let [accepted, token, bad, close] = [0, 4, 8, 12].map(|field| word(at + field));
                let side = if bad & OF_DRAFT != 0 { Side::Draft } else { Side::Target };
                match bad_row(bad) {
                    Some(reason) => Err(NumericsError { side, row: accepted as usize, reason }),
                    None => {
                        let accepted = accepted as usize;
                        let verdict = Verdict { accepted, token, logprobs: Vec::new() };
                        Ok(Judgement { verdict, is_close: close != 0 })
                    }
                }
            })
            .collect()
    }
}

/// Marks a bad row as the draft's.
const OF_DRAFT: u32 = 256;

/// What is wrong with a row, by the bits of the device's `Bad`.
pub(super) fn bad_row(bits: u32) -> Option<BadRow> {
    match bits {
        0 => None,
        bits if bits & 1 != 0 => Some(BadRow::NaN),
        bits if bits & 2 != 0 => Some(BadRow::PlusInfinity),
        _ => Some(BadRow::NoCandidate),
    }
}

/// Adds one block's request and rows.
fn add(
    batch: &mut Batch,
    rule: Rule,
    logits: &DeviceRows,
    drafts: DeviceDrafts,
    block: &Block<'_>,
    first_draft: usize,
) -> Result<(), SampleError> {
    super::serves(rule, block.params).map_err(|reason| SampleError(reason.to_owned()))?;
    let drafted = block.ids.len();
    if drafted >= MOST_ROWS || block.first_row + drafted >= logits.rows {
        let (first, rows) = (block.first_row, logits.rows);
        return Err(SampleError(format!(
            "{drafted} drafted tokens from row {first} on: there are {rows} rows, and a block has at most {MOST_ROWS}"
        )));
    }
    if let Some(id) = block.ids.iter().find(|id| **id as usize >= logits.columns) {
        return Err(SampleError(format!(
            "drafted token {id} is outside of the vocabulary of {}",
            logits.columns
        )));
    }
    let tests = rule == Rule::Rejection && drafted > 0 && !block.params.is_greedy();
    let missing = match drafts {
        DeviceDrafts::None => tests,
        DeviceDrafts::Logits(draft) => first_draft + drafted > draft.rows,
        DeviceDrafts::Chained(_) => false,
    };
    if missing {
        return Err(SampleError(format!("{drafted} drafted tokens need as many rows of draft logits")));
    }
    let request = batch.request(block.params, block.history, block.noise, 0);
    let last = batch.requests.len() - 1;
    batch.requests[last].drafted = int(drafted);
    batch.requests[last].first_draft = int(first_draft);
    batch.ids.extend_from_slice(block.ids);
    for k in 0..=drafted {
        let edited = changes(block.params, block.history, k);
        batch.row(logits, block.first_row + k, request, k, edited, false);
    }
    Ok(())
}
