//! A model small enough to check by hand, with caches whose every row matters.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dspark_core::accept::{NumericsError, Rule, accept};
use dspark_core::chain::{self, Chain, ConfidenceHead, Heads};
use dspark_core::engine::*;
use dspark_core::law::{Law, Workspace};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Row, Rows};

pub const VOCAB: usize = 11;
pub const GAMMA: usize = 4;

/// Rows that a toy pass leaves.
pub struct Owned(Vec<f64>, usize);

impl PassRows for Owned {
    fn rows(&self) -> Rows<'_> {
        Rows::F64(Matrix::contiguous(&self.0, self.1))
    }
}

/// The target's logits after `before, last`; the draft's are the same, but for a shift of its `error`.
fn logits(before: u32, last: u32, error: f64) -> Vec<f64> {
    let wave = |x: u32| (f64::from(x) * 1.7).sin() * 2.0;
    (0..VOCAB as u32).map(|x| wave(x * 3 + before * 5 + last * 7) + error * wave(x + last)).collect()
}

/// What the caches of one request hold: a row is the token that it was computed from.
#[derive(Clone, Default)]
pub struct Caches {
    pub rows: Vec<u32>,
    /// The draft's own rows, for requests that draft.
    context: Option<Vec<u32>>,
    /// Where the last part of the prompt began.
    mark: usize,
    /// Positions that there is room for.
    pub reserved: usize,
    verified: Vec<u32>,
}

impl Caches {
    /// Writes rows behind the others; they have to have room.
    fn extend(&mut self, rows: &[u32]) {
        assert!(self.rows.len() + rows.len() <= self.reserved, "a row without room");
        self.rows.extend_from_slice(rows);
        if let Some(context) = &mut self.context {
            context.extend_from_slice(rows);
        }
    }

    fn fork(&self, length: usize, drafts: bool, at_parts: bool) -> Option<Caches> {
        let length = match at_parts {
            true if self.rows.len() <= length => self.rows.len(),
            true if self.mark <= length => self.mark,
            true => return None,
            false => length,
        };
        let context = if drafts { Some(self.context.as_ref()?[..length].to_vec()) } else { None };
        (length > 0).then(|| Caches { rows: self.rows[..length].to_vec(), context, ..Caches::default() })
    }
}

/// Every logit depends on every row, so that a row that is wrong, missing or too many changes the text.
fn sway(rows: &[u32], logits: &mut [f64]) {
    let digest = rows
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &row| (hash ^ u64::from(row)).wrapping_mul(0x100_0000_01b3));
    for (x, logit) in logits.iter_mut().enumerate() {
        let mixed = (digest ^ x as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        *logit += mixed as f64 / (1 << 24) as f64;
    }
}

/// A small generator for tests (splitmix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

#[derive(Default)]
pub struct ToyRunner {
    pub error: f64,
    /// The token whose presence in the committed text makes the target's rows useless.
    pub poison: Option<u32>,
    /// Those rows, if they are not of NaN.
    pub poisoned: Option<Vec<f64>>,
    /// Every target pass over running requests fails, those with this one, or those over more rows.
    pub fail_verify: bool,
    /// See `fail_verify`.
    pub fail_verify_of: Option<RequestId>,
    /// See `fail_verify`.
    pub most_rows: Option<usize>,
    /// Target passes over running requests that were asked for.
    pub passes: Arc<Mutex<usize>>,
    /// What a target pass takes besides: what it costs is what drafts are weighed against.
    pub slow: Duration,
    /// Whose prefill fails, and with it the call.
    pub fail_prefill: Option<RequestId>,
    /// Every draft pass fails.
    pub fail_draft: bool,
    /// Every draft row is of NaN.
    pub bad_drafts: bool,
    /// Whose draft passes fail, and with them the calls, or whose context cannot catch up.
    pub fail_draft_of: Option<RequestId>,
    /// See `fail_draft_of`.
    pub fail_feed_of: Option<RequestId>,
    pub at_parts: bool,
    /// Every fork fails.
    pub fail_fork: bool,
    /// Nothing can be forked.
    pub never_forks: bool,
    /// Rows behind a fork that a source remembers: with more it refuses.
    pub window: Option<usize>,
    /// Gives every drafted token a confidence.
    pub confident: bool,
    /// One call in so many fails, by this generator, and one in three of those behind it: trouble comes in runs.
    pub failing: Option<(Random, usize)>,
    pub in_trouble: bool,
    /// Whose calls failed.
    pub failed: Arc<Mutex<HashSet<RequestId>>>,
    pub caches: Arc<Mutex<HashMap<RequestId, Caches>>>,
    pub released: Arc<Mutex<Vec<RequestId>>>,
    /// Tokens that went through the target in prefills.
    pub prefilled: Arc<Mutex<usize>>,
    /// Decides itself about requests above this temperature, as the core would.
    pub decides_above: Option<f64>,
    /// The call of "prefill", "fork", "feed", "draft", "chain", "verify", "judge" or "reserve" that fails, counted down.
    pub fails_once: Option<(&'static str, usize)>,
    /// Draft passes that were asked for.
    pub drafts: Arc<Mutex<usize>>,
    /// Blocks that it drew and judged.
    pub decided: Arc<Mutex<(usize, usize)>>,
    /// The laws of the last blocks it drew.
    pub laws: HashMap<RequestId, Vec<Law<'static>>>,
}

impl ToyRunner {
    fn row(&self, context: &[u32]) -> Vec<f64> {
        let last = context[context.len() - 1];
        if self.poison == Some(last) {
            return self.poisoned.clone().unwrap_or_else(|| vec![f64::NAN; VOCAB]);
        }
        let mut row = logits(if context.len() > 1 { context[context.len() - 2] } else { 0 }, last, 0.0);
        sway(context, &mut row);
        row
    }

    /// Fails where it was told to.
    fn may_fail_once(&mut self, what: &str) -> Result<(), RunnerError> {
        match &mut self.fails_once {
            Some((call, left)) if *call == what => {
                *left = left.wrapping_sub(1);
                if *left == 0 { Err(RunnerError(format!("{what} failed"))) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Fails now and then, and notes whose end that is.
    fn may_fail(&mut self, what: &str, ids: impl Iterator<Item = RequestId>) -> Result<(), RunnerError> {
        let Some((random, one_in)) = &mut self.failing else { return Ok(()) };
        self.in_trouble = random.chance(if self.in_trouble { 3 } else { *one_in });
        if !self.in_trouble {
            return Ok(());
        }
        self.failed.lock().unwrap().extend(ids);
        Err(RunnerError(format!("{what} failed")))
    }

    /// A call that failed for this request was made again.
    fn works_after_all(&self, id: RequestId) {
        self.failed.lock().unwrap().remove(&id);
    }
}

/// The request that a call is about, if it is one: of several each is asked for again.
fn alone(mut ids: impl ExactSizeIterator<Item = RequestId>) -> impl Iterator<Item = RequestId> {
    if ids.len() == 1 { ids.next() } else { None }.into_iter()
}

impl ModelRunner for ToyRunner {
    type Rows = Owned;

    fn prefill(&mut self, items: &[(RequestId, &[u32], bool)]) -> Result<Owned, RunnerError> {
        self.may_fail_once("prefill")?;
        self.may_fail("prefill", alone(items.iter().map(|(id, ..)| *id)))?;
        if items.iter().any(|(id, ..)| self.fail_prefill == Some(*id)) {
            return Err(RunnerError("prefill failed".into()));
        }
        let shared = self.caches.clone();
        let mut caches = shared.lock().unwrap();
        let mut rows = Vec::new();
        for (id, part, drafts) in items {
            assert!(!part.is_empty(), "an empty part");
            *self.prefilled.lock().unwrap() += part.len();
            let cache = caches.get_mut(id).expect("a reservation");
            if cache.rows.is_empty() {
                cache.context = drafts.then(Vec::new);
            }
            assert_eq!(cache.context.is_some(), *drafts);
            cache.mark = cache.rows.len();
            cache.extend(part);
            rows.extend(self.row(&cache.rows));
            self.works_after_all(*id);
        }
        Ok(Owned(rows, VOCAB))
    }

    fn feed(&mut self, ids: &[RequestId]) -> Result<(), RunnerError> {
        if ids.iter().any(|id| self.fail_feed_of == Some(*id)) {
            return Err(RunnerError("no room".into()));
        }
        self.may_fail_once("feed")?;
        self.may_fail("feed", std::iter::empty())
    }

    fn draft(&mut self, items: &[(RequestId, u32)]) -> Result<DraftPass<Owned>, RunnerError> {
        *self.drafts.lock().unwrap() += 1;
        self.may_fail_once("draft")?;
        self.may_fail("draft", std::iter::empty())?;
        if self.fail_draft || items.iter().any(|(id, _)| self.fail_draft_of == Some(*id)) {
            return Err(RunnerError("out of memory".into()));
        }
        let caches = self.caches.lock().unwrap();
        let mut base = Vec::new();
        for (id, anchor) in items {
            let mut context = caches[id].context.clone().expect("a draft context");
            let before = *context.last().expect("a prompt");
            context.push(*anchor);
            for slot in 0..GAMMA as u32 {
                // Without a Markov head every slot but the first guesses from the anchor alone.
                let mut row = logits(before, anchor + slot, self.error);
                sway(&context, &mut row);
                if self.bad_drafts {
                    row.fill(f64::NAN);
                }
                base.extend(row);
            }
        }
        let states = items
            .iter()
            .flat_map(|(_, anchor)| (0..GAMMA).map(|slot| f64::from(*anchor) / 3.0 - slot as f64));
        let hidden = self.confident.then(|| Owned(states.collect(), 1));
        Ok(DraftPass { base: Owned(base, VOCAB), hidden })
    }

    fn verify(&mut self, items: &[(RequestId, &[u32])]) -> Result<Owned, RunnerError> {
        *self.passes.lock().unwrap() += 1;
        self.may_fail_once("verify")?;
        self.may_fail("verify", alone(items.iter().map(|(id, _)| *id)))?;
        if !self.slow.is_zero() {
            std::thread::sleep(self.slow);
        }
        let rows: usize = items.iter().map(|(_, tokens)| tokens.len()).sum();
        let is_culprit = |(id, _): &(RequestId, &[u32])| self.fail_verify_of == Some(*id);
        if self.fail_verify || items.iter().any(is_culprit) || self.most_rows.is_some_and(|most| rows > most)
        {
            return Err(RunnerError("out of memory".into()));
        }
        let shared = self.caches.clone();
        let mut caches = shared.lock().unwrap();
        let mut rows = Vec::new();
        for (id, tokens) in items {
            let cache = caches.get_mut(id).expect("a live request");
            let mut context = cache.rows.clone();
            for &token in *tokens {
                context.push(token);
                rows.extend(self.row(&context));
            }
            assert!(context.len() <= cache.reserved, "a verify pass without room");
            cache.verified = tokens.to_vec();
            self.works_after_all(*id);
        }
        Ok(Owned(rows, VOCAB))
    }

    fn commit(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError> {
        self.may_fail("commit", items.iter().map(|(id, _)| *id))?;
        let mut caches = self.caches.lock().unwrap();
        for (id, kept) in items {
            let cache = caches.get_mut(id).expect("a live request");
            let rows = std::mem::take(&mut cache.verified);
            cache.extend(&rows[..*kept]);
        }
        Ok(())
    }

    fn reserve(&mut self, items: &[(RequestId, usize)]) -> Result<(), RunnerError> {
        self.may_fail_once("reserve")?;
        self.may_fail("reserve", items.iter().map(|(id, _)| *id))?;
        let mut caches = self.caches.lock().unwrap();
        for (id, positions) in items {
            let cache = caches.entry(*id).or_default();
            assert!(cache.rows.len() <= *positions, "rows cut off");
            cache.reserved = *positions;
            self.works_after_all(*id);
        }
        Ok(())
    }

    fn fork(
        &mut self,
        new: RequestId,
        source: RequestId,
        length: usize,
        drafts: bool,
    ) -> Result<usize, RunnerError> {
        self.may_fail_once("fork")?;
        self.may_fail("fork", [new].into_iter())?;
        if self.fail_fork {
            return Err(RunnerError("out of memory".into()));
        }
        let mut caches = self.caches.lock().unwrap();
        let known = caches.get(&source).expect("a known source");
        self.works_after_all(new);
        if self.window.is_some_and(|window| known.rows.len() > length + window) {
            return Ok(0);
        }
        let Some(forked) = known.fork(length, drafts, self.at_parts) else { return Ok(0) };
        let taken = forked.rows.len();
        let cache = caches.get_mut(&new).expect("a reservation");
        assert!(cache.rows.is_empty() && taken <= cache.reserved);
        *cache = Caches { reserved: cache.reserved, ..forked };
        Ok(taken)
    }

    fn forks(&self) -> Forks {
        match (self.never_forks, self.at_parts) {
            (true, _) => Forks::Never,
            (false, true) => Forks::AtParts,
            (false, false) => Forks::Anywhere,
        }
    }

    fn release(&mut self, ids: &[RequestId]) {
        let mut caches = self.caches.lock().unwrap();
        for id in ids {
            caches.remove(id);
        }
        self.released.lock().unwrap().extend(ids);
    }

    fn heads(&self) -> Heads<'_> {
        let head = ConfidenceHead { weight: Row::F64(&[1.0]), bias: None, with_markov: false };
        Heads { confidence: self.confident.then_some(head), ..Heads::default() }
    }

    fn decides(&self, _rule: Rule, params: &SamplingParams) -> bool {
        self.decides_above.is_some_and(|bound| params.temperature > bound)
    }

    fn chain(
        &mut self,
        rule: Rule,
        pass: &DraftPass<Owned>,
        blocks: &[ChainBlock<'_>],
    ) -> Result<Vec<Chain>, RunnerError> {
        self.laws.clear();
        self.may_fail_once("chain")?;
        self.may_fail("chain", std::iter::empty())?;
        self.decided.lock().unwrap().0 += blocks.len();
        let mut chains = Vec::new();
        for block in blocks {
            let rows = block.index * GAMMA..(block.index + 1) * GAMMA;
            let mut chain = chain::draft(
                block.anchor,
                pass.base.rows().slice(rows.clone()),
                pass.hidden.as_ref().map(|hidden| hidden.rows().slice(rows)),
                &self.heads(),
                &block.settings,
                rule,
                block.params,
                &mut block.history.clone(),
                &block.noise,
                &mut Workspace::default(),
            );
            self.laws.insert(block.request, std::mem::take(&mut chain.laws));
            chains.push(chain);
        }
        Ok(chains)
    }

    fn judge(
        &mut self,
        rule: Rule,
        logits: &Owned,
        blocks: &[Block<'_>],
    ) -> Result<Vec<Result<Judgement, NumericsError>>, RunnerError> {
        self.may_fail_once("judge")?;
        self.decided.lock().unwrap().1 += blocks.len();
        let judge = |block: &Block<'_>| {
            let rows = logits.rows().slice(block.first_row..block.first_row + block.ids.len() + 1);
            let laws = self.laws.get(&block.request).map_or(&[][..], Vec::as_slice);
            let (history, workspace) = (&mut block.history.clone(), &mut Workspace::default());
            let outcome = accept(rule, rows, block.ids, laws, block.params, history, &block.noise, workspace);
            match outcome {
                Ok(verdict) => Ok(Judgement { verdict, is_close: true }),
                Err(dspark_core::accept::AcceptError::Numerics(error)) => Err(error),
                Err(error) => panic!("{error}"),
            }
        };
        Ok(blocks.iter().map(judge).collect())
    }
}
