//! Reference files: what a right implementation generates for a list of prompts.
//!
//! A file is a JSON array of cases. Fields that this program does not know are ignored, so that a
//! file may carry notes of its own.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Tokens after which the reference runs stop when no end token comes.
pub const REFERENCE_MAX_TOKENS: usize = 64;

/// One prompt and its greedy continuation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Case {
    /// What kind of prompt it is, for people.
    pub category: String,
    /// What the user says; the model's chat template goes around it.
    pub prompt: String,
    /// The prompt inside the template, if the file tells it.
    pub template_text: Option<String>,
    /// Token ids of the prompt inside the template.
    pub input_ids: Vec<u32>,
    /// Token ids that follow, an end token included.
    pub output_ids: Vec<u32>,
}

impl Case {
    /// Tokens to ask for. After an end token the budget is left open, so that stopping there is
    /// part of what is checked.
    #[must_use]
    pub fn max_tokens(&self, eos_ids: &[u32]) -> usize {
        let ended = self.output_ids.last().is_some_and(|last| eos_ids.contains(last));
        let n_expected = self.output_ids.len();
        if ended { n_expected.max(REFERENCE_MAX_TOKENS) } else { n_expected }
    }
}

/// Why a reference file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The file cannot be read.
    #[error("cannot read the reference file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The file is not a JSON array of cases.
    #[error(
        "{} is not a reference file: expected a JSON array of objects with category, prompt, \
         input_ids and output_ids",
        path.display()
    )]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and what.
        #[source]
        source: serde_json::Error,
    },
    /// The array is empty, so that nothing would be checked.
    #[error("{} holds no case", path.display())]
    NoCases {
        /// The file.
        path: PathBuf,
    },
    /// A case has an empty list of ids.
    #[error("{}: {field} of case {index} ({category}) is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// Position of the case, from 0.
        index: usize,
        /// Its category.
        category: String,
        /// The empty field.
        field: &'static str,
    },
}

/// Reads a reference file.
///
/// # Errors
/// [`ReferenceError`]; every case of the file is checked before any is returned.
pub fn read_cases(path: &Path) -> Result<Vec<Case>, ReferenceError> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(source) => return Err(ReferenceError::Read { path: path.to_owned(), source }),
    };
    parse_cases(path, &text)
}

fn parse_cases(path: &Path, text: &[u8]) -> Result<Vec<Case>, ReferenceError> {
    let cases: Vec<Case> = match serde_json::from_slice(text) {
        Ok(cases) => cases,
        Err(source) => return Err(ReferenceError::Parse { path: path.to_owned(), source }),
    };
    if cases.is_empty() {
        return Err(ReferenceError::NoCases { path: path.to_owned() });
    }
    for (index, case) in cases.iter().enumerate() {
        let lists = [("input_ids", &case.input_ids), ("output_ids", &case.output_ids)];
        for (field, ids) in lists {
            if ids.is_empty() {
                return Err(ReferenceError::Empty {
                    path: path.to_owned(),
                    index,
                    category: case.category.clone(),
                    field,
                });
            }
        }
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Case>, ReferenceError> {
        parse_cases(Path::new("cases.json"), text.as_bytes())
    }

    #[test]
    fn unknown_fields_are_ignored_and_the_template_text_is_optional() {
        let cases = parse(
            r#"[{"category":"c","prompt":"p","input_ids":[1,2],"output_ids":[3],"min_margin":0.5},
                {"category":"d","prompt":"q","template_text":"t","input_ids":[1],"output_ids":[2]}]"#,
        )
        .expect("a valid file");
        assert_eq!(cases.len(), 2);
        assert_eq!(cases[0].input_ids, [1, 2]);
        assert_eq!(
            (&cases[0].template_text, cases[1].template_text.as_deref()),
            (&None, Some("t"))
        );
    }

    #[test]
    fn a_malformed_file_is_a_typed_error() {
        for text in [
            "",
            "{}",
            "[{}]",
            r#"[{"category":"c","prompt":"p","input_ids":[-1],"output_ids":[3]}]"#,
            r#"[{"category":"c","prompt":"p","input_ids":[1],"output_ids":["x"]}]"#,
            r#"[{"category":"c","prompt":"p","input_ids":[1]}]"#,
            r#"[{"category":"c","prompt":"p","input_ids":[4294967296],"output_ids":[3]}]"#,
        ] {
            assert!(matches!(parse(text), Err(ReferenceError::Parse { .. })), "{text}");
        }
        assert!(matches!(parse("[]"), Err(ReferenceError::NoCases { .. })));
        let empty = r#"[{"category":"c","prompt":"p","input_ids":[1],"output_ids":[]}]"#;
        assert!(matches!(
            parse(empty),
            Err(ReferenceError::Empty { index: 0, field: "output_ids", .. })
        ));
        let missing = read_cases(Path::new("no/such/file.json"));
        assert!(matches!(missing, Err(ReferenceError::Read { .. })));
    }

    #[test]
    fn the_budget_stays_open_after_an_end_token_only() {
        let case = |output_ids: Vec<u32>| Case {
            category: String::new(),
            prompt: String::new(),
            template_text: None,
            input_ids: vec![1],
            output_ids,
        };
        assert_eq!(case(vec![5, 6, 2]).max_tokens(&[2]), REFERENCE_MAX_TOKENS);
        assert_eq!(case(vec![5, 6, 7]).max_tokens(&[2]), 3);
        assert_eq!(case(vec![5; 100]).max_tokens(&[2]), 100);
        let mut long = vec![5; 99];
        long.push(2);
        assert_eq!(case(long).max_tokens(&[2]), 100);
    }
}
