//! Verdicts: where a generation leaves its reference.

use serde::Serialize;

/// The first position at which two token lists differ. An absent token means that the list ended
/// before that position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Position in the output, in tokens from 0.
    pub index: usize,
    /// Token of the reference.
    pub expected: Option<u32>,
    /// Token that came.
    pub found: Option<u32>,
}

/// Finds the first difference of two token lists; a list that ends early differs at its end.
#[must_use]
pub fn first_difference(expected: &[u32], found: &[u32]) -> Option<Difference> {
    let n_equal = expected.iter().zip(found).take_while(|(a, b)| a == b).count();
    let (expected, found) = (expected.get(n_equal).copied(), found.get(n_equal).copied());
    (expected.is_some() || found.is_some()).then_some(Difference {
        index: n_equal,
        expected,
        found,
    })
}

/// Outcome of one prompt form of one case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Verdict {
    /// Every token is the reference's.
    Equal {
        /// Tokens compared.
        n_tokens: usize,
    },
    /// The chat template gives another text than the reference's.
    TemplateDiffers {
        /// First byte that differs.
        byte: usize,
    },
    /// The prompt became other tokens than the reference's, so that its output means nothing.
    PromptDiffers {
        /// First difference in the prompt.
        difference: Difference,
    },
    /// The fleet counted another number of prompt tokens than it was given.
    PromptLength {
        /// Tokens of the reference prompt.
        expected: usize,
        /// Tokens that the fleet reports.
        found: usize,
    },
    /// The output leaves the reference.
    OutputDiffers {
        /// First difference in the output.
        difference: Difference,
        /// Tokens of the reference.
        n_expected: usize,
        /// Tokens that came.
        n_found: usize,
    },
    /// The streamed text is not the text of the tokens.
    TextDiffers {
        /// First byte that differs.
        byte: usize,
    },
    /// There was no complete answer.
    Failed {
        /// The error with its causes.
        error: String,
    },
}

impl Verdict {
    /// Compares an output with its reference.
    #[must_use]
    pub fn of_output(expected: &[u32], found: &[u32]) -> Self {
        match first_difference(expected, found) {
            None => Self::Equal { n_tokens: expected.len() },
            Some(difference) => {
                Self::OutputDiffers { difference, n_expected: expected.len(), n_found: found.len() }
            }
        }
    }

    /// Whether everything is equal.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        matches!(self, Self::Equal { .. })
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Equal { n_tokens } => write!(f, "{n_tokens} tokens equal"),
            Self::TemplateDiffers { byte } => {
                write!(f, "the rendered chat differs from template_text at byte {byte}")
            }
            Self::PromptDiffers { difference } => {
                write!(f, "the prompt's tokens differ at {difference}")
            }
            Self::PromptLength { expected, found } => {
                write!(f, "the fleet counts {found} prompt tokens, expected {expected}")
            }
            Self::OutputDiffers { difference, n_expected, n_found } => {
                write!(f, "output differs at {difference} ({n_found} of {n_expected} tokens came)")
            }
            Self::TextDiffers { byte } => {
                write!(f, "the streamed text differs from the tokens' text at byte {byte}")
            }
            Self::Failed { error } => write!(f, "no complete answer: {error}"),
        }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |token: Option<u32>| token.map_or("the end".to_owned(), |t| t.to_string());
        let (expected, found) = (show(self.expected), show(self.found));
        write!(f, "token {}: expected {expected}, found {found}", self.index)
    }
}

/// Both forms of one case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CaseReport {
    /// Position in the reference file, from 0.
    pub index: usize,
    /// What kind of prompt it is.
    pub category: String,
    /// `input_ids` sent as they are.
    pub token_prompt: Verdict,
    /// The prompt sent as a chat message, through the template.
    pub text_prompt: Verdict,
}

impl CaseReport {
    /// Whether both forms are equal.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.token_prompt.is_equal() && self.text_prompt.is_equal()
    }
}

/// All cases on one fleet.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// Stages of the fleet.
    pub stages: usize,
    /// How the weights were mapped.
    pub weights: String,
    /// Tokens drafted per step, or `auto`.
    pub k: String,
    /// Cases that are equal in both forms.
    pub cases_equal: usize,
    /// Cases of the file.
    pub cases_total: usize,
    /// Time of the run, in seconds.
    pub elapsed_s: f64,
    /// The cases.
    pub cases: Vec<CaseReport>,
}

/// What `stagebus check --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckReport {
    /// Whether every case is equal on every fleet.
    pub equal: bool,
    /// Name of the model on the wire.
    pub model: String,
    /// Numerics profile.
    pub profile: String,
    /// Engine asked for.
    pub engine: String,
    /// Workers per stage.
    pub workers_per_stage: usize,
    /// One entry per stage count.
    pub runs: Vec<RunReport>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let check = |expected: &[u32],
                     found: &[u32],
                     want: Option<(usize, Option<u32>, Option<u32>)>| {
            let want = want.map(|(index, expected, found)| Difference { index, expected, found });
            assert_eq!(first_difference(expected, found), want, "{expected:?} {found:?}");
        };
        check(&[], &[], None);
        check(&[1, 2, 3], &[1, 2, 3], None);
        check(&[1, 2, 3], &[9, 2, 3], Some((0, Some(1), Some(9))));
        check(&[1, 2, 3], &[1, 2, 4], Some((2, Some(3), Some(4))));
        check(&[1, 2, 3], &[1, 2], Some((2, Some(3), None)));
        check(&[1, 2], &[1, 2, 3], Some((2, None, Some(3))));
        check(&[1], &[], Some((0, Some(1), None)));
    }

    #[test]
    fn a_case_is_equal_only_in_both_forms() {
        let equal = Verdict::of_output(&[1, 2], &[1, 2]);
        assert!(equal.is_equal());
        for other in [
            Verdict::of_output(&[1, 2], &[1]),
            Verdict::PromptLength { expected: 3, found: 4 },
            Verdict::TextDiffers { byte: 0 },
            Verdict::TemplateDiffers { byte: 0 },
            Verdict::Failed { error: "timeout".to_owned() },
            Verdict::PromptDiffers {
                difference: Difference { index: 0, expected: Some(1), found: None },
            },
        ] {
            assert!(!other.is_equal(), "{other}");
            for (token_prompt, text_prompt) in
                [(equal.clone(), other.clone()), (other.clone(), equal.clone())]
            {
                let report =
                    CaseReport { index: 0, category: "c".to_owned(), token_prompt, text_prompt };
                assert!(!report.is_equal());
            }
        }
    }

    #[test]
    fn a_difference_names_position_and_both_tokens() {
        let text = Verdict::of_output(&[5, 6, 7], &[5, 9]).to_string();
        assert_eq!(text, "output differs at token 1: expected 6, found 9 (2 of 3 tokens came)");
        let text = Verdict::of_output(&[5, 6], &[5]).to_string();
        assert!(text.contains("token 1: expected 6, found the end"), "{text}");
    }
}
