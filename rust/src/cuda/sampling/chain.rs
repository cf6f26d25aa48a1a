//! Markov chains of a batch, drawn where the base logits are.

use super::edits::changes;
use super::heads::{DeviceHeads, check_shapes, place};
use super::layout::SampleArgs;
use super::plan::{Arena, Batch, Launch, ROW_THREADS, TILE_THREADS, Table, check, check_rows, int};
use super::verify::DraftLaws;
use super::{DeviceRows, SampleError};
use crate::accept::Rule;
use crate::calibration::sigmoid;
use crate::chain::Chain;
use crate::engine::ChainBlock;
use crate::schedule::threshold::is_below;

/// The table to copy to the device, the device memory to allocate, and the launches.
pub struct ChainPlan {
    table: Table,
    scratch: Arena,
    args: SampleArgs,
    batch: Batch,
    gamma: usize,
    slots: usize,
    lead: usize,
    bias: f64,
    has_confidence: bool,
}

/// Elements of a latent vector that one block of threads computes.
const LATENT_ROWS: usize = 8;

impl ChainPlan {
    /// Lays out chains behind some anchors over `base`, `[requests * gamma, columns]`, and `hidden`.
    ///
    /// # Errors
    /// What the kernels do not support.
    pub fn new(
        rule: Rule,
        gamma: usize,
        base: &DeviceRows,
        hidden: Option<&DeviceRows>,
        heads: &DeviceHeads,
        blocks: &[ChainBlock<'_>],
    ) -> Result<ChainPlan, SampleError> {
        check("draft logits", base)?;
        check_shapes(heads, gamma, base, hidden)?;
        let mut placed = place(heads, hidden)?;
        let lead = placed.lead as usize;
        let mut batch = Batch::default();
        for block in blocks {
            super::serves(rule, block.params).map_err(|reason| SampleError(reason.to_owned()))?;
            if block.settings.candidates.is_some_and(|count| count < base.columns) {
                return Err(SampleError("candidates of the Markov chain are chosen on the host".into()));
            }
            if (block.index + 1) * gamma > base.rows {
                let (index, rows) = (block.index, base.rows);
                return Err(SampleError(format!(
                    "there is no block {index} of {gamma} among {rows} draft logits"
                )));
            }
            let request = batch.request(block.params, block.history, block.noise, block.anchor);
            let last = batch.requests.len() - 1;
            batch.requests[last].first_id = request * int(gamma);
            batch.requests[last].first_row = int(block.index);
            for k in 0..gamma {
                let edited = changes(block.params, block.history, k);
                batch.row(base, block.index * gamma + k, request, k, edited, true);
            }
        }
        check_rows(batch.rows.len())?;
        let mut table = Table::default();
        let mut scratch = Arena::default();
        let rows = batch.rows.len();
        let rank = placed.w1.columns as usize;
        if heads.vocabulary.is_none() {
            placed.vocabulary = 0;
        }
        // What goes to the host comes first: ids, what is wrong with rows, products of the confidence head.
        let args = SampleArgs {
            ids: scratch.take(rows, 4),
            draft_bads: scratch.take(rows, 4),
            dots: scratch.take(rows, 4),
            latents: scratch.take(blocks.len() * rank, 4),
            states: scratch.take(2 * blocks.len() * rank, 4),
            heads: placed,
            stride: int(gamma),
            draft_first: -1,
            ..batch.args(base.columns, rule, &mut table, &mut scratch)
        };
        let slots = blocks.iter().map(|block| block.settings.limit.min(gamma)).max().unwrap_or(0);
        let bias = heads.confidence.map_or(0.0, |(_, bias, _)| bias);
        let has_confidence = heads.confidence.is_some();
        Ok(ChainPlan { table, scratch, args, batch, gamma, slots, lead, bias, has_confidence })
    }

    /// The bytes to copy to the device.
    pub fn table(&self) -> &[u8] {
        &self.table.0
    }

    /// Bytes of device memory, aligned to 16, that the kernels write to. They hold the laws of the drafted
    /// tokens: keep them, and the table, until the block has been judged.
    pub fn scratch(&self) -> usize {
        self.scratch.bytes()
    }

    /// Where in that memory the outcome starts, and how many bytes it has.
    pub fn result(&self) -> (usize, usize) {
        let end = self.args.dots as usize + 4 * self.batch.rows.len();
        (self.args.ids as usize, end - self.args.ids as usize)
    }

    /// The launches, in order, over a table and scratch memory at these addresses.
    pub fn launches(&self, table: u64, scratch: u64) -> Vec<Launch> {
        let args = self.placed(table, scratch);
        let (requests, tiles) = (args.requests_count as u32, args.tiles as u32);
        let mut launches = Vec::new();
        if requests == 0 {
            return launches;
        }
        let has_latent = args.heads.latent.rows > 0;
        let latents = (args.heads.w1.columns as usize).div_ceil(LATENT_ROWS) as u32;
        for slot in -(self.lead as i32)..self.slots as i32 {
            let args = SampleArgs { offset: slot, ..args };
            let mut launch = |entry, grid, block| launches.push(Launch { entry, grid, block, args });
            if has_latent {
                launch("chain_latent", [requests, latents, 1], TILE_THREADS);
            }
            if slot < 0 {
                continue;
            }
            launch("chain_bend", [requests, tiles, 1], TILE_THREADS);
            launch("sample_cut", [requests, 1, 1], self.batch.cut_threads());
            if self.batch.draws {
                let measure = if args.rule == 0 { "sample_weigh" } else { "sample_race" };
                launch(measure, [tiles, requests, 1], TILE_THREADS);
            }
            launch("chain_draw", [requests, 1, 1], ROW_THREADS);
        }
        if self.has_confidence && self.slots > 0 {
            let grid = [self.slots as u32, requests, 1];
            launches.push(Launch { entry: "chain_confide", grid, block: 32, args });
        }
        launches
    }

    /// Where the laws of the drafted tokens will be. Those of request i of the plan start at row i * gamma.
    pub fn laws(&self, table: u64, scratch: u64) -> DraftLaws {
        let args = self.placed(table, scratch);
        DraftLaws {
            rows: args.rows,
            changed: args.changed,
            laws: args.laws,
            column: args.heads.column,
            vocabulary: args.heads.vocabulary,
        }
    }

    fn placed(&self, table: u64, scratch: u64) -> SampleArgs {
        let mut args = self.args;
        for offset in [&mut args.rows, &mut args.requests, &mut args.edits] {
            *offset += table;
        }
        for offset in [
            &mut args.ids,
            &mut args.draft_bads,
            &mut args.dots,
            &mut args.changed,
            &mut args.laws,
            &mut args.tops,
            &mut args.bads,
            &mut args.sums,
            &mut args.races,
            &mut args.latents,
            &mut args.states,
        ] {
            *offset += scratch;
        }
        args
    }

    /// The chains in the outcome, each as far as its own settings go. Their laws stay on the device.
    pub fn read(&self, result: &[u8], blocks: &[ChainBlock<'_>]) -> Vec<Chain> {
        let word = |start: u64, i: usize| {
            let at = (start - self.args.ids) as usize + 4 * i;
            u32::from_ne_bytes([result[at], result[at + 1], result[at + 2], result[at + 3]])
        };
        let chain = |(i, block): (usize, &ChainBlock<'_>)| {
            let settings = &block.settings;
            let mut chain = Chain::default();
            for slot in 0..settings.limit.min(self.gamma) {
                let row = i * self.gamma + slot;
                let bad = word(self.args.draft_bads, row);
                let confidence = self.has_confidence.then(|| {
                    let logit = f64::from(f32::from_bits(word(self.args.dots, row))) + self.bias;
                    let temperature = settings.temperatures.map_or(1.0, |all| all[slot]);
                    let offset = settings.offsets.map_or(0.0, |all| all[slot]);
                    sigmoid(logit / temperature + offset) as f32
                });
                if bad & NO_EMBEDDING != 0 || confidence.is_some_and(f32::is_nan) {
                    chain.bad_rows += 1;
                    break;
                }
                if confidence.is_some_and(|c| is_below(c, settings.threshold.unwrap_or(0.0))) {
                    chain.cut = true;
                    break;
                }
                if bad != 0 {
                    chain.bad_rows += 1;
                    break;
                }
                chain.ids.push(word(self.args.ids, row));
                chain.confidence.extend(confidence);
            }
            chain
        };
        blocks.iter().enumerate().map(chain).collect()
    }
}

/// Marks a slot whose previous token has no embedding.
const NO_EMBEDDING: u32 = 8;
