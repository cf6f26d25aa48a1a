//! The types of at most 32 bits in which weights, keys and values are stored.

use half::{bf16, f16};

/// A stored number, which is computed with as an `f32`.
pub trait Number: Copy + Send + Sync + 'static {
    /// Exact.
    fn widen(self) -> f32;
    /// Rounds.
    fn narrow(number: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(number: f32) -> f32 {
        number
    }
}

impl Number for bf16 {
    /// A bfloat16 is the upper half of an `f32`.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> bf16 {
        bf16::from_f32(number)
    }
}

impl Number for f16 {
    /// Without a branch or a call, so that loops over it are vectorised. The half's exponent is read as an
    /// `f32`'s, which is off by 127 - 15 = 112; scaling by a power of two corrects that for normal and
    /// subnormal numbers alike.
    #[inline(always)]
    fn widen(self) -> f32 {
        const SCALE: f32 = f32::from_bits((127 + 112) << 23);
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * SCALE).to_bits();
        let widened = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { finite };
        f32::from_bits(widened | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> f16 {
        f16::from_f32(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(
                half.widen().to_bits() == half.to_f32().to_bits() || half.is_nan() && half.widen().is_nan()
            );
            assert!(brain.widen().to_bits() == brain.to_f32().to_bits() || brain.is_nan());
        }
    }
}
