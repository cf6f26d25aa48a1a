//! A block under judgement: what the three rules have in common.

use super::drafts::{Drafts, Read};
use super::{AcceptError, NumericsError, Rule, Side, Verdict, block, coupled, rejection};
use crate::history::History;
use crate::law::{LONG, Law, TokenLogprobs, Workspace};
use crate::mutant::{self, Mutant};
use crate::noise::RoundNoise;
use crate::params::SamplingParams;
use crate::rows::Rows;
use crate::threads;

/// A block, its request and its noise. Rules walk along the block: the law of a row is the one after the
/// tokens pushed to the history so far.
pub(super) struct Judged<'a, 'b> {
    pub target: Rows<'a>,
    pub ids: &'a [u32],
    pub drafts: Drafts<'a>,
    pub params: &'a SamplingParams,
    pub history: &'b mut History,
    pub noise: &'a dyn RoundNoise,
    pub workspace: &'b mut Workspace,
    pub logprobs: Vec<TokenLogprobs>,
}

impl<'a> Judged<'a, '_> {
    /// Applies a rule. The history then ends with the last accepted token, or is unchanged if this fails.
    pub fn judge(mut self, rule: Rule) -> Result<Verdict, AcceptError> {
        self.check()?;
        let before = self.history.generated();
        let outcome = match rule {
            Rule::Rejection => rejection::judge(&mut self),
            Rule::Block => block::judge(&mut self),
            Rule::Coupled => coupled::judge(&mut self),
        };
        let kept = outcome.as_ref().map_or(0, |&(accepted, _)| accepted);
        self.history.rewind(before + kept);
        let (accepted, token) = outcome?;
        Ok(Verdict { accepted, token, logprobs: self.logprobs })
    }

    fn check(&self) -> Result<(), AcceptError> {
        let (drafted, rows, vocabulary) = (self.ids.len(), self.target.rows(), self.target.cols());
        if rows != drafted + 1 {
            return Err(AcceptError::Shape(format!(
                "{drafted} drafted tokens need {} rows of target logits, found {rows}",
                drafted + 1
            )));
        }
        match self.ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(()),
            Some(id) => Err(AcceptError::Shape(format!(
                "drafted token {id} is outside of the vocabulary of {vocabulary}"
            ))),
        }
    }

    /// Runs a rule, or the rest of one, on the threads of the pool if the rows are long.
    ///
    /// Entering and leaving the pool takes about as long as one row.
    pub fn shared<T: Send>(&mut self, rule: impl FnOnce(&mut Self) -> T + Send) -> T {
        let is_worth_it = self.target.cols() >= LONG
            && !self.params.is_greedy()
            && threads::are_ours()
            && rayon::current_thread_index().is_none()
            && rayon::current_num_threads() > 1;
        if is_worth_it { rayon::scope(|_| rule(self)) } else { rule(self) }
    }

    /// Number of drafted tokens.
    pub fn drafted(&self) -> usize {
        self.ids.len()
    }

    /// The target's law of row `k`.
    pub fn target_law(&mut self, k: usize) -> Result<Law<'a>, NumericsError> {
        if mutant::on(Mutant::TargetArgmax) {
            return self.law(k, &SamplingParams::greedy());
        }
        self.law(k, self.params)
    }

    fn law(&mut self, k: usize, params: &SamplingParams) -> Result<Law<'a>, NumericsError> {
        let law = Law::new(self.target.row(k), params, self.history, self.workspace);
        law.map_err(|reason| NumericsError { side: Side::Target, row: k, reason })
    }

    /// The law that the drafted token `k` was drawn from.
    pub fn draft_law(&mut self, k: usize) -> Result<Read<'a>, NumericsError> {
        self.drafts.law(k, self.params, self.history, self.workspace)
    }

    /// Records the log-probabilities of a token kept from row `k`, of law `p`, if the request wants them.
    pub fn report(&mut self, k: usize, p: &Law<'_>, token: u32) -> Result<(), NumericsError> {
        let Some(n) = self.params.logprobs else { return Ok(()) };
        let reported = if self.params.is_greedy() {
            // At temperature 0 the law is a point, so what is reported is the law before temperature.
            let law = self.law(k, &self.params.before_temperature())?;
            let reported = law.logprobs(token, n, self.workspace);
            self.workspace.recycle(law);
            reported
        } else {
            p.logprobs(token, n, self.workspace)
        };
        self.logprobs.push(reported);
        Ok(())
    }
}
