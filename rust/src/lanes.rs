//! Vectors of `f32`, in the registers that the processor has.

/// A vector of N numbers. All implementations round alike, so results do not depend on the processor.
pub trait Lanes<const N: usize>: Copy {
    /// Zeros.
    ///
    /// # Safety
    /// For this and all methods below: the processor has the implementation's instructions.
    unsafe fn zero() -> Self;
    /// One number in all lanes.
    ///
    /// # Safety
    /// See `zero`.
    unsafe fn splat(number: f32) -> Self;
    /// Reads N numbers.
    ///
    /// # Safety
    /// See `zero`.
    unsafe fn load(numbers: &[f32; N]) -> Self;
    /// Writes the N numbers.
    ///
    /// # Safety
    /// See `zero`.
    unsafe fn store(self, numbers: &mut [f32; N]);
    /// self * factor + addend, rounded once.
    ///
    /// # Safety
    /// See `zero`.
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self;
}

/// For any processor.
#[derive(Clone, Copy)]
pub struct Portable<const N: usize>([f32; N]);

impl<const N: usize> Lanes<N> for Portable<N> {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; N])
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        Portable([number; N])
    }

    #[inline(always)]
    unsafe fn load(numbers: &[f32; N]) -> Self {
        Portable(*numbers)
    }

    #[inline(always)]
    unsafe fn store(self, numbers: &mut [f32; N]) {
        *numbers = self.0;
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|l| self.0[l].mul_add(factor.0[l], addend.0[l])))
    }
}

/// Sixteen lanes in two vectors of eight.
#[derive(Clone, Copy)]
pub struct Two<V>(V, V);

impl<V: Lanes<8>> Lanes<16> for Two<V> {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller vouches for the instructions.
        unsafe { Two(V::zero(), V::zero()) }
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: as above.
        unsafe { Two(V::splat(number), V::splat(number)) }
    }

    #[inline(always)]
    unsafe fn load(numbers: &[f32; 16]) -> Self {
        let (halves, _) = numbers.as_chunks();
        // SAFETY: as above.
        unsafe { Two(V::load(&halves[0]), V::load(&halves[1])) }
    }

    #[inline(always)]
    unsafe fn store(self, numbers: &mut [f32; 16]) {
        let (halves, _) = numbers.as_chunks_mut();
        // SAFETY: as above.
        unsafe {
            self.0.store(&mut halves[0]);
            self.1.store(&mut halves[1]);
        }
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as above.
        unsafe { Two(self.0.times_plus(factor.0, addend.0), self.1.times_plus(factor.1, addend.1)) }
    }
}

#[cfg(target_arch = "x86_64")]
pub mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// One register: its size, its number of lanes, and the intrinsics for it.
    macro_rules! register {
        ($name:ident, $register:ident, $lanes:literal, $zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident) => {
            #[derive(Clone, Copy)]
            pub struct $name(pub $register);

            // SAFETY, of every block here: the caller vouches for the instructions, and references are valid
            // for as many numbers.
            impl Lanes<$lanes> for $name {
                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: as above.
                    $name(unsafe { $zero() })
                }

                #[inline(always)]
                unsafe fn splat(number: f32) -> Self {
                    // SAFETY: as above.
                    $name(unsafe { $splat(number) })
                }

                #[inline(always)]
                unsafe fn load(numbers: &[f32; $lanes]) -> Self {
                    // SAFETY: as above.
                    $name(unsafe { $load(numbers.as_ptr()) })
                }

                #[inline(always)]
                unsafe fn store(self, numbers: &mut [f32; $lanes]) {
                    // SAFETY: as above.
                    unsafe { $store(numbers.as_mut_ptr(), self.0) }
                }

                #[inline(always)]
                unsafe fn times_plus(self, factor: Self, addend: Self) -> Self {
                    // SAFETY: as above.
                    $name(unsafe { $fma(self.0, factor.0, addend.0) })
                }
            }
        };
    }
    register!(
        Avx2,
        __m256,
        8,
        _mm256_setzero_ps,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_fmadd_ps
    );
    register!(
        Avx512,
        __m512,
        16,
        _mm512_setzero_ps,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_fmadd_ps
    );
}
