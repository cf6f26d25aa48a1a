//! The tokens with the largest base logits: where `markov_candidates` restricts a chain, only these get a bias,
//! and only these can be drawn.

use multiversion::multiversion;

/// Logits checked together: in a long row, nearly all groups have nothing to add.
const GROUP: usize = 32;

/// The precisions in which rows are searched.
pub(crate) trait Largest: Sized {
    /// Writes the ids of the `count` largest finite logits, or of all if fewer are finite, in ascending
    /// order. Among equal logits the lower ids are taken; minus infinity never is. False if a logit is NaN or
    /// plus infinity.
    fn largest(row: &[Self], count: usize, ids: &mut Vec<u32>) -> bool;
}

macro_rules! largest {
    ($name:ident, $real:ty, $bits:ty, $key:ty) => {
        mod $name {
            use super::*;

            const SIGN: $bits = 1 << (<$bits>::BITS - 1);

            /// A number that is smaller for a larger logit, or for the lower id of equal ones: integers are
            /// sorted several times faster than pairs.
            #[inline(always)]
            fn key(x: $real, id: u32) -> $key {
                // Adding 0.0 turns -0 into 0.
                let bits = (x + 0.0).to_bits();
                let falling = if bits & SIGN == 0 { !(bits | SIGN) } else { bits };
                <$key>::from(falling) << 32 | <$key>::from(id)
            }

            /// The logit of a key.
            fn logit(key: $key) -> $real {
                let falling = (key >> 32) as $bits;
                <$real>::from_bits(if falling & SIGN == 0 { !falling & !SIGN } else { falling })
            }

            #[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl", "x86_64+avx2"))]
            fn largest(row: &[$real], count: usize, ids: &mut Vec<u32>) -> bool {
                ids.clear();
                if count == 0 {
                    return row.iter().all(|&x| x < <$real>::INFINITY);
                }
                // Room for more than `count`, so that selecting is rare.
                let mut kept: Vec<$key> = Vec::with_capacity(2 * count + GROUP);
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
                        // A logit equal to the bar has a higher id than the one that set the bar.
                        if x > bar {
                            kept.push(key(x, id));
                        }
                    }
                    if kept.len() >= 2 * count {
                        bar = keep(&mut kept, count);
                    }
                }
                if kept.len() > count {
                    keep(&mut kept, count);
                }
                ids.extend(kept.iter().map(|&key| key as u32));
                ids.sort_unstable();
                true
            }

            /// Keeps the `count` largest logits and returns the smallest of them.
            fn keep(kept: &mut Vec<$key>, count: usize) -> $real {
                kept.select_nth_unstable(count - 1);
                kept.truncate(count);
                logit(kept[count - 1])
            }

            impl Largest for $real {
                fn largest(row: &[Self], count: usize, ids: &mut Vec<u32>) -> bool {
                    largest(row, count, ids)
                }
            }

            #[cfg(test)]
            #[test]
            fn keys_keep_the_order_and_the_logit() {
                let rising = [<$real>::MIN, -2.5, -<$real>::MIN_POSITIVE, 0.0, 1e-30, 3.0, <$real>::MAX];
                for pair in rising.windows(2) {
                    assert!(key(pair[0], 0) > key(pair[1], u32::MAX));
                }
                assert!(rising.iter().all(|&x| logit(key(x, 7)) == x && key(x, 7) < key(x, 8)));
                assert_eq!(key(-0.0, 3), key(0.0, 3));
            }
        }
    };
}
largest!(single, f32, u32, u64);
largest!(double, f64, u64, u128);

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
