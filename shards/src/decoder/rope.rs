//! Rotary angles: how fast each pair of a head's dimensions turns.
//!
//! **Source**: `modeling_rope_utils.py` of huggingface/transformers.

use std::f64::consts::TAU;

/// The rotary angles of some layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rope {
    /// Dimensions of a head that are rotated, the first ones; even.
    pub(crate) dim: usize,
    /// The pair `i` turns by `base^(-2 i / dim)` at each position.
    pub(crate) base: f32,
    /// Positions are divided by this (linear scaling); 1 without scaling.
    pub(crate) factor: f32,
    /// Each pair's turn is divided by its divisor too; empty for none.
    pub(crate) divisors: Vec<f32>,
    /// Cosines and sines are multiplied with this.
    pub(crate) magnitude: f32,
}

impl Rope {
    /// Angles without scaling.
    pub(crate) fn new(dim: usize, base: f32) -> Self {
        Self { dim, base, factor: 1.0, divisors: Vec::new(), magnitude: 1.0 }
    }

    /// The angle by which each pair turns at each position.
    pub(crate) fn frequencies(&self) -> Vec<f32> {
        let divisor = |pair: usize| self.divisors.get(pair).map_or(1.0, |d| f64::from(*d));
        self.unscaled()
            .enumerate()
            .map(|(pair, turn)| (turn / divisor(pair) / f64::from(self.factor)) as f32)
            .collect()
    }

    /// Slows low frequencies down, as Llama 3.1 does: those that turn less than `low` times within
    /// the original context by the whole factor, those that turn more than `high` times not at all.
    pub(crate) fn with_llama3(mut self, scaling: Llama3) -> Self {
        let Llama3 { factor, low, high, original_context } = scaling;
        self.divisors = self
            .unscaled()
            .map(|turn| {
                let turns = original_context * turn / TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 / ((1.0 - kept) / factor + kept)) as f32
            })
            .collect();
        self
    }

    fn unscaled(&self) -> impl Iterator<Item = f64> + use<> {
        let (dim, base) = (self.dim, f64::from(self.base));
        (0..dim / 2).map(move |pair| base.powf(-2.0 * pair as f64 / dim as f64))
    }
}

/// The scaling of type `llama3`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Llama3 {
    pub(crate) factor: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) original_context: f64,
}

/// What `longrope` multiplies cosines and sines with, for a context this many times the original.
pub(crate) fn longrope_magnitude(times: f64, original_context: f64) -> f32 {
    if times <= 1.0 {
        return 1.0;
    }
    (1.0 + times.ln() / original_context.ln()).sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_base_factor_and_divisors() {
        let rope = Rope { factor: 2.0, divisors: vec![1.0, 4.0], ..Rope::new(4, 100.0) };
        assert_eq!(rope.frequencies(), [0.5, 0.0125]);
        assert_eq!(Rope::new(4, 100.0).frequencies(), [1.0, 0.1]);
    }

    #[test]
    fn llama3_scaling_keeps_high_frequencies_and_slows_low_ones() {
        let scaling = Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 8192.0 };
        let rope = Rope::new(128, 500_000.0).with_llama3(scaling);
        assert_eq!(rope.divisors.len(), 64);
        assert_eq!((rope.divisors[0], rope.divisors[63]), (1.0, 8.0));
        assert!(rope.divisors.is_sorted());
        let between = rope.divisors.iter().filter(|d| **d > 1.0 && **d < 8.0).count();
        assert!((1..20).contains(&between), "{between}");
    }

    #[test]
    fn longrope_grows_with_the_context() {
        let check = |times, expected: f32| {
            assert!((longrope_magnitude(times, 4096.0) - expected).abs() < 1e-6);
        };
        check(0.5, 1.0);
        // sqrt(1 + ln 32 / ln 4096)
        check(32.0, 1.190_238);
    }
}
