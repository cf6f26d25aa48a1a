//! The rule `rejection` judges token by token (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al.,
//! arXiv 2302.01318).

use super::judged::Judged;
use super::{NumericsError, ratio};
use crate::law::Law;
use crate::mutant::{self, Mutant};

/// Keeps drafted tokens while u < p(x) / q(x). The first that fails is replaced by a draw from
/// max(p - q, 0); if none fails, the last row gives a bonus token.
pub(super) fn judge(block: &mut Judged<'_, '_>) -> Result<(usize, u32), NumericsError> {
    // A rejection of the first token is decided before other threads would be awake.
    let Some(first) = block.ids.first() else { return Ok((0, bonus(block)?)) };
    if let Some(token) = replacement(block, 0, *first)? {
        return Ok((0, token));
    }
    block.shared(|block| {
        for (k, &x) in block.ids.iter().enumerate().skip(1) {
            if let Some(token) = replacement(block, k, x)? {
                return Ok((k, token));
            }
        }
        Ok((block.drafted(), bonus(block)?))
    })
}

/// Judges the drafted token `k`: none if it is kept, else the token in its place.
fn replacement(block: &mut Judged<'_, '_>, k: usize, x: u32) -> Result<Option<u32>, NumericsError> {
    let (p, q) = (block.target_law(k)?, block.draft_law(k)?);
    let replacement = if block.noise.accept(k) < ratio(p.prob(x), offered(&q, x)) {
        None
    } else {
        let reused = mutant::on(Mutant::ReusedUniform);
        let u = if reused { block.noise.accept(k) } else { block.noise.resample(k) };
        Some(p.draw_residual(&q, 1.0, u, block.workspace))
    };
    block.report(k, &p, replacement.unwrap_or(x))?;
    q.recycle(block.workspace);
    block.workspace.recycle(p);
    if replacement.is_none() {
        block.history.push(x);
    }
    Ok(replacement)
}

/// The token after a block that was kept whole, drawn from the target's last row.
pub(super) fn bonus(block: &mut Judged<'_, '_>) -> Result<u32, NumericsError> {
    let last = block.drafted();
    let p = block.target_law(last)?;
    let u = block.noise.resample(last);
    let token = if mutant::on(Mutant::EmptyCutRejects) && last == 0 && block.drafts.len() > 0 {
        let q = block.draft_law(0)?;
        p.draw_residual(&q, 1.0, u, block.workspace)
    } else {
        p.draw(u)
    };
    block.report(last, &p, token)?;
    block.workspace.recycle(p);
    Ok(token)
}

/// q(x) as the acceptance test sees it.
pub(super) fn offered(q: &Law<'_>, x: u32) -> f64 {
    let q = q.prob(x);
    if mutant::on(Mutant::RoundedDraftLaw) { f64::from(half::bf16::from_f64(q)) } else { q }
}
