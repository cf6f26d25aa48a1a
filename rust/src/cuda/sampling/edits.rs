//! How bias, penalties and the mask of stop tokens change a request's rows, token by token.

use super::layout::Edit;
use crate::history::History;
use crate::params::SamplingParams;

/// Every token whose logit may change in some row of the request, ascending: the tokens seen so far if
/// penalties count them, those with a bias, and the stop tokens while fewer than `min_tokens` were generated.
/// Drafted tokens are left to the kernels, which know which of them come before a row.
pub(super) fn edits(params: &SamplingParams, history: &History) -> Vec<Edit> {
    let none = |token| Edit { token, in_output: 0, flags: 0, bias: 0.0 };
    let mut edits = Vec::new();
    if params.penalises() {
        edits.extend(history.distinct().map(|(token, seen)| Edit {
            in_output: seen.in_output,
            flags: Edit::SEEN,
            ..none(token)
        }));
    }
    let biased = |&(token, bias): &(u32, f64)| Edit { flags: Edit::BIASED, bias: bias as f32, ..none(token) };
    edits.extend(params.logit_bias.iter().map(biased));
    if history.generated() < params.min_tokens as usize {
        edits.extend(params.stop_token_ids.iter().map(|&token| Edit { flags: Edit::STOP, ..none(token) }));
    }
    edits.sort_unstable_by_key(|edit| edit.token);
    edits.dedup_by(|next, kept| {
        let same = next.token == kept.token;
        if same {
            // Each kind of change names a token once, so of two numbers added here one is 0.
            kept.in_output += next.in_output;
            kept.bias += next.bias;
            kept.flags |= next.flags;
        }
        same
    });
    edits
}

/// Whether the row after `before` drafted tokens may differ from its logits.
pub(super) fn changes(params: &SamplingParams, history: &History, before: usize) -> bool {
    let generated = history.generated() + before;
    let masks = generated < params.min_tokens as usize && !params.stop_token_ids.is_empty();
    let penalises = params.repetition_penalty != 1.0 || (params.penalises_output() && generated > 0);
    masks || penalises || !params.logit_bias.is_empty()
}

/// Whether a token has two biases: these are added one after the other, but an edit holds only one.
pub(super) fn biases_twice(params: &SamplingParams) -> bool {
    let mut tokens: Vec<_> = params.logit_bias.iter().map(|&(token, _)| token).collect();
    tokens.sort_unstable();
    tokens.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_one_edit_with_all_that_happens_to_it() {
        let params = SamplingParams {
            repetition_penalty: 1.2,
            logit_bias: vec![(9, 1.5), (2, -1.0)],
            min_tokens: 4,
            stop_token_ids: vec![9],
            ..SamplingParams::default()
        };
        let mut history = History::new(&[9, 3]);
        history.push(3);
        let found = edits(&params, &history);
        let tokens: Vec<_> = found.iter().map(|e| (e.token, e.in_output, e.flags, e.bias)).collect();
        let all = Edit::SEEN | Edit::STOP | Edit::BIASED;
        assert_eq!(tokens, [(2, 0, Edit::BIASED, -1.0), (3, 1, Edit::SEEN, 0.0), (9, 0, all, 1.5)]);
    }

    #[test]
    fn a_row_changes_as_soon_as_something_before_it_counts() {
        let presence = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
        let fresh = History::new(&[1]);
        assert!(!changes(&presence, &fresh, 0) && changes(&presence, &fresh, 1));
        let masked = SamplingParams { min_tokens: 2, stop_token_ids: vec![0], ..SamplingParams::default() };
        assert!(changes(&masked, &fresh, 1) && !changes(&masked, &fresh, 2));
        assert!(!biases_twice(&SamplingParams { logit_bias: vec![(1, 0.0), (2, 0.0)], ..presence.clone() }));
        assert!(biases_twice(&SamplingParams { logit_bias: vec![(1, 0.0), (1, 0.5)], ..presence }));
    }
}
