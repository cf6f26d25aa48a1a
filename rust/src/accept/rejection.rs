//! Token by token (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).

use super::judged::Judged;
use super::{NumericsError, ratio};
use crate::law::Law;
use crate::mutant::{self, Mutant};

/// Keeps drafted tokens while u < p(x) / q(x). The first that fails is replaced by a draw from
/// max(p - q, 0); if none fails, the last row gives a bonus token.
pub(super) fn judge(block: &mut Judged<'_, '_>) -> Result<(usize, u32), NumericsError> {
    for k in 0..block.drafted() {
        let x = block.ids[k];
        let p = block.target_law(k)?;
        let q = block.draft_law(k)?;
        let kept = block.noise.accept(k) < ratio(p.prob(x), offered(&q, x));
        let token = if kept {
            x
        } else {
            let u = if mutant::on(Mutant::ReusedUniform) {
                block.noise.accept(k)
            } else {
                block.noise.resample(k)
            };
            p.draw_residual(&q, 1.0, u, block.workspace)
        };
        block.report(k, &p, token)?;
        q.recycle(block.workspace);
        block.workspace.recycle(p);
        if !kept {
            return Ok((k, token));
        }
        block.history.push(x);
    }
    let last = block.drafted();
    let token = bonus(block)?;
    Ok((last, token))
}

/// The token after a block of which everything was kept, drawn from the target's last row.
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
