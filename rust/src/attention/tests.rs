use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use proptest::prelude::*;

use super::split::PART;
use super::*;
use crate::workers::Alone;

/// One request with its cache of `LAYERS` layers, before the pass.
#[derive(Clone)]
struct Request<T> {
    cache: Vec<T>,
    capacity: usize,
    length: usize,
    rows: usize,
}

fn number(i: usize, seed: u32) -> f32 {
    let x = (i as u32).wrapping_add(seed).wrapping_mul(2_654_435_761);
    (x ^ (x >> 15)).wrapping_mul(2_246_822_519) as f32 / 2_147_483_648.0 - 1.0
}

const LAYERS: usize = 2;

fn request<T: Element>(heads: Heads, length: usize, rows: usize, seed: u32) -> Request<T> {
    let capacity = length + rows + 3;
    let count = LAYERS * 2 * heads.keys * capacity * heads.size;
    let cache = (0..count).map(|i| T::narrow(number(i, seed))).collect();
    Request { cache, capacity, length, rows }
}

/// Four threads.
struct Threads;

// SAFETY: the counter gives every number once.
unsafe impl Workers for Threads {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= tasks {
                            return;
                        }
                        task(number);
                    }
                });
            }
        });
    }
}

/// Attends layer 1 of all requests in one pass: returns the output and updates the caches.
fn run<T: Element>(heads: Heads, reach: Reach, requests: &mut [Request<T>], input: &[T]) -> Vec<T> {
    run_by(&Alone, heads.keys + 1, 1, heads, reach, requests, input)
}

/// The same as often as asked for, by these workers, as for so many threads.
fn run_by<T: Element>(
    workers: &impl Workers,
    threads: usize,
    times: usize,
    heads: Heads,
    reach: Reach,
    requests: &mut [Request<T>],
    input: &[T],
) -> Vec<T> {
    let width = heads.keys * heads.groups * heads.size;
    let rows: usize = requests.iter().map(|request| request.rows).sum();
    let mut first = 0;
    let segments = requests
        .iter_mut()
        .map(|request| {
            let segment = Segment {
                cache: request.cache.as_mut_ptr() as usize,
                capacity: request.capacity,
                length: request.length,
                rows: request.rows,
                first,
            };
            first += request.rows;
            segment
        })
        .collect();
    let mut output = vec![T::narrow(f32::NAN); rows * width];
    let layer = Layer {
        index: 1,
        reach,
        input: input.as_ptr() as usize,
        row_stride: width + 2 * heads.keys * heads.size,
        output: output.as_mut_ptr() as usize,
    };
    // SAFETY: the caches, input and output above have these shapes and outlive the call.
    let pass = unsafe { Pass::<T>::new(heads, segments, threads) };
    for _ in 0..times {
        // SAFETY: as above, one call after the other.
        unsafe { pass.layer(&layer, workers) };
    }
    output
}

/// Softmax attention by its definition, in f64, of one query head of one row.
fn exact(
    heads: Heads,
    reach: Reach,
    request: &Request<f32>,
    row: usize,
    head: usize,
    query: &[f32],
) -> Vec<f64> {
    let size = heads.size;
    let total = request.length + request.rows;
    let at = |head: usize, k: usize| {
        let offset = ((2 * heads.keys + head) * request.capacity + k) * size;
        &request.cache[offset..offset + size]
    };
    let own = request.length + row;
    let sees = |k: usize| {
        let behind = if reach.anchored { request.length } else { own + 1 };
        (!reach.causal || k <= own) && reach.window.is_none_or(|window| k + window >= behind)
    };
    let kv = head / heads.groups;
    let scores: Vec<f64> = (0..total)
        .map(|k| at(kv, k).iter().zip(query).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum())
        .collect();
    let max = (0..total).filter(|&k| sees(k)).map(|k| scores[k]).fold(f64::MIN, f64::max);
    let (mut sum, mut out) = (0.0, vec![0.0; size]);
    for k in (0..total).filter(|&k| sees(k)) {
        let weight = (scores[k] - max).exp();
        sum += weight;
        for (out, value) in out.iter_mut().zip(at(heads.keys + kv, k)) {
            *out += weight * f64::from(*value);
        }
    }
    out.iter().map(|x| x / sum).collect()
}

/// Short ones, those around the border of a part, and those of several parts.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 0usize..150, 1 => PART - 17..PART + 5, 1 => PART..4 * PART]
}

fn reaches() -> impl Strategy<Value = Reach> {
    let window = prop_oneof![Just(None), (1usize..90).prop_map(Some), (500usize..1100).prop_map(Some)];
    (any::<bool>(), window, any::<bool>()).prop_map(|(causal, window, anchored)| {
        let anchored = anchored && window.is_some();
        // A window that slides is causal.
        Reach { causal: causal || (window.is_some() && !anchored), window, anchored }
    })
}

proptest! {
    #[test]
    fn equals_the_definition_and_no_row_sees_its_neighbours(
        keys in 1usize..4, groups in 1usize..4, size in prop_oneof![Just(16usize), Just(48), Just(64), Just(128)],
        lengths in prop::collection::vec((lengths(), 1usize..17), 1..4), reach in reaches(), seed in any::<u32>()
    ) {
        let heads = Heads { keys, groups, size };
        let width = (keys * groups + 2 * keys) * size;
        let mut requests: Vec<Request<f32>> = lengths.iter().zip(seed..)
            .map(|(&(length, rows), seed)| request(heads, length, rows, seed)).collect();
        let before = requests.clone();
        let rows: usize = requests.iter().map(|request| request.rows).sum();
        let input: Vec<f32> = (0..rows * width).map(|i| number(i, seed ^ 77)).collect();
        let output = run(heads, reach, &mut requests, &input);

        let mut first = 0;
        for (request, before) in requests.iter().zip(before) {
            for row in 0..request.rows {
                for head in 0..keys * groups {
                    let start = (first + row) * width + head * size;
                    let expected = exact(heads, reach, request, row, head, &input[start..start + size]);
                    let start = ((first + row) * keys * groups + head) * size;
                    for (found, expected) in output[start..start + size].iter().zip(expected) {
                        prop_assert!((f64::from(*found) - expected).abs() < 2e-6, "{found} {expected}");
                    }
                }
            }
            // A request alone has the same bits; its cache has the new rows, and nothing else changed.
            let (from, to) = (first, first + request.rows);
            let mut alone = [before.clone()];
            let again = run(heads, reach, &mut alone, &input[from * width..to * width]);
            prop_assert_eq!(&again[..], &output[from * keys * groups * size..to * keys * groups * size]);
            prop_assert_eq!(&alone[0].cache, &request.cache);
            for (i, (now, was)) in request.cache.iter().zip(&before.cache).enumerate() {
                let (head, position) = (i / size / request.capacity, i / size % request.capacity);
                if head >= 2 * keys && (request.length..request.length + request.rows).contains(&position) {
                    let (row, head) = (from + position - request.length, keys * groups + head - 2 * keys);
                    prop_assert_eq!(*now, input[row * width + head * size + i % size]);
                } else {
                    prop_assert_eq!(now, was);
                }
            }
            first = to;
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_behind_it(length in lengths(), rows in 2usize..17, seed in any::<u32>()) {
        let heads = Heads { keys: 2, groups: 3, size: 32 };
        let width = 10 * 32;
        let reach = Reach { causal: true, window: None, anchored: false };
        let input: Vec<f32> = (0..rows * width).map(|i| number(i, seed)).collect();
        let all = run(heads, reach, &mut [request(heads, length, rows, seed)], &input);
        // The same memory, but one row fewer in the pass.
        let mut fewer = request::<f32>(heads, length, rows, seed);
        fewer.rows -= 1;
        let part = run(heads, reach, &mut [fewer], &input[..(rows - 1) * width]);
        prop_assert_eq!(&part[..], &all[..part.len()]);
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_before_it(
        length in lengths(), rows in 2usize..17, window in prop::option::of(1usize..200), seed in any::<u32>()
    ) {
        let heads = Heads { keys: 2, groups: 3, size: 32 };
        let width = 10 * 32;
        let reach = Reach { causal: true, window, anchored: false };
        let input: Vec<f32> = (0..rows * width).map(|i| number(i, seed)).collect();
        let mut cached = request(heads, length, rows, seed);
        let all = run(heads, reach, std::slice::from_mut(&mut cached), &input);
        // The last row alone, behind what the pass has stored.
        (cached.length, cached.rows) = (length + rows - 1, 1);
        let alone = run(heads, reach, std::slice::from_mut(&mut cached), &input[(rows - 1) * width..]);
        prop_assert_eq!(&alone[..], &all[all.len() - alone.len()..]);
    }

    #[test]
    fn half_precision_is_that_of_its_numbers(length in lengths(), rows in 1usize..9, seed in any::<u32>()) {
        let heads = Heads { keys: 2, groups: 2, size: 32 };
        let reach = Reach { causal: true, window: None, anchored: false };
        let narrow: Vec<bf16> = (0..rows * 8 * 32).map(|i| bf16::from_f32(number(i, seed))).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
        let mut half = request::<bf16>(heads, length, rows, seed);
        let cache = half.cache.iter().map(|x| x.to_f32()).collect();
        let mut full = Request { cache, capacity: half.capacity, length, rows };
        let expected = run(heads, reach, std::slice::from_mut(&mut full), &wide);
        let found = run(heads, reach, std::slice::from_mut(&mut half), &narrow);
        let rounded: Vec<bf16> = expected.iter().map(|&x| bf16::from_f32(x)).collect();
        prop_assert_eq!(found, rounded);
    }
}

#[test]
fn what_is_not_a_number_stays_so() {
    let heads = Heads { keys: 1, groups: 1, size: 16 };
    let reach = Reach { causal: true, window: None, anchored: false };
    for bad in [f32::NAN, f32::INFINITY] {
        let input = [vec![bad; 16], vec![0.5; 32]].concat();
        let output = run(heads, reach, &mut [request(heads, 70, 1, 3)], &input);
        assert!(output.iter().all(|x| x.is_nan()), "{bad} became {output:?}");
        // One bad key among good ones, its value finite.
        let mut one = request(heads, 70, 1, 3);
        one.cache[2 * one.capacity * 16 + 5 * 16] = bad;
        let output = run(heads, reach, &mut [one], &[0.5; 48]);
        assert!(output.iter().all(|x| x.is_nan()), "a key of {bad} became {output:?}");
    }
}

#[test]
fn threads_that_share_long_contexts_give_the_same_bits() {
    let heads = Heads { keys: 2, groups: 3, size: 32 };
    let lengths = [(2000, 6), (10, 1), (PART - 3, 5), (700, 2)];
    let rows: usize = lengths.iter().map(|&(_, rows)| rows).sum();
    let input: Vec<f32> = (0..rows * 10 * 32).map(|i| number(i, 5)).collect();
    let requests: Vec<_> = lengths.iter().map(|&(length, rows)| request(heads, length, rows, 9)).collect();
    for window in [None, Some(600)] {
        let reach = Reach { causal: true, window, anchored: false };
        let alone = run(heads, reach, &mut requests.clone(), &input);
        let mut shared = requests.clone();
        assert_eq!(run_by(&Threads, 4, 20, heads, reach, &mut shared, &input), alone);
    }
}

#[test]
fn where_heads_suffice_nothing_is_divided() {
    let heads = Heads { keys: 2, groups: 2, size: 32 };
    let reach = Reach { causal: true, window: None, anchored: false };
    let input: Vec<f32> = (0..3 * 8 * 32).map(|i| number(i, 5)).collect();
    let requests = [request(heads, 3 * PART, 3, 9)];
    let divided = run(heads, reach, &mut requests.clone(), &input);
    let whole = run_by(&Alone, 2, 1, heads, reach, &mut requests.clone(), &input);
    assert_ne!(divided, whole, "the order of a sum shows");
    assert!(divided.iter().zip(whole).all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn what_is_not_a_number_in_a_part_stays_so() {
    let heads = Heads { keys: 1, groups: 1, size: 16 };
    let reach = Reach { causal: true, window: None, anchored: false };
    for bad in [f32::NAN, f32::INFINITY] {
        for place in [0, PART, 3 * PART] {
            let mut one = request(heads, 3 * PART, 1, 3);
            one.cache[(2 * one.capacity + place.min(one.length - 1)) * 16] = bad;
            let output = run(heads, reach, &mut [one], &[0.5; 48]);
            assert!(output.iter().all(|x| x.is_nan()), "a key of {bad} at {place} became {output:?}");
        }
    }
}
