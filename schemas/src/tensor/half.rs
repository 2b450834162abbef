//! Half precision that a receiver may round on to bfloat16.
//!
//! Devices that compute in bfloat16 round a stage's input to it. Rounding twice, first to the 11 bits
//! of half precision and then to the 8 of bfloat16, may end elsewhere than rounding once: if the
//! first result lies in the middle between two bfloat16 numbers, the second rounding no longer knows
//! on which side of it the value was. That is so for one value in eight, and for half of these the
//! result is the wrong one: an element in sixteen moves by a step of bfloat16.
//!
//! So a value that half precision would round to such a middle takes the next number on its own side
//! instead. Rounding never passes a number of half precision, and all middles are such numbers from
//! 2^-16 to 65,504; so there bfloat16 of what is sent is exactly bfloat16 of the value.
//!
//! **Source**: Figueroa, *When is Double Rounding Innocuous?*, SIGNUM Newsletter 30, 1995, for the
//! problem.

use std::cmp::Ordering;

use ::half::f16;

/// The lower half of an `f32` in the middle between two bfloat16 numbers.
const MIDDLE: u32 = 0x8000;

/// Half precision of a value. Larger values than 65,504 become that; infinite ones stay infinite.
pub(super) fn from_f32(x: f32) -> f16 {
    let nearest = f16::from_f32(x);
    if nearest.is_infinite() && x.is_finite() {
        return if x > 0.0 { f16::MAX } else { f16::MIN };
    }
    let rounded = f32::from(nearest);
    if rounded.to_bits() & 0xffff != MIDDLE {
        return nearest;
    }
    // The bits of a number without its sign grow with it.
    match rounded.abs().partial_cmp(&x.abs()) {
        Some(Ordering::Less) => f16::from_bits(nearest.to_bits() + 1),
        Some(Ordering::Greater) => f16::from_bits(nearest.to_bits() - 1),
        _ => nearest,
    }
}

#[cfg(test)]
mod tests {
    use ::half::bf16;
    use proptest::prelude::*;

    use super::*;

    fn halved(values: &[f32]) -> Vec<f32> {
        values.iter().map(|x| from_f32(*x).into()).collect()
    }

    #[test]
    fn a_value_beside_a_middle_stays_on_its_side() {
        // 1 + 2^-8 is the middle between 1 and the next bfloat16; half precision has steps of 2^-10.
        let middle = 1.0 + 1.0 / 256.0;
        let step = 1.0 / 1024.0;
        for sign in [1.0, -1.0] {
            let found = halved(&[middle, middle + 1e-5, middle - 1e-5].map(|x| sign * x));
            assert_eq!(found, [middle, middle + step, middle - step].map(|x| sign * x));
        }
    }

    #[test]
    fn what_is_too_large_or_no_number_passes() {
        let found = halved(&[1e9, -65_520.0, f32::NEG_INFINITY, 1e-30]);
        assert_eq!(found, [65_504.0, -65_504.0, f32::NEG_INFINITY, 0.0]);
        assert!(halved(&[f32::NAN])[0].is_nan());
        assert_eq!(halved(&[-0.0])[0].to_bits(), (-0.0_f32).to_bits());
    }

    proptest! {
        #[test]
        fn bfloat16_is_the_same_from_the_value_and_from_half_precision(
            mantissa in 1.0_f32..2.0,
            exponent in -16_i32..16,
            negative: bool,
        ) {
            let x = if negative { -mantissa } else { mantissa } * 2.0_f32.powi(exponent);
            let half = f32::from(from_f32(x));
            prop_assert_eq!(bf16::from_f32(half), bf16::from_f32(x), "{} became {}", x, half);
            // A step is 2^-10 of the power of two below, or 2^-24 where they are even.
            let step = (2.0_f32.powi(exponent) / 1024.0).max(2.0_f32.powi(-24));
            prop_assert!((half - x).abs() <= step, "{} became {}", x, half);
        }
    }
}
