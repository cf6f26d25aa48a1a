//! Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3" (SC 2011): a keyed bijection of 128 bits, so that a number is a function of what it is for.

use multiversion::multiversion;

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// The block of random bits that belongs to `counter` under `key`.
#[inline(always)]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let (high0, low0) = widening(MULTIPLIER[0], counter[0]);
        let (high1, low1) = widening(MULTIPLIER[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[inline(always)]
fn widening(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// Words 0 and 2 of the blocks of neighbouring counters, interleaved: `out[2 j]` and `out[2 j + 1]` are
/// words 0 and 2 of the counter `[c0, first + j, c2, c3]`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512bw+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn even_words(counter: [u32; 4], key: [u32; 2], out: &mut [u32]) {
    let [c0, first, c2, c3] = counter;
    let (pairs, rest) = out.as_chunks_mut::<2>();
    for (pair, j) in pairs.iter_mut().zip(0u32..) {
        let block = philox([c0, first.wrapping_add(j), c2, c3], key);
        *pair = [block[0], block[2]];
    }
    if let [last] = rest {
        let block = philox([c0, first.wrapping_add(pairs.len() as u32), c2, c3], key);
        *last = block[0];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (`kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        let all = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([all; 4], [all; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0],
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn neighbours_equal_single_blocks() {
        let (key, first) = ([3, 9], u32::MAX - 20);
        let mut words = vec![0; 101];
        even_words([5, first, 7, 8], key, &mut words);
        for (i, &word) in words.iter().enumerate() {
            let block = philox([5, first.wrapping_add(i as u32 / 2), 7, 8], key);
            assert_eq!(word, block[2 * (i % 2)]);
        }
    }
}
