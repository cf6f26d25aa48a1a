//! Each known bug, planted in the production code, is caught by a check that the clean code passes.

use dspark_core::accept::Rule;
use dspark_core::chain::{ChainSettings, ConfidenceHead, Heads, MarkovHead, MarkovKind, draft};
use dspark_core::history::History;
use dspark_core::law::Workspace;
use dspark_core::mutant::{ALL, Mutant, plant};
use dspark_core::noise::{Counted, Noise};
use dspark_core::params::SamplingParams;
use dspark_core::rows::{Matrix, Row, Rows};

use crate::adaptive::adaptive;
use crate::chi::Test;
use crate::enumeration::worst_stop_rule;
use crate::rounds::test_neighbours;
use crate::sampled::test_pairs;
use crate::toy::Toy;

/// The check that is meant to catch a bug: whether the code passes it.
fn passes(mutant: Mutant) -> bool {
    let toy = Toy::new(6, 101);
    let exact = |rule| worst_stop_rule(&Toy { distance: 1.0, ..Toy::new(3, 102) }, 3, rule) < 1e-12;
    let neighbours = |rule| test_neighbours(rule).iter().all(Test::passes);
    match mutant {
        Mutant::SharedStream | Mutant::ReusedUniform => test_pairs(&toy, 2, Rule::Rejection).passes(),
        Mutant::RoundedDraftLaw => exact(Rule::Rejection) && exact(Rule::Block),
        Mutant::BlockWithoutResidual => exact(Rule::Block),
        Mutant::PositionKeys => neighbours(Rule::Block),
        Mutant::TargetArgmax => {
            let warm = SamplingParams { temperature: 0.8, top_p: 0.9, ..Default::default() };
            test_pairs(&toy.with(warm), 2, Rule::Rejection).passes()
        }
        Mutant::AnticipatingCut => cut_chains().passes(),
        Mutant::EmptyCutRejects => exact(Rule::Rejection) && exact(Rule::Block),
        Mutant::PlanLooksAhead => {
            [Rule::Rejection, Rule::Block].into_iter().all(|rule| adaptive(rule, 1).off < 1e-12)
        }
    }
}

/// First tokens of rounds whose chain is cut by a confidence head: token 0 promises a good next token, the others
/// none.
fn cut_chains() -> Test {
    let toy = Toy { has_memory: false, ..Toy::new(3, 103) };
    let base = [toy.draft_row(&[]), toy.draft_row(&[])].concat();
    let (w1, w2, weight) = ([2.0, -2.0, -2.0], [0.0; 3], [0.0, 1.0]);
    let heads = Heads {
        markov: Some(MarkovHead {
            kind: MarkovKind::Vanilla,
            w1: Rows::F64(Matrix::contiguous(&w1, 1)),
            w2: Rows::F64(Matrix::contiguous(&w2, 1)),
        }),
        confidence: Some(ConfidenceHead { weight: Row::F64(&weight), bias: None, with_markov: true }),
        ..Heads::default()
    };
    let settings = ChainSettings { limit: 2, threshold: Some(0.5), ..Default::default() };
    let base = Rows::F64(Matrix::contiguous(&base, 3));
    let hidden = Rows::F64(Matrix::contiguous(&[0.0, 0.0], 1));
    let mut ws = Workspace::default();
    let mut counts = vec![0; 3];
    for seed in 0..20_000 {
        let noise = Counted::new(Noise { seed, sample: 0 }, 4);
        let mut history = History::default();
        let rule = Rule::Rejection;
        let chain =
            draft(0, base, Some(hidden), &heads, &settings, rule, &toy.params, &mut history, &noise, &mut ws);
        let verdict = toy.block(&[], &chain.ids).judge(rule, &noise);
        counts[[&chain.ids[..verdict.accepted], &[verdict.token]].concat()[0] as usize] += 1;
    }
    Test::new(&counts, &toy.p(&[]))
}

#[test]
fn every_known_bug_is_caught() {
    for mutant in ALL {
        assert!(passes(mutant), "the clean code fails the check for {mutant:?}");
        let planted = plant(mutant);
        assert!(!passes(mutant), "{mutant:?} was not caught");
        drop(planted);
    }
}
