//! What becomes of the matrices that a model file stores in floats.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a matrix of floats is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FloatCoding {
    /// As it is.
    #[default]
    Keep,
    /// In half precision.
    F16,
    /// In 8 bits, symmetric, with a scale for each row.
    Int8,
    /// In 4 bits, symmetric, with a scale for each group of up to 128 columns.
    Int4,
    /// In 4 bits, with a scale and a zero point for each such group.
    Int4Asym,
}

/// A text that names no coding.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is none of keep, f16, int8, int4, int4-asym")]
pub struct FloatCodingError {
    /// The text.
    pub found: String,
}

impl FloatCoding {
    /// All codings, most faithful first.
    pub const ALL: [Self; 5] = [Self::Keep, Self::F16, Self::Int8, Self::Int4Asym, Self::Int4];

    /// The name used on the command line and in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Int4Asym => "int4-asym",
        }
    }
}

impl fmt::Display for FloatCoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for FloatCoding {
    type Err = FloatCodingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|coding| coding.as_str() == text);
        found.ok_or_else(|| FloatCodingError { found: text.to_owned() })
    }
}

/// Which matrix of floats is stored how. Vectors, and matrices that are stored in integers, stay as
/// they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FloatPlan {
    /// Matrices of layers.
    pub layers: FloatCoding,
    /// The embedding table and the head.
    pub tables: FloatCoding,
    /// Others than these two, by tensor; the last that fits counts.
    pub exceptions: Vec<FloatException>,
    /// Whether scales of 4-bit groups are searched for the least error: several times the work.
    pub search_scales: bool,
}

/// Tensors that are stored in another way than the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FloatException {
    /// Name of a tensor in the model file; `*` stands for anything.
    pub pattern: String,
    /// How it is stored.
    pub coding: FloatCoding,
}

impl FloatPlan {
    /// One coding for everything, except that the tables have 8 bits where it has 4: the head
    /// decides on tokens, and a row of the embedding table is read without arithmetic to save.
    #[must_use]
    pub fn of(coding: FloatCoding) -> Self {
        let tables = match coding {
            FloatCoding::Int4 | FloatCoding::Int4Asym => FloatCoding::Int8,
            FloatCoding::Keep | FloatCoding::F16 | FloatCoding::Int8 => coding,
        };
        Self { layers: coding, tables, exceptions: Vec::new(), search_scales: false }
    }

    /// How a tensor is stored.
    pub(crate) fn coding(&self, name: &str, is_table: bool) -> FloatCoding {
        let exception = self.exceptions.iter().rev().find(|exception| exception.fits(name));
        match exception {
            Some(exception) => exception.coding,
            None if is_table => self.tables,
            None => self.layers,
        }
    }
}

impl FloatException {
    /// Whether this is about a tensor of this name.
    pub(crate) fn fits(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.ends_with(last)
    }
}

/// A matrix that was stored in floats and is coded anew, and what that does to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CodedTensor {
    /// Its name in the model file.
    pub name: String,
    /// Rows that were coded.
    pub n_rows: usize,
    /// Its columns.
    pub n_cols: usize,
    /// How it is stored.
    pub coding: FloatCoding,
    /// Root of the mean square of what changed, relative to that of the weights.
    pub relative_error: f64,
    /// The largest change of a weight.
    pub largest_error: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_whole_names() {
        let fits = |pattern: &str, name| {
            let pattern = pattern.to_owned();
            FloatException { pattern, coding: FloatCoding::Int8 }.fits(name)
        };
        assert!(fits("a.b", "a.b") && !fits("a.b", "a.bc") && !fits("a.b", "xa.b"));
        assert!(fits("*", "a.b") && fits("a*", "a.b") && fits("*b", "a.b") && fits("a*b", "a.b"));
        assert!(fits("*.down_proj.*", "model.layers.3.mlp.down_proj.weight"));
        assert!(fits("a*b*c", "a1b2b3c") && !fits("a*b*c", "a1c2b"));
        assert!(!fits("ab*b", "ab") && fits("a**b", "ab"));
    }

    #[test]
    fn the_last_exception_that_fits_counts() {
        let exception =
            |pattern: &str, coding| FloatException { pattern: pattern.to_owned(), coding };
        let plan = FloatPlan {
            exceptions: vec![
                exception("*.3.*", FloatCoding::Int8),
                exception("*.3.down", FloatCoding::Keep),
            ],
            ..FloatPlan::of(FloatCoding::Int4)
        };
        assert_eq!(plan.coding("l.1.down", false), FloatCoding::Int4);
        assert_eq!(plan.coding("table", true), FloatCoding::Int8);
        assert_eq!(plan.coding("l.3.up", false), FloatCoding::Int8);
        assert_eq!(plan.coding("l.3.down", false), FloatCoding::Keep);
    }

    #[test]
    fn codings_have_one_spelling() {
        for coding in FloatCoding::ALL {
            assert_eq!(coding.as_str().parse::<FloatCoding>(), Ok(coding));
            assert_eq!(serde_json::to_string(&coding).unwrap(), format!("\"{coding}\""));
        }
        assert!("int3".parse::<FloatCoding>().is_err());
    }
}
