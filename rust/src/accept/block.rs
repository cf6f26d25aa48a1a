//! The rule `block` judges the block as a whole (Sun et al., "Block verification accelerates speculative
//! decoding", arXiv 2403.10444, algorithm 2).

use super::drafts::Read;
use super::judged::Judged;
use super::rejection::{bonus, offered};
use super::{NumericsError, ratio};
use crate::law::Law;
use crate::mutant::{self, Mutant};

/// A prefix of the drafted tokens and the laws of the token behind it.
struct Prefix<'a> {
    /// P of the prefix.
    weight: f64,
    p: Law<'a>,
    q: Read<'a>,
}

/// Keeps the longest prefix whose test succeeds.
///
/// With P_0 = 1 and P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1), prefix i succeeds if u_i < h_i, where
/// h_i = Z_i / (Z_i + 1 - P_i) for the mass Z_i of max(P_i p_{i+1} - q_{i+1}, 0), and h_L = P_L. The token
/// behind the prefix is drawn from that residual; behind the whole block, from the target's last row.
pub(super) fn judge(block: &mut Judged<'_, '_>) -> Result<(usize, u32), NumericsError> {
    block.shared(judge_prefixes)
}

fn judge_prefixes(block: &mut Judged<'_, '_>) -> Result<(usize, u32), NumericsError> {
    let before = block.history.generated();
    let drafted = block.drafted();
    let mut prefixes = Vec::with_capacity(drafted);
    let mut weight = 1.0;
    for k in 0..drafted {
        let x = block.ids[k];
        let (p, q) = (block.target_law(k)?, block.draft_law(k)?);
        // After a token that the target never draws, every longer prefix has weight 0, even where the draft
        // never draws the token either (which would give 0 times infinity).
        let longer =
            if weight > 0.0 { f64::min(weight * ratio(p.prob(x), offered(&q, x)), 1.0) } else { 0.0 };
        prefixes.push(Prefix { weight, p, q });
        weight = longer;
        block.history.push(x);
    }
    // The longest is tested first: the residual masses of shorter ones are needed only if it fails.
    let whole = drafted == 0 || block.noise.accept(drafted - 1) < weight;
    let kept = if whole {
        drafted
    } else {
        let succeeds = |&k: &usize| k == 0 || prefixes[k].succeeds(k, block);
        (0..drafted).rev().find(succeeds).unwrap_or_default()
    };

    block.history.rewind(before);
    for (k, prefix) in prefixes[..kept].iter().enumerate() {
        let x = block.ids[k];
        block.report(k, &prefix.p, x)?;
        block.history.push(x);
    }
    let token = match prefixes.get(kept) {
        None => bonus(block)?,
        Some(Prefix { weight, p, q }) => {
            let u = block.noise.resample(kept);
            let token = p.draw_residual(q, *weight, u, block.workspace);
            block.report(kept, p, token)?;
            token
        }
    };
    for Prefix { p, q, .. } in prefixes {
        block.workspace.recycle(p);
        q.recycle(block.workspace);
    }
    Ok((kept, token))
}

impl Prefix<'_> {
    /// Whether u_k < h_k for this prefix of length k, shorter than the block.
    fn succeeds(&self, k: usize, block: &mut Judged<'_, '_>) -> bool {
        let success = if mutant::on(Mutant::BlockWithoutResidual) || self.weight == 1.0 {
            // Nothing is subtracted from a certain prefix: h = Z / Z.
            self.weight
        } else {
            let mass = self.p.residual_mass(&self.q, self.weight, block.workspace);
            mass / (mass + 1.0 - self.weight)
        };
        block.noise.accept(k - 1) < success
    }
}
