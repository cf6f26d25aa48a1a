//! Vectors of eight `f32`, in the registers that the processor has.

use half::{bf16, f16};

use super::Stored;

/// Numbers in a vector.
pub(super) const LANES: usize = 8;

/// Weights that are loaded and widened together.
pub(super) const STEP: usize = 2 * LANES;

/// A vector of [`LANES`] numbers. All implementations round alike.
#[doc(hidden)]
pub trait Lanes: Copy {
    /// # Safety
    /// For this and all methods below: the processor has the implementation's instructions.
    unsafe fn zero() -> Self;
    /// # Safety
    /// See `zero`.
    unsafe fn load(numbers: &[f32; LANES]) -> Self;
    /// # Safety
    /// See `zero`.
    unsafe fn load_bf16(numbers: &[bf16; STEP], half: usize) -> Self;
    /// # Safety
    /// See `zero`.
    unsafe fn load_f16(numbers: &[f16; STEP], half: usize) -> Self;
    /// # Safety
    /// See `zero`.
    unsafe fn store(self, numbers: &mut [f32; LANES]);
    /// self * factor + addend, rounded once.
    ///
    /// # Safety
    /// See `zero`.
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self;
    /// Asks for a cache line; any address will do.
    ///
    /// # Safety
    /// See `zero`.
    unsafe fn prefetch(address: *const i8);
}

/// For any processor.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Lanes for Portable {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; LANES])
    }

    #[inline(always)]
    unsafe fn load(numbers: &[f32; LANES]) -> Self {
        Portable(*numbers)
    }

    #[inline(always)]
    unsafe fn load_bf16(numbers: &[bf16; STEP], half: usize) -> Self {
        Portable(std::array::from_fn(|l| numbers[2 * l + half].widen()))
    }

    #[inline(always)]
    unsafe fn load_f16(numbers: &[f16; STEP], half: usize) -> Self {
        Portable(std::array::from_fn(|l| numbers[half * LANES + l].widen()))
    }

    #[inline(always)]
    unsafe fn store(self, numbers: &mut [f32; LANES]) {
        *numbers = self.0;
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|l| self.0[l].mul_add(factor.0[l], addend.0[l])))
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const i8) {}
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{LANES, Lanes, STEP};

    /// One register of 256 bits.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256);

    // SAFETY, of every block here: the caller vouches for the instructions, and references are valid for
    // LANES numbers.
    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as above.
            Avx2(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn load(numbers: &[f32; LANES]) -> Self {
            // SAFETY: as above.
            Avx2(unsafe { _mm256_loadu_ps(numbers.as_ptr()) })
        }

        #[inline(always)]
        unsafe fn load_bf16(numbers: &[bf16; STEP], half: usize) -> Self {
            // A bfloat16 is the upper half of an f32, and two of them are 32 bits: the even one is below.
            // SAFETY: as above.
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
        unsafe fn load_f16(numbers: &[f16; STEP], half: usize) -> Self {
            let (halves, _) = numbers.as_chunks::<LANES>();
            // SAFETY: as above.
            Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves[half].as_ptr().cast())) })
        }

        #[inline(always)]
        unsafe fn store(self, numbers: &mut [f32; LANES]) {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(numbers.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
            // SAFETY: as above.
            Avx2(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }

        #[inline(always)]
        unsafe fn prefetch(address: *const i8) {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address) }
        }
    }
}
