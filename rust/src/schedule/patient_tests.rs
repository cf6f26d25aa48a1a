use super::tests::{blocks, brute_force, survivals, throughput};
use super::*;
use proptest::prelude::*;

proptest! {
    /// Whether a token is admitted depends only on the horizon and on the list up to this token: everything
    /// behind it may change, in its own block as in other requests'.
    #[test]
    fn the_patient_walk_never_looks_ahead(
        block in blocks(), other in blocks(),
        rises in prop::collection::vec(0.0f64..1.5, 8), gains in prop::collection::vec(0.2f64..1.0, 0..16)
    ) {
        // Steps of three tokens: if every token had its own cost, there would be nothing to be patient for.
        let seconds = |tokens: usize| 1.0 + rises[..tokens / 3].iter().sum::<f64>();
        let cost = CostTable::new(&(1..=20).map(|tokens| (tokens, seconds(tokens))).collect::<Vec<_>>()).unwrap();
        let horizon = horizon(&gains);
        let list = survivals(&block);
        for (place, last) in list.order.iter().enumerate() {
            let changed = changed_behind(&block, &list, place, &other);
            prop_assert_eq!(key(&survivals(&changed).order[..=place]), key(&list.order[..=place]));
            let is_admitted = |current: &[Vec<f32>]| {
                patient(&survivals(current), &cost, &horizon)[last.request as usize] > last.slot as usize
            };
            prop_assert_eq!(is_admitted(&block), is_admitted(&changed));
        }
    }

    #[test]
    fn without_a_horizon_the_patient_walk_is_algorithm_1(
        block in blocks(), seconds in prop::collection::vec(0.2f64..2.0, 20)
    ) {
        let points: Vec<(usize, f64)> = (1..).zip(seconds).collect();
        let cost = CostTable::new(&points).unwrap();
        let list = survivals(&block);
        prop_assert_eq!(patient(&list, &cost, &[]), causal(&list, &cost));
        prop_assert_eq!(patient(&list, &cost, &[0.0]), causal(&list, &cost));
    }

    /// The right horizon: past rounds predicted this one exactly, up to the end of its best plan.
    #[test]
    fn with_the_right_horizon_the_patient_walk_is_optimal_on_every_curve(
        block in blocks(), seconds in prop::collection::vec(0.2f64..2.0, 20), fixed in 0.0f64..1.0
    ) {
        let points: Vec<(usize, f64)> = (1..).zip(seconds).collect();
        let cost = CostTable::new(&points).unwrap().with_fixed_seconds(fixed).unwrap();
        let list = survivals(&block);
        let end: usize = global(&list, &cost, Foresight(())).iter().sum();
        let gains: Vec<f64> = list.order.iter().take(end).map(|candidate| candidate.survival).collect();
        let plan = patient(&list, &cost, &horizon(&gains));
        let best = brute_force(&block, &cost);
        prop_assert!((throughput(&block, &plan, &cost) - best).abs() <= 1e-9 * best);
    }

    #[test]
    fn the_patient_walk_admits_all_on_a_flat_table(
        block in blocks(), gains in prop::collection::vec(0.0f64..1.0, 0..10)
    ) {
        let flat = CostTable::new(&[(1, 1.0)]).unwrap();
        let list = survivals(&block);
        prop_assert_eq!(patient(&list, &flat, &horizon(&gains)), list.admit(list.order.len()));
    }
}

/// A horizon of these gains, the largest first.
fn horizon(gains: &[f64]) -> Vec<f64> {
    let mut gains = gains.to_vec();
    gains.sort_by(|a, b| b.total_cmp(a));
    let sums = gains.iter().scan(0.0, |sum, gain| {
        *sum += gain;
        Some(*sum)
    });
    std::iter::once(0.0).chain(sums).collect()
}

/// The block with other confidences for the tokens that the list has behind `place`. They stay behind it,
/// because their survival is less than that at `place` (not equal, so that ties change nothing).
fn changed_behind(block: &[Vec<f32>], list: &Survivals, place: usize, other: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let most = list.order[place].survival;
    let mut changed = block.to_vec();
    for (request, confidences) in changed.iter_mut().enumerate() {
        let kept = list.order[..=place].iter().filter(|c| c.request as usize == request).count();
        let mut survival: f64 = confidences[..kept].iter().map(|&c| f64::from(c)).product();
        for (slot, confidence) in confidences.iter_mut().enumerate().skip(kept) {
            let drawn = other.get(request).and_then(|row| row.get(slot)).copied().unwrap_or(0.5);
            // Just below a tie, even after rounding to f32.
            let highest = (0.999_999 * most / survival).min(1.0) as f32;
            *confidence = if survival > 0.0 { drawn * highest } else { drawn };
            survival *= f64::from(*confidence);
        }
    }
    changed
}

fn key(order: &[Candidate]) -> Vec<(u32, u32)> {
    order.iter().map(|candidate| (candidate.request, candidate.slot)).collect()
}

#[test]
fn patience_walks_through_a_step_that_past_rounds_say_is_worth_it() {
    // Kernels of width 4 again: the walk goes through the step, because past rounds say that it is worth it,
    // and what it passed stays admitted even if the rest does not come true.
    let steps = CostTable::new(&[(1, 1.0), (2, 1.9), (4, 1.9), (5, 4.0)]).unwrap();
    let horizon = [0.0, 0.8, 1.52, 2.17];
    assert_eq!(patient(&survivals(&[vec![0.8, 0.9, 0.9, 0.9]]), &steps, &horizon), [3]);
    assert_eq!(patient(&survivals(&[vec![0.8, 0.9, 0.9, 0.9]]), &steps, &[]), [0]);
    let disappointing = patient(&survivals(&[vec![0.8, 0.1, 0.1, 0.1]]), &steps, &horizon);
    assert!(disappointing[0] >= 1, "{disappointing:?}");
}
