//! Passes over a whole row of logits, written so that the compiler runs them several numbers at a
//! time. What is not a number never counts.

use std::cmp::Ordering;

use stagebus_engine::argmax::greedy;

/// Numbers that are handled side by side; a multiple of every vector width in use.
const LANES: usize = 16;

/// Numbers that are added up in single precision before the sum goes on in double.
const BLOCK: usize = 1024;

/// Exponents below this give 0: their power would be no normal number.
const LOWEST_EXPONENT: f32 = -87.0;

/// First index of the largest logit; `None` if no logit is above minus infinity.
pub(super) fn largest(logits: &[f32]) -> Option<u32> {
    greedy(logits).ok().filter(|token| logits[*token as usize] > f32::NEG_INFINITY)
}

/// Replaces `found` by the indexes of all logits from `lowest` on, ascending.
pub(super) fn gather(logits: &[f32], lowest: f32, found: &mut Vec<u32>) {
    found.clear();
    for (block, logits) in logits.chunks(2 * LANES).enumerate() {
        if logits.iter().fold(false, |any, logit| any | (*logit >= lowest)) {
            let first = (block * 2 * LANES) as u32;
            let indexes = (first..).zip(logits).filter(|(_, logit)| **logit >= lowest);
            found.extend(indexes.map(|(index, _)| index));
        }
    }
}

/// Most likely first; of equally likely tokens the lower id.
pub(super) fn by_rank(logits: &[f32]) -> impl Fn(&u32, &u32) -> Ordering + Copy {
    |a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b))
}

/// Replaces `found` by the indexes of the `n` largest logits, in no order; fewer if fewer are above
/// minus infinity.
pub(super) fn most_likely(logits: &[f32], n: usize, found: &mut Vec<u32>) {
    found.clear();
    if n == 0 {
        return;
    }
    // Grows to several times what is wanted before the excess is cut off, so that cuts are rare.
    let most = (4 * n).max(128);
    let mut above = f32::NEG_INFINITY;
    for (block, logits_of_block) in logits.chunks(2 * LANES).enumerate() {
        // Of equal logits the first counts, so those that come later must be larger.
        if !logits_of_block.iter().fold(false, |any, logit| any | (*logit > above)) {
            continue;
        }
        let first = (block * 2 * LANES) as u32;
        let indexes = (first..).zip(logits_of_block).filter(|(_, logit)| **logit > above);
        found.extend(indexes.map(|(index, _)| index));
        if found.len() >= most {
            above = logits[keep_most_likely(logits, n, found) as usize];
        }
    }
    if found.len() > n {
        keep_most_likely(logits, n, found);
    }
}

/// Keeps `n` of more indexes and returns the least likely of them.
fn keep_most_likely(logits: &[f32], n: usize, found: &mut Vec<u32>) -> u32 {
    let (_, last, _) = found.select_nth_unstable_by(n - 1, by_rank(logits));
    let last = *last;
    found.truncate(n);
    last
}

/// Sum of `exp((logit - max) * scale)` over a row.
pub(super) fn exp_sum(logits: &[f32], max: f32, scale: f32) -> f64 {
    let power = |logit: f32| exp_of((logit - max) * scale);
    let block_sum = |block: &[f32]| {
        let (chunks, rest) = block.as_chunks::<LANES>();
        let mut sums = [0.0_f32; LANES];
        for chunk in chunks {
            for (sum, logit) in sums.iter_mut().zip(chunk) {
                *sum += power(*logit);
            }
        }
        sums.iter()
            .copied()
            .chain(rest.iter().map(|logit| power(*logit)))
            .map(f64::from)
            .sum::<f64>()
    };
    logits.chunks(BLOCK).map(block_sum).sum::<f64>()
}

/// `exp(x)` for `x` up to 0, within 3e-7 of it; exactly 1 at 0, and 0 for what is not a number.
///
/// The same operations on every platform, so that a row gives the same token everywhere.
pub(super) fn exp_of(x: f32) -> f32 {
    // Adding and subtracting this rounds to a whole number, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; multiples of the first are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let inside = x > LOWEST_EXPONENT;
    let x = if inside { x } else { 0.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // The Taylor series; the rest is below r^7 / 7! with |r| up to ln 2 / 2.
    let series = 1.0
        + r * (1.0
            + r * (0.5
                + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if inside { series * f32::from_bits(power) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn powers_are_right_from_end_to_end() {
        assert_eq!(exp_of(0.0), 1.0);
        assert_eq!(exp_of(f32::NAN), 0.0);
        assert_eq!(exp_of(f32::NEG_INFINITY), 0.0);
        let mut x = 0.0_f32;
        while x > LOWEST_EXPONENT {
            let (found, expected) = (f64::from(exp_of(x)), f64::from(x).exp());
            assert!((found / expected - 1.0).abs() < 3e-7, "exp({x}) = {expected}, found {found}");
            x -= 0.000_7;
        }
    }

    #[test]
    fn sums_are_right_and_leave_out_what_is_no_number() {
        let mut row: Vec<f32> = (0..5003_u16).map(|i| f32::from(i % 997) * -0.02).collect();
        row[4999] = f32::NAN;
        row[17] = f32::NEG_INFINITY;
        let expected: f64 =
            row.iter().filter(|l| !l.is_nan()).map(|l| (f64::from(*l) * 0.5).exp()).sum();
        assert!((exp_sum(&row, 0.0, 0.5) / expected - 1.0).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn the_most_likely_are_those_of_a_sorted_row(
            logits in prop::collection::vec(-40_i8..40, 0..700),
            n in 0_usize..60,
        ) {
            let number = |logit: i8| if logit == 3 { f32::NAN } else { f32::from(logit) };
            let logits: Vec<f32> = logits.into_iter().map(number).collect();
            let mut sorted: Vec<u32> =
                (0..logits.len() as u32).filter(|i| !logits[*i as usize].is_nan()).collect();
            sorted.sort_by(by_rank(&logits));
            sorted.truncate(n);
            let mut found = vec![7];
            most_likely(&logits, n, &mut found);
            found.sort_by(by_rank(&logits));
            prop_assert_eq!(found, sorted);
        }

        #[test]
        fn gathering_finds_what_a_plain_filter_finds(
            logits in prop::collection::vec(-5_i8..5, 0..200),
            lowest in -5_i8..5,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let lowest = f32::from(lowest);
            let plain: Vec<u32> =
                (0..logits.len() as u32).filter(|i| logits[*i as usize] >= lowest).collect();
            let mut found = vec![7];
            gather(&logits, lowest, &mut found);
            prop_assert_eq!(found, plain);
        }
    }
}
