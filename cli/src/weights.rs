//! The options about weights: their values, and what the numerics profile has to say about them.

use std::path::Path;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use stagebus_shards::floats::FloatCodingError;
use stagebus_shards::{FloatCoding, FloatException, FloatPlan, SourceFormat, WeightMode};
use stagebus_worker::ProfileChoice;

use crate::exit::UsageError;

/// Parses a weight mode and lists the modes in the help.
#[must_use]
pub fn parser() -> impl TypedValueParser<Value = WeightMode> {
    PossibleValuesParser::new(WeightMode::ALL.map(|mode| mode.as_str()))
        .try_map(|text| text.parse::<WeightMode>())
}

/// Parses a coding of floats and lists the codings in the help.
#[must_use]
pub fn floats_parser() -> impl TypedValueParser<Value = FloatCoding> {
    PossibleValuesParser::new(FloatCoding::ALL.map(FloatCoding::as_str))
        .try_map(|text| text.parse::<FloatCoding>())
}

/// Parses `NAME=CODING`.
///
/// # Errors
/// What is wrong, for the command line.
pub fn exception(text: &str) -> Result<FloatException, String> {
    let Some((pattern, coding)) = text.rsplit_once('=') else {
        return Err("expected NAME=CODING, for example '*.down_proj.*=int8'".to_owned());
    };
    let coding = coding.parse().map_err(|error: FloatCodingError| error.to_string())?;
    Ok(FloatException { pattern: pattern.to_owned(), coding })
}

/// What becomes of a model's floats: what was asked for, else 4 bits where the model is a folder of
/// safetensors, whose matrices are all floats; others have been coded by their makers as far as was
/// wanted.
#[must_use]
pub fn floats(asked: Option<FloatCoding>, model: &Path) -> FloatPlan {
    let coding = asked.unwrap_or(match SourceFormat::of(model) {
        SourceFormat::HuggingFace => FloatCoding::Int4,
        SourceFormat::Gguf | SourceFormat::OpenVino => FloatCoding::Keep,
    });
    FloatPlan::of(coding)
}

/// The weights to use: the exact profile implies exact weights.
///
/// # Errors
/// [`UsageError::Conflict`] if others were asked for together with that profile.
pub fn for_profile(
    asked: Option<WeightMode>,
    profile: ProfileChoice,
) -> Result<WeightMode, UsageError> {
    match asked {
        Some(mode) if profile == ProfileChoice::Exact && mode != WeightMode::Exact => {
            Err(UsageError::Conflict {
                left: "--profile exact".to_owned(),
                right: format!("--weights {mode}"),
                reason: "the exact profile implies exact weights".to_owned(),
            })
        }
        Some(mode) => Ok(mode),
        None if profile == ProfileChoice::Exact => Ok(WeightMode::Exact),
        None => Ok(WeightMode::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_follow_the_kind_of_model_and_exceptions_are_parsed() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("m.gguf");
        assert_eq!(floats(None, folder.path()), FloatPlan::of(FloatCoding::Int4));
        assert_eq!(floats(None, &file), FloatPlan::default());
        assert_eq!(floats(Some(FloatCoding::Int8), &file), FloatPlan::of(FloatCoding::Int8));
        std::fs::write(folder.path().join("openvino_model.xml"), "").expect("a file");
        assert_eq!(floats(None, folder.path()), FloatPlan::default());
        let (pattern, coding) = ("*.a=b.*".to_owned(), FloatCoding::Int4Asym);
        assert_eq!(exception("*.a=b.*=int4-asym"), Ok(FloatException { pattern, coding }));
        assert!(exception("lm_head").is_err());
        assert!(exception("lm_head=int5").is_err());
    }

    #[test]
    fn the_exact_profile_implies_exact_weights() {
        assert_eq!(for_profile(None, ProfileChoice::Exact), Ok(WeightMode::Exact));
        assert_eq!(
            for_profile(Some(WeightMode::Exact), ProfileChoice::Exact),
            Ok(WeightMode::Exact)
        );
        assert_eq!(
            for_profile(Some(WeightMode::Compact), ProfileChoice::Fast),
            Ok(WeightMode::Compact)
        );
        for mode in [WeightMode::NearLossless, WeightMode::Compact] {
            assert!(matches!(
                for_profile(Some(mode), ProfileChoice::Exact),
                Err(UsageError::Conflict { .. })
            ));
        }
    }
}
