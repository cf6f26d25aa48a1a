//! Bad rows, candidates, buffers, and heads that do not fit.

use super::super::*;
use super::fixture::*;

#[test]
fn a_bad_row_ends_the_chain_before_it() {
    for candidates in [None, Some(3)] {
        let settings = ChainSettings { candidates, ..ALL };
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut d = Draft::new(9);
            let whole = d.run(&d.vanilla(), &settings, Rule::Rejection, &SamplingParams::default());
            // One NaN or plus infinity spoils a row; minus infinity has to be everywhere.
            let spoiled = if bad == f64::NEG_INFINITY { 2 * V..3 * V } else { 2 * V + 1..2 * V + 2 };
            d.base.data[spoiled].fill(bad);
            let chain = d.run(&d.vanilla(), &settings, Rule::Rejection, &SamplingParams::default());
            assert_eq!((chain.ids.as_slice(), chain.bad_rows), (&whole.ids[..2], 1));
            assert_eq!((chain.laws.len(), chain.cut), (2, false));
            // One finite logit left is enough.
            if bad == f64::NEG_INFINITY {
                d.base.data[2 * V + 7] = 0.0;
                assert_eq!(
                    d.run(&d.vanilla(), &settings, Rule::Coupled, &SamplingParams::default()).ids[2],
                    7
                );
            }
        }
    }
}

#[test]
fn what_a_head_cannot_read_ends_the_chain() {
    let mut d = Draft::new(9);
    d.hidden.data[H] = f64::NAN;
    let chain = d.greedy(&d.confident());
    assert_eq!((chain.ids.len(), chain.confidence.len(), chain.bad_rows), (1, 1, 1));
    // No embedding for the anchor.
    d.w1.data.truncate(3 * R);
    let chain = d.greedy(&d.vanilla());
    assert_eq!((chain.ids.len(), chain.bad_rows), (0, 1));
}

#[test]
fn candidates_bound_the_law_and_nothing_else() {
    let d = Draft::new(6);
    let params = SamplingParams { temperature: 1.3, ..SamplingParams::default() };
    let settings = ChainSettings { candidates: Some(4), ..ALL };
    for rule in [Rule::Rejection, Rule::Coupled] {
        let chain = d.run(&d.rnn(), &settings, rule, &params);
        let path = [&[3], &chain.ids[..GAMMA - 1]].concat();
        for (k, row) in step_logits(&path, d.base.rows(), Some(d.hidden.rows()), &d.rnn()).iter().enumerate()
        {
            let mut order: Vec<usize> = (0..V).collect();
            order.sort_by(|&a, &b| d.base.at(k)[b].total_cmp(&d.base.at(k)[a]).then(a.cmp(&b)));
            let weight = |t: usize| (row[t] / 1.3).exp();
            let total: f64 = order[..4].iter().map(|&t| weight(t)).sum();
            for (rank, &token) in order.iter().enumerate() {
                let expected = if rank < 4 { weight(token) / total } else { 0.0 };
                assert!((chain.laws[k].prob(token as u32) - expected).abs() < 1e-12);
            }
            assert!(order[..4].contains(&(chain.ids[k] as usize)));
        }
        for enough in [V, V + 5] {
            let settings = ChainSettings { candidates: Some(enough), ..ALL };
            assert_eq!(
                d.run(&d.rnn(), &settings, rule, &params).ids,
                d.run(&d.rnn(), &ALL, rule, &params).ids
            );
        }
    }
}

#[test]
fn a_recycled_chain_gives_its_buffers_to_the_next() {
    let d = Draft::new(6);
    let mut chain = d.run(&d.vanilla(), &ALL, Rule::Rejection, &SamplingParams::default());
    let mut workspace = Workspace::default();
    chain.recycle(&mut workspace);
    assert!(chain.ids.is_empty() && chain.laws.is_empty());
    // Each law gives back two buffers: its row, and the sums of its blocks.
    assert!((0..2 * GAMMA).all(|_| workspace.take_doubles().capacity() > 0));
}

#[test]
fn heads_that_do_not_fit_are_refused_by_name() {
    let d = Draft::new(0);
    for heads in [d.vanilla(), d.gated(), d.rnn(), d.confident(), Heads::default()] {
        assert_eq!(heads.check(V, Some(H)), Ok(()));
    }
    let refused = |heads: Heads<'_>, v, h| heads.check(v, h).unwrap_err().to_string();
    assert_eq!(refused(d.vanilla(), V + 1, None), "markov_w2 must be [13, 3], found [12, 3]");
    assert_eq!(refused(d.gated(), V, Some(H + 1)), "gate_proj.weight must be [3, 8], found [3, 7]");
    assert_eq!(refused(d.rnn(), V, Some(H - 1)), "joint_proj.weight must be [9, 9], found [9, 10]");
    assert_eq!(refused(d.rnn(), V, None), "the RNN Markov head needs the draft's hidden states");
    let confidence = Heads { markov: None, ..d.confident() };
    assert_eq!(confidence.check(V, Some(H)), Err(HeadError::NoMarkov));
    let mut head = d.confident();
    head.confidence.as_mut().unwrap().with_markov = false;
    assert_eq!(refused(head, V, Some(H)), "confidence_head.proj.weight must be [1, 4], found [1, 7]");
}

#[cfg(feature = "mutants")]
#[test]
fn the_planted_cut_looks_at_the_token_that_it_drops() {
    let draws = |seed| {
        let d = Draft::new(seed);
        let settings = ChainSettings { threshold: Some(0.5), ..ALL };
        d.run(&d.confident(), &settings, Rule::Rejection, &SamplingParams::default()).ids.len()
    };
    let sound: Vec<usize> = (0..30).map(draws).collect();
    let _planted = mutant::plant(Mutant::AnticipatingCut);
    assert_ne!((0..30).map(draws).collect::<Vec<_>>(), sound);
}
