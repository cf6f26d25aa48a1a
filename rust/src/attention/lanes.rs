//! Vectors of sixteen `f32`, in the registers that the processor has.

use super::LANES;

/// A vector of [`LANES`] numbers. All implementations round alike, so results do not depend on the processor.
pub(super) trait Lanes: Copy {
    /// Zeros.
    ///
    /// # Safety
    /// For this and all methods below: the processor has the implementation's instructions.
    unsafe fn zero() -> Self;
    /// One number in all lanes.
    unsafe fn splat(number: f32) -> Self;
    /// Reads sixteen numbers.
    unsafe fn load(numbers: &[f32; LANES]) -> Self;
    /// Writes the sixteen numbers.
    unsafe fn store(self, numbers: &mut [f32; LANES]);
    /// self * factor + addend, rounded once.
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self;
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
    unsafe fn splat(number: f32) -> Self {
        Portable([number; LANES])
    }

    #[inline(always)]
    unsafe fn load(numbers: &[f32; LANES]) -> Self {
        Portable(*numbers)
    }

    #[inline(always)]
    unsafe fn store(self, numbers: &mut [f32; LANES]) {
        *numbers = self.0;
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|l| self.0[l].mul_add(factor.0[l], addend.0[l])))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, Lanes};

    /// One register of 512 bits.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    // SAFETY, of every block here: the caller vouches for the instructions, and references are valid for
    // LANES numbers.
    impl Lanes for Avx512 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as above.
            Avx512(unsafe { _mm512_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn splat(number: f32) -> Self {
            // SAFETY: as above.
            Avx512(unsafe { _mm512_set1_ps(number) })
        }

        #[inline(always)]
        unsafe fn load(numbers: &[f32; LANES]) -> Self {
            // SAFETY: as above.
            Avx512(unsafe { _mm512_loadu_ps(numbers.as_ptr()) })
        }

        #[inline(always)]
        unsafe fn store(self, numbers: &mut [f32; LANES]) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(numbers.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
            // SAFETY: as above.
            Avx512(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
        }
    }

    /// Two registers of 256 bits.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256, __m256);

    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as above.
            unsafe { Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn splat(number: f32) -> Self {
            // SAFETY: as above.
            unsafe { Avx2(_mm256_set1_ps(number), _mm256_set1_ps(number)) }
        }

        #[inline(always)]
        unsafe fn load(numbers: &[f32; LANES]) -> Self {
            let start = numbers.as_ptr();
            // SAFETY: as above.
            unsafe { Avx2(_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(LANES / 2))) }
        }

        #[inline(always)]
        unsafe fn store(self, numbers: &mut [f32; LANES]) {
            let start = numbers.as_mut_ptr();
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_ps(start, self.0);
                _mm256_storeu_ps(start.add(LANES / 2), self.1);
            }
        }

        #[inline(always)]
        unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                Avx2(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1))
            }
        }
    }
}
