use proptest::prelude::*;

use super::*;

const HEADS: Heads = Heads { keys: 4, groups: 6, size: 256 };
const CAUSAL: Reach = Reach { causal: true, window: None, anchored: false };

fn request(length: usize, rows: usize) -> Request {
    Request { cache: 1 << 20, layer_stride: 1 << 30, head_stride: 1 << 20, pages: 0, length, rows }
}

fn pass(requests: &[Request], reaches: &[Reach]) -> Pass {
    Pass::new(Element::Brain, HEADS, 1, requests, reaches, 132).unwrap()
}

/// Chunks (segment, start, stop, slot) and splits (segment, first, count) of a kind of visibility.
fn parts(pass: &Pass, way: usize) -> (Vec<[i64; CHUNK_WORDS]>, Vec<[i64; SPLIT_WORDS]>) {
    let Way { chunks, splits, .. } = &pass.ways[way];
    let (chunks, splits) = (&pass.table[chunks.clone()], &pass.table[splits.clone()]);
    (chunks.as_chunks().0.to_vec(), splits.as_chunks().0.to_vec())
}

proptest! {
    #[test]
    fn chunks_are_what_the_rows_see_once(
        sizes in prop::collection::vec((0usize..5000, 0usize..=MOST_ROWS), 1..8),
        window in prop_oneof![Just(None), (1usize..3000).prop_map(Some)], anchored in any::<bool>()
    ) {
        let requests: Vec<Request> = sizes.iter().map(|&(length, rows)| request(length, rows)).collect();
        let reach = Reach { causal: !anchored, window, anchored };
        let pass = pass(&requests, &[CAUSAL, reach]);
        for (way, reach) in [CAUSAL, reach].into_iter().enumerate() {
            let (chunks, splits) = parts(&pass, way);
            let mut slots = Vec::new();
            for (number, request) in requests.iter().enumerate() {
                let own: Vec<_> = chunks.iter().filter(|chunk| chunk[0] == number as i64).collect();
                if request.rows == 0 {
                    prop_assert!(own.is_empty());
                    continue;
                }
                let spans: Vec<_> = (0..request.rows).map(|row| reach.of(row, request.rows, request.length)).collect();
                prop_assert_eq!(own[0][1], spans.iter().map(|span| span.0).min().unwrap() as i64);
                prop_assert_eq!(own[own.len() - 1][2], spans.iter().map(|span| span.1).max().unwrap() as i64);
                prop_assert!(own.windows(2).all(|pair| pair[0][2] == pair[1][1]));
                prop_assert!(own.iter().all(|chunk| chunk[1] < chunk[2]));
                let split: Vec<_> = splits.iter().filter(|split| split[0] == number as i64).collect();
                if own.len() == 1 {
                    prop_assert!(own[0][3] == -1 && split.is_empty());
                } else {
                    prop_assert!(split.len() == 1 && split[0][2] == own.len() as i64);
                    prop_assert!(own.iter().zip(split[0][1]..).all(|(chunk, slot)| chunk[3] == slot));
                    slots.extend(own.iter().map(|chunk| chunk[3]));
                }
            }
            prop_assert!(slots.iter().enumerate().all(|(i, &slot)| slot == i as i64));
            prop_assert!(slots.len() <= pass.slots);
        }
    }
}

#[test]
fn one_long_request_fills_the_device_and_many_are_not_split() {
    let (chunks, splits) = parts(&pass(&[request(100_000, 8)], &[CAUSAL]), 0);
    assert!((60..=66).contains(&chunks.len()), "{} chunks for 132 multiprocessors and 4 heads", chunks.len());
    assert_eq!(splits, [[0, 0, chunks.len() as i64]]);
    for count in [60, 64, 100] {
        let (chunks, splits) = parts(&pass(&vec![request(2000, 8); count], &[CAUSAL]), 0);
        assert!(chunks.len() == count && splits.is_empty());
    }
}

#[test]
fn what_the_kernel_does_not_do_is_refused() {
    let refused = |heads, page, request| {
        Pass::new(Element::Half, heads, page, &[request], &[CAUSAL], 1).unwrap_err().to_string()
    };
    assert!(refused(Heads { size: 96, ..HEADS }, 1, request(3, 1)).contains("96"));
    assert!(refused(HEADS, 3, request(3, 1)).contains("power of two"));
    assert!(refused(HEADS, 0, request(3, 1)).contains("power of two"));
    assert!(refused(HEADS, 1, request(3, MOST_ROWS + 1)).contains("33 rows"));
    assert!(refused(HEADS, 1, Request { cache: 8, ..request(3, 1) }).contains("16 bytes"));
    assert!(refused(HEADS, 1, Request { cache: 0, ..request(3, 1) }).contains("16 bytes"));
    assert!(refused(HEADS, 1, Request { head_stride: 4, ..request(3, 1) }).contains("16 bytes"));
}
