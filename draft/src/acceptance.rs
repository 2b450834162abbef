//! How many drafted tokens stand, and what that is worth.
//!
//! The target's own choice for each row is known after the verify. A drafted token stands while
//! all before it stand and the target chose the same; the choice after the last one that stands is
//! the bonus token, so every verify yields at least one token and never a wrong one.
//!
//! **Source**: Leviathan, Kalman, Matias, *Fast Inference from Transformers via Speculative
//! Decoding*, ICML 2023, equation 1 for the closed form.

/// Outcome of one verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Drafted tokens that stand.
    pub n_accepted: usize,
    /// The target's own token after them.
    pub bonus: u32,
}

/// Compares drafted tokens with the target's choices.
///
/// **Shape**: `chosen` has one token more than `drafted`: `chosen[i]` is the target's token at the
/// place of `drafted[i]`, the last one follows them all.
///
/// Returns `None` if the lengths do not fit.
#[must_use]
pub fn verify(drafted: &[u32], chosen: &[u32]) -> Option<Verdict> {
    if chosen.len() != drafted.len() + 1 {
        return None;
    }
    let n_accepted = drafted.iter().zip(chosen).take_while(|(a, b)| a == b).count();
    Some(Verdict { n_accepted, bonus: chosen[n_accepted] })
}

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
    use crate::noise::philox;

    #[test]
    fn the_first_difference_ends_the_run() {
        assert_eq!(verify(&[1, 2, 3], &[1, 2, 3, 4]), Some(Verdict { n_accepted: 3, bonus: 4 }));
        assert_eq!(verify(&[1, 9, 3], &[1, 2, 3, 4]), Some(Verdict { n_accepted: 1, bonus: 2 }));
        assert_eq!(verify(&[], &[4]), Some(Verdict { n_accepted: 0, bonus: 4 }));
        assert_eq!(verify(&[1], &[1]), None);
    }

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
                let drafted = vec![0; n_draft as usize];
                tokens += verify(&drafted, &chosen).unwrap().n_accepted + 1;
            }
            let mean = tokens as f64 / f64::from(n);
            let want = expected_tokens(p, n_draft as usize);
            assert!((mean - want).abs() < 0.12, "p {p}, {n_draft} drafted: {mean} against {want}");
        }
    }
}
