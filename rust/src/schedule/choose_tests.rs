use proptest::prelude::*;

use super::*;

const NONE: [f64; 4] = [0.0; 4];

fn hopes(survivals: &[Vec<f64>]) -> Vec<Hope<'_>> {
    survivals.iter().map(|survival| Hope { survival, spread: &NONE }).collect()
}

/// Expected tokens per second of drafting and verifying these lengths, written down again.
fn rate(running: usize, survivals: &[Vec<f64>], lengths: &[usize], cost: &CostTable) -> f64 {
    let gain: f64 = survivals.iter().zip(lengths).map(|(s, &n)| s[..n].iter().sum::<f64>()).sum();
    let drafted: usize = lengths.iter().sum();
    let drafting = lengths.iter().filter(|&&n| n > 0).count();
    let seconds = cost.round_seconds(running + drafted, running) + cost.draft_seconds(drafting, drafted);
    (running as f64 + gain) / seconds
}

/// The best rate over all subsets of requests and all depths.
fn brute_force(running: usize, survivals: &[Vec<f64>], cost: &CostTable) -> f64 {
    let mut lengths = vec![0; survivals.len()];
    let mut best = 0.0f64;
    loop {
        best = best.max(rate(running, survivals, &lengths, cost));
        let Some(r) = (0..lengths.len()).find(|&r| lengths[r] < survivals[r].len()) else { return best };
        lengths[..r].fill(0);
        lengths[r] += 1;
    }
}

fn table(pass: &[f64], draft: &[f64], token: f64) -> CostTable {
    let points = |seconds: &[f64]| (1..).zip(seconds.iter().copied()).collect::<Vec<_>>();
    let table = CostTable::new(&points(pass)).unwrap().with_draft(&points(draft)).unwrap();
    table.with_token_seconds(token).unwrap().with_fixed_seconds(0.1).unwrap()
}

/// Survivals of up to four requests in which each is nowhere above the one before it, and the batch shuffled.
fn ordered() -> impl Strategy<Value = Vec<Vec<f64>>> {
    let survivals = (prop::collection::vec(0.05f64..0.99, 4), prop::collection::vec(0.2f64..1.0, 1..=4));
    survivals.prop_map(|(conditional, factors)| {
        let mut scale = 1.0;
        let mut all: Vec<Vec<f64>> = factors
            .iter()
            .map(|factor| {
                scale *= factor;
                let mut reached = scale;
                conditional
                    .iter()
                    .map(|c| {
                        reached *= c;
                        reached
                    })
                    .collect()
            })
            .collect();
        let middle = all.len() / 2;
        all.rotate_left(middle);
        all
    })
}

proptest! {
    #[test]
    fn finds_the_best_subset_and_depths_of_ordered_requests_on_every_table(
        survivals in ordered(), more in 0usize..3,
        pass in prop::collection::vec(0.2f64..3.0, 20), draft in prop::collection::vec(0.01f64..0.5, 1..4), token in 0.0f64..0.05
    ) {
        let pass: Vec<f64> = pass.iter().enumerate().map(|(i, s)| s * (1 + i / 4) as f64).collect();
        let (running, cost) = (survivals.len() + more, table(&pass, &draft, token));
        let choice = choose(running, &hopes(&survivals), &cost);
        let best = brute_force(running, &survivals, &cost);
        prop_assert!((choice.rate - best).abs() <= 1e-12 * best, "{choice:?}, best {best}");
        let found = rate(running, &survivals, &choice.lengths, &cost);
        prop_assert!((found - best).abs() <= 1e-12 * best, "{choice:?} makes {found}");
    }

    /// Requests of any kind: never worse than plain, never less than promised, and not far from the best.
    #[test]
    fn keeps_its_promise_where_requests_cross(
        conditional in prop::collection::vec(prop::collection::vec(0.05f64..0.99, 3), 1..=4),
        slopes in prop::collection::vec(0.0f64..0.3, 20), draft in 0.01f64..0.5
    ) {
        let survivals: Vec<Vec<f64>> = conditional.iter().map(|row| {
            let mut reached = 1.0;
            row.iter().map(|c| { reached *= c; reached }).collect()
        }).collect();
        let mut seconds = 1.0;
        let pass: Vec<f64> = slopes.iter().map(|s| { seconds += s; seconds }).collect();
        let cost = table(&pass, &[draft, 1.5 * draft], 0.01);
        let running = survivals.len();
        let choice = choose(running, &hopes(&survivals), &cost);
        let found = rate(running, &survivals, &choice.lengths, &cost);
        prop_assert!(found >= choice.rate * (1.0 - 1e-12));
        prop_assert!(choice.rate >= choice.plain);
        prop_assert!(choice.rate >= 0.93 * brute_force(running, &survivals, &cost));
    }
}

#[test]
fn many_requests_are_tried_by_doubling_and_still_found() {
    // 40 requests, 23 of them worth a draft: the pass is free up to 23 more tokens and expensive beyond.
    let survivals: Vec<Vec<f64>> =
        (0..40).map(|r| vec![if r % 2 == 0 || r > 33 { 0.9 } else { 0.01 }]).collect();
    let good = survivals.iter().filter(|s| s[0] > 0.5).count();
    let cost = CostTable::new(&[(40, 1.0), (40 + good, 1.0), (80, 3.0)]).unwrap();
    let cost = cost.with_draft(&[(1, 0.1), (40, 0.14)]).unwrap();
    let choice = choose(40, &hopes(&survivals), &cost);
    let drafting: Vec<bool> = choice.lengths.iter().map(|&n| n > 0).collect();
    let expected: Vec<bool> = survivals.iter().map(|s| s[0] > 0.5).collect();
    assert_eq!(drafting, expected);
}

#[test]
fn nothing_to_gain_is_plain_decoding() {
    let cost = table(&[1.0, 2.0, 3.0, 4.0], &[0.2], 0.01);
    let survivals = vec![vec![0.9, 0.8, 0.7]];
    let choice = choose(1, &hopes(&survivals), &cost);
    assert_eq!((choice.lengths, choice.horizon), (vec![0], vec![0.0]));
    assert_eq!(choice.rate, choice.plain);
    assert_eq!(choose(3, &[], &cost).lengths, Vec::<usize>::new());
}

#[test]
fn a_head_that_tells_blocks_apart_is_worth_more() {
    let cost = table(&[1.0, 1.5, 2.0, 2.5, 3.0], &[0.05], 0.001);
    let survival = [0.5, 0.3, 0.2];
    let with = |spread: f64| {
        let spread = [spread; 3];
        choose(1, &[Hope { survival: &survival, spread: &spread }], &cost)
    };
    assert_eq!(with(0.0).lengths, [0]);
    assert!(with(0.9).rate > with(0.0).rate && with(0.9).lengths[0] > 0);
}
