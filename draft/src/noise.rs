//! Counter-based Gumbel noise keyed by seed, position and token.
//!
//! Philox-4x32-10 turns (seed; position, token block) into four words without any state, so any
//! stage, drafter or replay draws the same number for the same place.
//!
//! **Source**: Salmon, Moraes, Dror, Shaw, *Parallel Random Numbers: As Easy as 1, 2, 3*, SC 2011.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Largest value that [`gumbel`] returns: the noise of the word `u32::MAX`.
pub const MAX_GUMBEL: f32 = 22.875;

/// One block of Philox-4x32-10.
#[must_use]
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let mut key = [key as u32, (key >> 32) as u32];
    let mut state = counter;
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let low = u64::from(state[0]) * u64::from(MULTIPLIERS[0]);
        let high = u64::from(state[2]) * u64::from(MULTIPLIERS[1]);
        state = [
            (high >> 32) as u32 ^ state[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ state[3] ^ key[1],
            low as u32,
        ];
    }
    state
}

/// Standard Gumbel noise for one token at one position.
#[must_use]
pub fn gumbel(seed: u64, position: u32, token: u32) -> f32 {
    gumbel_of(word(seed, position, token))
}

/// The random word behind the noise of a token at a position.
pub(crate) fn word(seed: u64, position: u32, token: u32) -> u32 {
    words(seed, position, token / 4)[(token % 4) as usize]
}

/// The words of four tokens, from `4 * counter` on.
pub(crate) fn words(seed: u64, position: u32, counter: u32) -> [u32; 4] {
    philox(seed, [counter, position, 0, 0])
}

/// Standard Gumbel noise of a word.
///
/// The word `w` stands for the uniform number `(w + 1/2) / 2^32`, which is never 0 or 1, so the
/// noise lies in `-3.13..=MAX_GUMBEL`. It grows with the word.
pub(crate) fn gumbel_of(word: u32) -> f32 {
    let uniform = (f64::from(word) + 0.5) / 4_294_967_296.0;
    // `ln_1p` keeps the digits of a uniform number close to 1, where the large noise comes from.
    let exponential = -(uniform - 1.0).ln_1p();
    (-exponential.ln()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        assert_eq!(
            philox(0, [0; 4]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            "all zero"
        );
        assert_eq!(
            philox(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            "all ones"
        );
        assert_eq!(
            philox(0x299f_31d0_a409_3822, [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            "digits of pi"
        );
    }

    #[test]
    fn noise_grows_with_its_word_and_stays_below_the_bound_by_leading_ones() {
        let mut last = f32::NEG_INFINITY;
        for word in (0..=u32::MAX).step_by(65_521).chain([u32::MAX - 1, u32::MAX]) {
            let noise = gumbel_of(word);
            assert!(noise >= last);
            last = noise;
            let bound = (word.leading_ones() + 1) as f32 * std::f32::consts::LN_2;
            assert!(noise <= bound + 1e-4, "noise {noise} of {word:#x} is above {bound}");
        }
    }

    #[test]
    fn noise_is_bounded_at_both_ends() {
        assert!(gumbel_of(u32::MAX) <= MAX_GUMBEL);
        assert!(gumbel_of(u32::MAX) > MAX_GUMBEL - 0.01);
        assert!(gumbel_of(0) >= -3.2);
        assert!(gumbel_of(0).is_finite());
    }

    #[test]
    fn noise_has_the_mean_and_variance_of_a_gumbel() {
        let n = 200_000_u32;
        let values: Vec<f64> = (0..n).map(|i| f64::from(gumbel(7, i / 1000, i % 1000))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
        // Six standard errors: 1.28 / sqrt(200,000) each for the mean.
        assert!((mean - 0.577_215_66).abs() < 0.0175, "mean {mean}");
        assert!(
            (variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.05,
            "variance {variance}"
        );
    }
}
