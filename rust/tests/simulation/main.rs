//! The throughput policy on a simulated machine: never slower than without a draft, whatever the drafts are like.

mod world;

use world::*;

#[test]
#[ignore = "prints"]
fn grid() {
    for (name, machine) in [("gpu", gpu()), ("cpu", cpu()), ("steps", steps())] {
        for count in [1, 4, 16, 64] {
            for mean in [0.15, 0.5, 0.7, 0.9] {
                let mut line = format!("{name:6} {count:3} {mean:4}");
                for head in [Head::Right, Head::Sure, Head::Constant, Head::None] {
                    let clients = clients(count, mean, head);
                    let (plain, fixed) = others(&machine, &clients, 2000);
                    let best = plain.max(fixed);
                    for lag in [0, 1] {
                        let mut world = World::new(machine.clone(), clients.clone(), throughput(&machine, lag));
                        let rate = world.run(2000).rate();
                        line += &format!(" {:.2}", rate / best);
                    }
                    if head == Head::Right { line += &format!(" (f/p {:.2})", fixed / plain); }
                }
                println!("{line}");
            }
        }
    }
}
