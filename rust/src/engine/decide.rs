//! Who decides on a batch's rows: the runner on their own device if it can, otherwise the core on the host.

use rayon::prelude::*;

use super::active::Active;
use super::{
    Block, ChainBlock, DraftPass, EngineConfig, Failure, FinishReason, Judgement, ModelRunner, PassRows,
    RunnerError,
};
use crate::accept::{NumericsError, accept};
use crate::calibration::{Calibration, fitting};
use crate::chain::{self, ChainSettings};
use crate::schedule::Planner;
use crate::threads;

/// Whether the runner decides for a request. Only the core can choose Markov candidates, on which the
/// distributions of drafted tokens depend.
fn is_placed<M: ModelRunner>(runner: &M, config: &EngineConfig, active: &Active) -> bool {
    config.markov_candidates.is_none() && runner.decides(config.rule, &active.request.params)
}

/// How a round's blocks are drawn.
pub(super) struct Chains<'a> {
    pub(super) config: &'a EngineConfig,
    pub(super) planner: &'a Planner,
}

impl Chains<'_> {
    /// Draws the blocks of a draft pass: request i of `drafting` owns the rows from `gamma * i` on.
    pub(super) fn draw<M: ModelRunner>(
        &self,
        runner: &mut M,
        pass: &mut DraftPass<M::Rows>,
        drafting: &mut [&mut Active],
    ) -> Result<(), RunnerError> {
        let (placed, hosted): (Vec<_>, Vec<_>) =
            drafting.iter_mut().enumerate().partition(|(_, active)| is_placed(runner, self.config, active));
        if !placed.is_empty() {
            let blocks: Vec<_> = placed.iter().map(|(i, active)| self.block(*i, active)).collect();
            let chains = runner.chain(self.config.rule, pass, &blocks)?;
            for ((_, active), chain) in placed.into_iter().zip(chains) {
                active.chain = chain;
            }
        }
        if hosted.is_empty() {
            return Ok(());
        }
        Self::fetch(runner, pass)?;
        let heads = runner.heads();
        let gamma = self.config.gamma;
        let (base, hidden) = (pass.base.rows(), pass.hidden.as_ref().map(PassRows::rows));
        let hidden_rows = heads.hidden_rows(gamma);
        for_each(hosted, |(i, active)| {
            let rows = i * gamma..(i + 1) * gamma;
            let states = i * hidden_rows..(i + 1) * hidden_rows;
            let settings = self.settings(active);
            let noise = active.noise();
            active.chain = chain::draft(
                active.anchor(),
                base.slice(rows),
                hidden.map(|hidden| hidden.slice(states)),
                &heads,
                &settings,
                self.config.rule,
                &active.request.params,
                &mut active.history,
                &noise,
                &mut active.workspace,
            );
        });
        Ok(())
    }

    /// Copies a pass to the host, and checks that it fits the heads.
    fn fetch<M: ModelRunner>(runner: &M, pass: &mut DraftPass<M::Rows>) -> Result<(), RunnerError> {
        pass.base.fetch()?;
        pass.hidden.as_mut().map_or(Ok(()), PassRows::fetch)?;
        let hidden = pass.hidden.as_ref().map(|hidden| hidden.rows().cols());
        runner
            .heads()
            .check(pass.base.rows().cols(), hidden)
            .map_err(|error| RunnerError(format!("the draft's heads do not fit its states: {error}")))
    }

    fn block<'a>(&'a self, index: usize, active: &'a Active) -> ChainBlock<'a> {
        ChainBlock {
            request: active.request.id,
            index,
            anchor: active.anchor(),
            params: &active.request.params,
            history: &active.history,
            noise: active.noise(),
            settings: self.settings(active),
        }
    }

    fn settings(&self, active: &Active) -> ChainSettings<'_> {
        let params = &active.request.params;
        let calibration = fitting(&self.config.calibrations, params);
        ChainSettings {
            limit: active.depth.tokens,
            threshold: self.planner.policy().threshold(),
            candidates: self.config.markov_candidates,
            temperatures: calibration.map(Calibration::temperatures),
            offsets: self.planner.offsets(params.is_greedy()),
        }
    }
}

/// Applies the acceptance rule to each request's rows, beginning with row `first`, and commits the outcome.
/// An error ends the requests that it concerns: those that the runner decides, or the others. Returns how
/// many decisions were within the rounding error of a different one.
pub(super) fn judge<M: ModelRunner>(
    runner: &mut M,
    config: &EngineConfig,
    batch: &mut [Active],
    logits: &mut M::Rows,
    first: usize,
    is_round: bool,
) -> u64 {
    let mut end = first;
    let (placed, hosted): (Vec<_>, Vec<_>) = batch
        .iter_mut()
        .map(|active| {
            let start = end;
            end += active.rows.len();
            (start, active)
        })
        .partition(|(_, active)| is_placed(runner, config, active));
    let mut close = 0;
    if !placed.is_empty() {
        let blocks: Vec<_> = placed.iter().map(|(start, active)| block(*start, active)).collect();
        match runner.judge(config.rule, logits, &blocks) {
            Ok(outcomes) => {
                for ((_, active), outcome) in placed.into_iter().zip(outcomes) {
                    close += take(active, outcome, is_round);
                }
            }
            Err(error) => placed.into_iter().for_each(|(_, active)| active.fail(&error)),
        }
    }
    if hosted.is_empty() {
        return close;
    }
    if let Err(error) = logits.fetch() {
        hosted.into_iter().for_each(|(_, active)| active.fail(&error));
        return close;
    }
    let logits = logits.rows();
    for_each(hosted, |(start, active)| {
        let verified = active.rows.len() - 1;
        let noise = active.noise();
        let verdict = accept(
            config.rule,
            logits.slice(start..start + verified + 1),
            &active.rows[1..],
            &active.chain.laws[..verified],
            &active.request.params,
            &mut active.history,
            &noise,
            &mut active.workspace,
        );
        match verdict {
            Ok(verdict) => active.commit(verdict, verified, is_round),
            Err(error) => end_unusable(active, error.to_string()),
        }
    });
    close
}

/// Commits the runner's judgement of a block; returns 1 if it was within the rounding error, else 0.
fn take(active: &mut Active, outcome: Result<Judgement, NumericsError>, is_round: bool) -> u64 {
    match outcome {
        Ok(Judgement { verdict, is_close }) => {
            let kept = 1..1 + verdict.accepted;
            active.rows[kept].iter().for_each(|&token| active.history.push(token));
            active.commit(verdict, active.rows.len() - 1, is_round);
            u64::from(is_close)
        }
        Err(error) => {
            end_unusable(active, error.to_string());
            0
        }
    }
}

fn block(first_row: usize, active: &Active) -> Block<'_> {
    Block {
        request: active.request.id,
        first_row,
        ids: &active.rows[1..],
        params: &active.request.params,
        history: &active.history,
        noise: active.noise(),
    }
}

fn end_unusable(active: &mut Active, reason: String) {
    active.end(FinishReason::Error, Some(Failure::Numerics(reason)));
}

/// Does all work, a single piece on this thread: handing it over costs more than most rows.
fn for_each<T: Send>(work: Vec<T>, run: impl Fn(T) + Sync + Send) {
    if work.len() > 1 && threads::are_ours() {
        work.into_par_iter().for_each(run);
    } else {
        work.into_iter().for_each(run);
    }
}
