//! Foresight: a round's plan may depend on all of its tokens only where that changes no distribution.

mod toy;

use std::num::NonZeroUsize;
use std::time::Duration;

use dspark_core::accept::Rule;
use dspark_core::engine::*;
use dspark_core::params::SamplingParams;
use dspark_core::schedule::{CostTable, Policy};
use toy::{Inbox, ToyRunner, request};

/// (drafted, verified) of two requests in the first round under a table whose first drafted token is
/// expensive and whose others are free. The budget comes from the round before; there is none yet, so without
/// foresight it is 0.
fn first_round(rule: Rule, temperatures: [f64; 2]) -> [(usize, usize); 2] {
    let throughput = |cost: &[(usize, f64)]| Policy::Throughput {
        cost: CostTable::new(cost).unwrap(),
        lag: NonZeroUsize::new(1),
    };
    let config = EngineConfig {
        policy: throughput(&[(1, 0.010), (64, 0.011)]),
        prefill_chunk_size: 64, // both begin in one round
        ..toy::config(rule, toy::GAMMA)
    };
    let runner = ToyRunner { confident: true, slow: Duration::from_micros(200), ..ToyRunner::default() };
    let (mut engine, queue) = toy::with(config, runner, Default::default());
    let inboxes = [0, 1].map(|i| {
        let params = SamplingParams { temperature: temperatures[i], ..SamplingParams::default() };
        let (request, inbox) = request(i as u64, &[3, 1, 4], params, 300);
        assert!(queue.submit(request).is_ok());
        inbox
    });
    // Until the first blocks, which are verified whatever a plan says, are over.
    (0..40).for_each(|_| engine.step());
    let before = inboxes.each_ref().map(|inbox| inbox.tokens().len());
    queue.set_policy(throughput(&[(2, 1.0), (3, 1.6), (10, 1.6)]));
    while !inboxes.iter().all(Inbox::is_over) {
        engine.step();
    }
    [0, 1].map(|i| {
        inboxes[i].finish(|finish| {
            let mut tokens = 1; // the prefill's
            let next = finish.rounds.iter().find(|round| {
                tokens += round.committed;
                tokens > before[i]
            });
            next.map(|round| (round.drafted, round.verified)).unwrap()
        })
    })
}

#[test]
fn only_coupled_and_wholly_greedy_rounds_look_ahead() {
    for (rule, temperatures, may) in [
        (Rule::Rejection, [0.0, 0.0], true),
        (Rule::Block, [0.0, 0.0], true),
        (Rule::Coupled, [1.0, 1.0], true),
        (Rule::Coupled, [0.0, 1.0], true),
        (Rule::Rejection, [1.0, 1.0], false),
        (Rule::Rejection, [0.0, 1.0], false),
        (Rule::Rejection, [1.0, 0.0], false),
        (Rule::Block, [1.0, 1.0], false),
        (Rule::Block, [0.0, 1.0], false),
    ] {
        let round = first_round(rule, temperatures);
        assert!(round.iter().any(|(drafted, _)| *drafted > 0), "{rule:?} {temperatures:?} drafts");
        let verified: usize = round.iter().map(|(_, verified)| verified).sum();
        assert_eq!(verified > 0, may, "{rule:?} {temperatures:?} {round:?}");
    }
}
