//! The types of 16 bits in which weights are stored, and how vectors of them are widened.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use crate::lanes::x86::Avx2;
use crate::lanes::{Lanes, Portable};
use crate::number::Number;

/// Numbers in a vector.
pub(super) const LANES: usize = 8;

/// Weights that are loaded together, in two halves.
pub(super) const STEP: usize = 2 * LANES;

/// A number of 16 bits.
pub trait Stored: Number {
    /// Where number `i` of a step is after `load`.
    #[doc(hidden)]
    fn place(i: usize) -> usize;

    /// One half of a step's weights, widened.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[doc(hidden)]
    unsafe fn load<V: Widen>(run: &[Self; STEP], half: usize) -> V;
}

impl Stored for bf16 {
    /// The even ones first: widening these is a shift, and widening the odd ones a mask.
    #[inline(always)]
    fn place(i: usize) -> usize {
        i / 2 + i % 2 * LANES
    }

    #[inline(always)]
    unsafe fn load<V: Widen>(run: &[bf16; STEP], half: usize) -> V {
        // SAFETY: as the caller guarantees.
        unsafe { V::of_bf16(run, half) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn place(i: usize) -> usize {
        i
    }

    #[inline(always)]
    unsafe fn load<V: Widen>(run: &[f16; STEP], half: usize) -> V {
        // SAFETY: as the caller guarantees.
        unsafe { V::of_f16(run, half) }
    }
}

/// Vectors that are made of one half of a step.
#[doc(hidden)]
pub trait Widen: Lanes<LANES> {
    /// The even numbers, or the odd ones.
    ///
    /// # Safety
    /// The processor has the implementation's instructions.
    unsafe fn of_bf16(numbers: &[bf16; STEP], half: usize) -> Self;
    /// The first numbers, or the last ones.
    ///
    /// # Safety
    /// The processor has the implementation's instructions.
    unsafe fn of_f16(numbers: &[f16; STEP], half: usize) -> Self;
}

impl Widen for Portable<LANES> {
    #[inline(always)]
    unsafe fn of_bf16(numbers: &[bf16; STEP], half: usize) -> Self {
        // SAFETY: this vector needs no instructions of its own.
        unsafe { Self::load(&std::array::from_fn(|l| numbers[2 * l + half].widen())) }
    }

    #[inline(always)]
    unsafe fn of_f16(numbers: &[f16; STEP], half: usize) -> Self {
        // SAFETY: as above.
        unsafe { Self::load(&std::array::from_fn(|l| numbers[half * LANES + l].widen())) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen for Avx2 {
    #[inline(always)]
    unsafe fn of_bf16(numbers: &[bf16; STEP], half: usize) -> Self {
        // A bfloat16 is the upper half of an f32, and two of them are 32 bits: the even one is below.
        // SAFETY: the caller vouches for the instructions, and there are as many numbers as are read.
        unsafe {
            let pairs = _mm256_loadu_si256(numbers.as_ptr().cast());
            let wide = if half == 0 {
                _mm256_slli_epi32::<16>(pairs)
            } else {
                _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()))
            };
            Avx2(_mm256_castsi256_ps(wide))
        }
    }

    #[inline(always)]
    unsafe fn of_f16(numbers: &[f16; STEP], half: usize) -> Self {
        let (halves, _) = numbers.as_chunks::<LANES>();
        // SAFETY: as above.
        Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves[half].as_ptr().cast())) })
    }
}
