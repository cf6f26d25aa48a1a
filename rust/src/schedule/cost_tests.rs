use super::*;
use proptest::prelude::*;

#[test]
fn what_is_not_a_table_is_refused_by_name() {
    let refused = |points: &[(usize, f64)]| CostTable::new(points).unwrap_err();
    assert_eq!(refused(&[]), CostError::Empty);
    assert_eq!(refused(&[(0, 1.0)]), CostError::NoTokens);
    assert_eq!(refused(&[(1, 1.0), (2, 0.0)]), CostError::Seconds { tokens: 2, seconds: 0.0 });
    assert_eq!(refused(&[(2, -1.0)]), CostError::Seconds { tokens: 2, seconds: -1.0 });
    assert_eq!(refused(&[(4, 1.0), (1, 1.0), (4, 2.0)]), CostError::Duplicate { tokens: 4 });
    for bad in [f64::NAN, f64::INFINITY] {
        assert!(matches!(refused(&[(3, bad)]), CostError::Seconds { tokens: 3, .. }));
    }
    let table = CostTable::new(&[(1, 1.0)]).unwrap();
    assert!(table.clone().with_fixed_seconds(-1.0).is_err());
    assert!(table.with_request_seconds(f64::NAN).is_err());
    let message = refused(&[(1, 1.0), (2, f64::NAN)]).to_string();
    assert_eq!(message, "the cost of 2 tokens must be a finite time above 0 seconds, found NaN");
}

#[test]
fn one_entry_extends_as_a_constant() {
    let table = CostTable::new(&[(8, 0.02)]).unwrap();
    for tokens in [1, 8, 9, 10_000] {
        assert_eq!(table.pass_seconds(tokens), 0.02);
        assert_eq!(table.steps_per_second(tokens), 50.0);
    }
}

#[test]
fn linear_between_points_and_mean_slope_beyond() {
    let table = CostTable::new(&[(8, 3.0), (2, 1.0), (4, 1.0)]).unwrap();
    let seconds: Vec<f64> = [1, 2, 3, 4, 6, 8, 11].iter().map(|&t| table.pass_seconds(t)).collect();
    assert_eq!(seconds, [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn noise_is_pooled_by_weight() {
    // The row of ENVIRONMENT-like measurements: 4 rows measured faster than 1.
    let table = CostTable::new(&[(1, 22.0), (2, 25.0), (4, 19.0), (8, 22.5)]).unwrap();
    let smooth: Vec<f64> = table.points().map(|(_, s)| s).collect();
    assert_eq!(smooth, [22.0, 22.0, 22.0, 22.5]);

    let point = |x, y, weight| Point { x, y, weight };
    let curve = Curve::through(&[point(1.0, 4.0, 3.0), point(2.0, 2.0, 1.0)]);
    assert_eq!([curve.at(1.0), curve.at(2.0)], [3.5, 3.5]);
}

#[test]
fn a_round_adds_its_fixed_and_per_request_cost() {
    let table = CostTable::new(&[(1, 1.0)]).unwrap();
    let table = table.with_fixed_seconds(0.5).unwrap().with_request_seconds(0.25).unwrap();
    assert_eq!(table.round_seconds(4, 2), 2.0);
    assert_eq!(table.steps_per_second(4), 1.0);
}

/// Brute force over all ways of cutting the sequence into blocks that are replaced by their means.
fn best_monotone(points: &[Point]) -> f64 {
    let n = points.len();
    let mut best = f64::INFINITY;
    for cuts in 0..1u32 << (n - 1) {
        let (mut error, mut previous, mut start, mut fits) = (0.0, f64::NEG_INFINITY, 0, true);
        for end in 1..=n {
            if end < n && cuts & (1 << (end - 1)) == 0 {
                continue;
            }
            let block = &points[start..end];
            let weight: f64 = block.iter().map(|p| p.weight).sum();
            let mean = block.iter().map(|p| p.y * p.weight).sum::<f64>() / weight;
            error += block.iter().map(|p| p.weight * (p.y - mean).powi(2)).sum::<f64>();
            fits &= mean >= previous;
            (previous, start) = (mean, end);
        }
        if fits {
            best = best.min(error);
        }
    }
    best
}

proptest! {
    #[test]
    fn smoothing_is_the_nearest_monotone_curve(raw in prop::collection::vec((0.1f64..10.0, 0.1f64..5.0), 1..8)) {
        let points: Vec<Point> = raw.iter().enumerate()
            .map(|(i, &(y, weight))| Point { x: (1 + 3 * i) as f64, y, weight }).collect();
        let table = CostTable::of(Curve::through(&points));
        let smooth: Vec<f64> = table.points().map(|(_, s)| s).collect();
        let error: f64 = points.iter().zip(&smooth).map(|(p, s)| p.weight * (p.y - s).powi(2)).sum();
        prop_assert!(error <= best_monotone(&points) + 1e-9);
        let curve: Vec<f64> = (1..60).map(|t| table.pass_seconds(t)).collect();
        prop_assert!(curve.windows(2).all(|w| w[0] <= w[1]));
    }
}
