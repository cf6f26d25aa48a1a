//! The types of 16 bits in which weights are stored.

use half::{bf16, f16};

use super::lanes::{LANES, Lanes, STEP};

/// A number of 16 bits.
pub trait Stored: Copy + Send + Sync + 'static {
    #[doc(hidden)]
    fn widen(self) -> f32;

    #[doc(hidden)]
    fn narrow(number: f32) -> Self;

    /// Where number `i` of a step is after `load`.
    #[doc(hidden)]
    fn place(i: usize) -> usize;

    /// One half of a step's weights, widened.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[doc(hidden)]
    unsafe fn load<V: Lanes>(run: &[Self; STEP], half: usize) -> V;
}

impl Stored for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> bf16 {
        bf16::from_f32(number)
    }

    /// The even ones first: widening these is a shift, and widening the odd ones a mask.
    #[inline(always)]
    fn place(i: usize) -> usize {
        i / 2 + i % 2 * LANES
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(run: &[bf16; STEP], half: usize) -> V {
        // SAFETY: as the caller guarantees.
        unsafe { V::load_bf16(run, half) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(number: f32) -> f16 {
        f16::from_f32(number)
    }

    #[inline(always)]
    fn place(i: usize) -> usize {
        i
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(run: &[f16; STEP], half: usize) -> V {
        // SAFETY: as the caller guarantees.
        unsafe { V::load_f16(run, half) }
    }
}
