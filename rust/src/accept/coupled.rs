//! The rule `coupled` keeps drafted tokens while they equal the target's own draw (Daliri et al., "Coupling
//! without communication and drafter-invariant speculative decoding", arXiv 2408.07978).

use super::NumericsError;
use super::judged::Judged;

/// The target's token of a row is argmax(log p + Gumbel noise of the position). Drafted tokens are kept
/// while they equal it; the first that differs is replaced by it.
pub(super) fn judge(block: &mut Judged<'_, '_>) -> Result<(usize, u32), NumericsError> {
    block.shared(|block| {
        let mut k = 0;
        loop {
            let p = block.target_law(k)?;
            let token = p.gumbel_argmax(block.noise, k);
            block.report(k, &p, token)?;
            block.workspace.recycle(p);
            if block.ids.get(k) != Some(&token) {
                return Ok((k, token));
            }
            block.history.push(token);
            k += 1;
        }
    })
}
