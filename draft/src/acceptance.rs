//! What drafted tokens are worth.
//!
//! **Source**: Leviathan, Kalman, Matias, *Fast Inference from Transformers via Speculative
//! Decoding*, ICML 2023, equation 1 for the closed form.

/// Tokens that a verify of `n_draft` drafted tokens yields on average when each stands with
/// probability `p` given that all before it do: `(1 - p^(n_draft + 1)) / (1 - p)`.
#[must_use]
pub fn expected_tokens(p: f64, n_draft: usize) -> f64 {
    let p = p.clamp(0.0, 1.0);
    (0..=n_draft).fold((0.0, 1.0), |(sum, power), _| (sum + power, power * p)).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::Chain;
    use crate::noise::philox;

    #[test]
    fn measured_acceptance_matches_the_closed_form() {
        for (p, n_draft) in [(0.0, 3), (0.3, 1), (0.7, 4), (0.95, 10), (1.0, 5)] {
            let n = 20_000_u32;
            let mut tokens = 0;
            for trial in 0..n {
                let chosen: Vec<u32> = (0..=n_draft)
                    .map(|i| {
                        let word = philox(11, [trial, i, 0, 0])[0];
                        u32::from(f64::from(word) / 4_294_967_296.0 >= p)
                    })
                    .collect();
                let mut chain = Chain::default();
                chain.extend(&vec![0; n_draft as usize], n_draft as usize);
                chain.send(&[0], chosen.len());
                tokens += chain.judge(&chosen).n_standing;
            }
            let mean = tokens as f64 / f64::from(n);
            let want = expected_tokens(p, n_draft as usize);
            assert!((mean - want).abs() < 0.12, "p {p}, {n_draft} drafted: {mean} against {want}");
        }
    }
}
