//! The throughput policy on a simulated machine: never slower than without a draft, whatever the drafts are like.
//! Everything is counted noise, so what is asserted here is the same on every run.

mod world;

use dspark_core::schedule::{CostTable, Policy, Skip};
use world::*;

const HEADS: [Head; 5] = [Head::Right, Head::Sure, Head::Modest, Head::Constant, Head::None];

/// Tokens per second of the policy over the better of plain decoding and `fixed`, from its first round on and once it
/// knows the engine; and over `fixed`.
fn against(machine: &Machine, clients: &[Client], rounds: usize) -> [f64; 3] {
    let (plain, fixed) = others(machine, clients, rounds);
    let mut world = World::new(machine.clone(), clients.to_vec(), throughput(machine, 0));
    let (cold, warm) = (world.run(rounds).rate(), world.run(rounds).rate());
    [cold / plain.max(fixed), warm / plain.max(fixed), warm / fixed]
}

#[test]
fn never_slower_than_the_better_of_plain_and_fixed() {
    for (name, machine) in [("flat", gpu()), ("linear", cpu()), ("stepped", steps())] {
        for count in [1, 4, 16] {
            for mean in [0.15, 0.5, 0.7, 0.9] {
                for head in HEADS {
                    let [cold, warm, _] = against(&machine, &clients(count, mean, head), 800);
                    let what =
                        format!("{name}, {count} requests, mean {mean}, {head:?}: {cold:.3} {warm:.3}");
                    assert!(cold >= 0.93 && warm >= 0.97, "{what}");
                }
            }
        }
    }
}

#[test]
fn mixed_batches_keep_the_good_drafts_and_drop_the_bad() {
    for (name, machine) in [("flat", gpu()), ("linear", cpu()), ("stepped", steps())] {
        let mixed = [clients(3, 0.9, Head::Right), clients(3, 0.05, Head::Right)].concat();
        let [cold, warm, _] = against(&machine, &mixed, 800);
        assert!(cold >= 0.93 && warm >= 0.97, "{name}: {cold:.3} {warm:.3}");
    }
}

#[test]
fn faster_than_fixed_where_the_machine_saturates() {
    for (name, machine) in [("flat", gpu()), ("linear", cpu()), ("stepped", steps())] {
        for mean in [0.5, 0.7, 0.9] {
            let [cold, warm, fixed] = against(&machine, &clients(64, mean, Head::Right), 200);
            assert!(fixed > 1.1, "{name}, mean {mean}: {fixed:.3} of fixed");
            assert!(cold >= 0.93 && warm >= 0.97, "{name}, mean {mean}: {cold:.3} {warm:.3}");
        }
    }
}

#[test]
fn a_failing_request_stops_paying_and_comes_back_when_it_is_better() {
    let mut crowd = clients(4, 0.85, Head::Right);
    crowd[2].mean = 0.03;
    let mut world = World::new(cpu(), crowd, throughput(&cpu(), 0));
    world.run(200);
    let drafted = |world: &mut World, rounds: usize| {
        (0..rounds).filter(|_| world.round(true).depths[2].tokens > 0).count()
    };
    let tries = drafted(&mut world, 640);
    assert!((5..=25).contains(&tries), "drafted in {tries} of 640 rounds");
    let skipped = world.round(true).depths[2].skipped;
    assert!(skipped == Some(Skip::Failing), "{skipped:?}");
    world.clients[2].mean = 0.95;
    drafted(&mut world, 200);
    let back = drafted(&mut world, 100);
    assert!(back > 80, "drafted in {back} of 100 rounds");
}

#[test]
fn drafting_ends_and_resumes_with_acceptance() {
    for head in HEADS {
        let mut world = World::new(cpu(), clients(1, 0.9, head), throughput(&cpu(), 0));
        assert!(world.run(200).blocks > 180);
        world.clients[0].mean = 0.1;
        world.run(100);
        let bad = world.run(640);
        assert!(bad.blocks < 40, "{head:?}: {} blocks of 640", bad.blocks);
        world.clients[0].mean = 0.9;
        world.run(300);
        let good = world.run(200);
        assert!(good.blocks > 180, "{head:?}: {} blocks of 200", good.blocks);
    }
}

#[test]
fn drafting_ends_and_resumes_with_costs() {
    // Another process takes the draft's core: drafting gets ten times as slow, and then fast again.
    let slow = Machine { draft: |r| 0.060 + 0.002 * r as f64, ..cpu() };
    let mut world = World::new(cpu(), clients(1, 0.75, Head::Right), throughput(&cpu(), 0));
    assert!(world.run(200).blocks > 180);
    world.machine = slow;
    world.run(150);
    let bad = world.run(640);
    assert!(bad.blocks < 40, "{} blocks of 640", bad.blocks);
    world.machine = cpu();
    world.run(1500);
    let good = world.run(200);
    assert!(good.blocks > 180, "{} blocks of 200", good.blocks);
}

#[test]
fn a_table_measured_on_an_idle_machine_serves_a_busy_one() {
    for (name, machine) in [("flat", gpu()), ("linear", cpu()), ("stepped", steps())] {
        for mean in [0.15, 0.6, 0.9] {
            let busy = Machine { busy: 2.5, ..machine.clone() };
            let crowd = clients(4, mean, Head::Right);
            let (plain, fixed) = others(&busy, &crowd, 1000);
            let mut world = World::new(busy, crowd, throughput(&machine, 0));
            let rate = world.run(1000).rate() / plain.max(fixed);
            assert!(rate >= 0.97, "{name}, mean {mean}: {rate:.3}");
            let off =
                world.planner.cost_table().unwrap().pass_seconds(4) / world.machine.table().pass_seconds(4);
            assert!((0.9..1.1).contains(&off), "{name}, mean {mean}: {off:.3}");
        }
    }
}

#[test]
fn the_correction_finds_a_head_that_is_off_and_leaves_a_right_one_alone() {
    for (head, expected) in [(Head::Right, 0.0), (Head::Sure, -1.5)] {
        let mut world = World::new(gpu(), clients(8, 0.75, head), throughput(&gpu(), 0));
        world.run(600);
        let mut mean = 0.0;
        for _ in 0..400 {
            world.round(true);
            mean += world.planner.offsets(false).unwrap()[0] / 400.0;
        }
        assert!((mean - expected).abs() < 0.15, "{head:?}: {mean:.3}");
        assert!(
            world.planner.offsets(true).unwrap().iter().all(|&x| x == 0.0),
            "greedy requests taught nothing"
        );
    }
}

/// What is measured of a target however slow it is (`dspark.serve.costs.measure`).
#[test]
fn a_table_of_three_widths_is_enough() {
    for (name, machine) in [("flat", gpu()), ("linear", cpu()), ("stepped", steps())] {
        let points = [1, 8, 32].map(|t| (t, (machine.pass)(t)));
        let draft = [(1, (machine.draft)(1) + machine.feed)];
        let cost = CostTable::new(&points).unwrap().with_draft(&draft).unwrap();
        for (count, mean) in [(1, 0.4), (4, 0.4), (8, 0.4), (8, 0.8), (16, 0.5), (32, 0.4)] {
            for head in [Head::Right, Head::None] {
                let crowd = clients(count, mean, head);
                let (plain, fixed) = others(&machine, &crowd, 400);
                let policy = Policy::Throughput { cost: cost.clone(), lag: None };
                let rate = World::new(machine.clone(), crowd, policy).run(400).rate() / plain.max(fixed);
                assert!(rate >= 0.93, "{name}, {count} requests, mean {mean}, {head:?}: {rate:.3}");
            }
        }
    }
}

/// Tokens per second of requests of 47 rounds each, `batch` at a time, whose means lie within `spread` of `mean`: once
/// 10 batches are through.
fn of_short_requests(machine: &Machine, batch: usize, mean: f64, spread: f64, mode: Option<Policy>) -> f64 {
    let drafts = mode.is_some();
    let mut world = World::new(machine.clone(), Vec::new(), mode.unwrap_or(Policy::Fixed));
    let mut sum = Account::default();
    for group in 0..60 {
        world.clients = clients(batch, mean, Head::Right);
        for (i, client) in world.clients.iter_mut().enumerate() {
            let even = ((group * batch + i) * 37 % 101) as f64 / 50.0 - 1.0;
            client.mean = (mean * (1.0 + spread * even)).min(0.95);
        }
        let account = world.stretch(47, drafts);
        if group >= 10 {
            (sum.tokens, sum.seconds) = (sum.tokens + account.tokens, sum.seconds + account.seconds);
        }
    }
    sum.rate()
}

#[test]
fn short_requests_near_the_break_even_do_not_pay_for_their_luck() {
    for (name, machine) in [("idle", idle()), ("flat", gpu())] {
        for (batch, mean) in [(1, 0.15), (1, 0.2), (1, 0.25), (1, 0.3), (4, 0.25), (4, 0.3)] {
            for spread in [0.0, 0.4, 0.9] {
                let rate = |mode| of_short_requests(&machine, batch, mean, spread, mode);
                let best = rate(None).max(rate(Some(Policy::Fixed)));
                let ours = rate(Some(throughput(&machine, 0))) / best;
                assert!(ours >= 0.98, "{name}, {batch} requests, mean {mean} within {spread}: {ours:.3}");
            }
        }
    }
}

/// A request that joins an engine in which drafting loses does not pay to find out.
#[test]
fn new_requests_start_from_what_the_engine_knows() {
    let mut world = World::new(cpu(), clients(1, 0.1, Head::Right), throughput(&cpu(), 0));
    world.run(300);
    let mut blocks = 0;
    for _ in 0..50 {
        world.clients = clients(1, 0.1, Head::Right);
        blocks += world.run(10).blocks;
    }
    assert!(blocks < 25, "{blocks} blocks in 500 rounds of 50 requests");
}
