//! The tokens with the largest base logits: where `markov_candidates` restricts a chain, only these get a bias,
//! and only these can be drawn.

use std::cmp::Ordering;

use multiversion::multiversion;

/// Logits looked at together: in a long row nearly all groups have nothing to add.
const GROUP: usize = 64;

/// Precisions that rows are searched in.
pub(crate) trait Largest: Sized {
    /// Writes the ids of the `count` largest finite logits in ascending order; equal ones go to the lower id.
    /// Fewer if fewer are finite; minus infinity is never one of them. False if a logit is NaN or plus infinity.
    fn largest(row: &[Self], count: usize, ids: &mut Vec<u32>) -> bool;
}

macro_rules! largest {
    ($name:ident, $real:ty) => {
        mod $name {
            use super::*;

            #[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl", "x86_64+avx2"))]
            fn largest(row: &[$real], count: usize, ids: &mut Vec<u32>) -> bool {
                ids.clear();
                if count == 0 {
                    return row.iter().all(|&x| x < <$real>::INFINITY);
                }
                // Twice as many as are asked for, so that sorting out is rare.
                let mut kept: Vec<($real, u32)> = Vec::with_capacity(2 * count + GROUP);
                let mut bar = <$real>::NEG_INFINITY;
                for (group, first) in row.chunks(GROUP).zip((0u32..).step_by(GROUP)) {
                    let mut all_below = true;
                    for &x in group {
                        // False for NaN too.
                        all_below &= x <= bar;
                    }
                    if all_below {
                        continue;
                    }
                    for (&x, id) in group.iter().zip(first..) {
                        if x.is_nan() || x == <$real>::INFINITY {
                            return false;
                        }
                        // What equals the bar comes after what set it.
                        if x > bar {
                            kept.push((x, id));
                        }
                    }
                    if kept.len() >= 2 * count {
                        bar = keep(&mut kept, count);
                    }
                }
                if kept.len() > count {
                    keep(&mut kept, count);
                }
                ids.extend(kept.iter().map(|&(_, id)| id));
                ids.sort_unstable();
                true
            }

            /// Keeps the `count` largest, the lower id of equal ones; gives the smallest kept.
            fn keep(kept: &mut Vec<($real, u32)>, count: usize) -> $real {
                kept.select_nth_unstable_by(count - 1, |a, b| {
                    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
                });
                kept.truncate(count);
                kept[count - 1].0
            }

            impl Largest for $real {
                fn largest(row: &[Self], count: usize, ids: &mut Vec<u32>) -> bool {
                    largest(row, count, ids)
                }
            }
        }
    };
}
largest!(single, f32);
largest!(double, f64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(row: &[f32], count: usize) -> Option<Vec<u32>> {
        let mut ids = vec![9];
        f32::largest(row, count, &mut ids).then_some(ids)
    }

    #[test]
    fn what_is_not_finite_is_no_candidate_or_spoils_the_row() {
        let inf = f32::INFINITY;
        assert_eq!(found(&[-inf, 1.0, -inf, 2.0], 3), Some(vec![1, 3]));
        assert_eq!(found(&[-inf; 5], 3), Some(vec![]));
        assert_eq!(found(&[1.0, 2.0], 0), Some(vec![]));
        let mut row = vec![0.0f32; 300];
        row[..10].fill(5.0);
        for bad in [f32::NAN, inf] {
            row[299] = bad;
            assert_eq!(found(&row, 4), None);
            assert_eq!(found(&row, 0), None);
        }
    }

    proptest! {
        #[test]
        fn agrees_with_sorting(row in prop::collection::vec(-6i8..6, 0..500), count in 0usize..80) {
            let lowest = |x| if x == -6 { f64::NEG_INFINITY } else { f64::from(x) };
            let row: Vec<f64> = row.into_iter().map(lowest).collect();
            let mut expected: Vec<u32> = (0..row.len() as u32).filter(|&i| row[i as usize].is_finite()).collect();
            expected.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            expected.truncate(count);
            expected.sort_unstable();
            let mut ids = Vec::new();
            prop_assert!(f64::largest(&row, count, &mut ids));
            prop_assert_eq!(ids, expected);
        }
    }
}
