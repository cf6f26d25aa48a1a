use super::*;

fn start() -> CostTable {
    let pass = [(1, 0.010), (2, 0.011), (4, 0.013), (8, 0.017), (16, 0.025), (64, 0.073)];
    let table = CostTable::new(&pass).unwrap().with_draft(&[(1, 0.004), (8, 0.006)]).unwrap();
    table.with_request_seconds(0.001).unwrap().with_fixed_seconds(0.0005).unwrap()
}

fn round(width: usize, factor: f64) -> RoundTime {
    let table = start();
    let time = RoundTime {
        drafting: 1,
        draft: factor * 0.004,
        requests: 1,
        tokens: width,
        verify: factor * (table.pass_seconds(width) + 0.001),
        ..RoundTime::default()
    };
    RoundTime { total: time.draft + time.verify + 0.0005, ..time }
}

fn ratio(costs: &LiveCosts, width: usize) -> f64 {
    costs.table().pass_seconds(width) / start().pass_seconds(width)
}

#[test]
fn a_machine_that_measures_as_the_table_says_changes_nothing() {
    let mut costs = LiveCosts::new(start());
    (0..100).for_each(|i| assert_eq!(costs.add(&round([1, 5, 8][i % 3], 1.0)), i % 8 == 7));
    for width in [1, 2, 5, 8, 30, 100] {
        assert!((ratio(&costs, width) - 1.0).abs() < 0.01, "{width}: {}", ratio(&costs, width));
    }
    assert!((costs.table().draft_seconds(8, 0) - 0.006).abs() < 1e-5);
    assert!((costs.table().request_seconds() - 0.001).abs() < 1e-5);
}

#[test]
fn a_busier_machine_is_followed_within_tens_of_rounds_at_every_width() {
    let mut costs = LiveCosts::new(start());
    (0..64).for_each(|i| _ = costs.add(&round([1, 5, 8][i % 3], 1.0)));
    (0..40).for_each(|i| _ = costs.add(&round([5, 8][i % 2], 1.5)));
    for width in [1, 2, 5, 8, 64] {
        assert!((1.35..1.6).contains(&ratio(&costs, width)), "{width}: {}", ratio(&costs, width));
    }
    assert!((costs.table().draft_seconds(1, 0) / 0.006 - 1.0).abs() < 0.1);
    (0..40).for_each(|i| _ = costs.add(&round([5, 8][i % 2], 1.0)));
    for width in [1, 5, 8, 64] {
        assert!((0.9..1.1).contains(&ratio(&costs, width)), "{width}: {}", ratio(&costs, width));
    }
}

#[test]
fn widths_never_seen_scale_along() {
    let mut costs = LiveCosts::new(start());
    (0..64).for_each(|_| _ = costs.add(&round(8, 1.5)));
    for width in [1, 8, 64] {
        assert!((ratio(&costs, width) - 1.5).abs() < 0.05, "{width}: {}", ratio(&costs, width));
    }
}

#[test]
fn a_width_that_the_start_got_wrong_is_learned_alone() {
    let mut costs = LiveCosts::new(start());
    (0..400).for_each(|i| _ = costs.add(&[round(1, 1.0), round(8, 1.4)][i % 2]));
    assert!((ratio(&costs, 1) - 1.0).abs() < 0.07, "{}", ratio(&costs, 1));
    assert!((ratio(&costs, 8) - 1.4).abs() < 0.1, "{}", ratio(&costs, 8));
}

#[test]
fn one_slow_round_moves_little_and_what_is_no_time_nothing() {
    let mut costs = LiveCosts::new(start());
    (0..64).for_each(|_| _ = costs.add(&round(8, 1.0)));
    (0..8).for_each(|i| _ = costs.add(&round(8, if i == 0 { 50.0 } else { 1.0 })));
    assert!((ratio(&costs, 8) - 1.0).abs() < 0.06, "{}", ratio(&costs, 8));
    let before = costs.table().clone();
    for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        let time = RoundTime {
            tokens: 8,
            requests: 1,
            verify: bad,
            drafting: 1,
            draft: bad,
            total: bad,
            ..RoundTime::default()
        };
        (0..8).for_each(|_| _ = costs.add(&time));
    }
    assert!((costs.table().pass_seconds(8) / before.pass_seconds(8) - 1.0).abs() < 0.02);
}

#[test]
fn a_table_without_draft_passes_learns_them_and_the_curve_never_falls() {
    let mut costs = LiveCosts::new(CostTable::new(&[(1, 0.01)]).unwrap());
    for i in 0..200 {
        let time =
            RoundTime { chain: 0.0006, drafted: 6, feed: 0.001, ..round([1, 9, 30, 200, 700][i % 5], 1.0) };
        costs.add(&RoundTime { total: time.total + 0.0016, ..time });
    }
    let table = costs.table();
    assert!((table.draft_seconds(1, 0) - 0.005).abs() < 2e-4);
    assert!((table.token_seconds() - 1e-4).abs() < 1e-5);
    assert!((table.fixed_seconds() - 5e-4).abs() < 1e-4, "{}", table.fixed_seconds());
    let curve: Vec<f64> = (1..800).map(|t| table.pass_seconds(t)).collect();
    assert!(curve.windows(2).all(|pair| pair[0] <= pair[1]));
}

#[test]
fn memory_is_bounded() {
    assert_eq!([1, 16, 17, 20, 31, 32, 39, 40, 1000].map(quantised), [1, 16, 16, 20, 28, 32, 32, 40, 896]);
    let mut costs = LiveCosts::new(start());
    (1..5000).for_each(|width| _ = costs.add(&round(width, 1.0)));
    assert!(costs.pass.cells.len() < 60);
}

/// Contexts that wait are fed in bursts, by rounds without a draft.
#[test]
fn what_plain_rounds_feed_now_and_then_is_part_of_their_price() {
    let mut costs = LiveCosts::new(start());
    let plain = RoundTime { drafting: 0, draft: 0.0, requests: 4, tokens: 4, ..round(4, 1.0) };
    for i in 0..4000 {
        let feed = if i % 100 == 0 { 0.040 } else { 0.0 };
        costs.add(&RoundTime { feed, total: plain.verify + 0.0005 + feed, ..plain });
    }
    let table = costs.table();
    let feed = table.plain_seconds(4) - table.round_seconds(4, 4);
    assert!((0.0003..0.0005).contains(&feed), "{feed}");
    assert!((table.fixed_seconds() - 0.0005).abs() < 1e-5);
}
