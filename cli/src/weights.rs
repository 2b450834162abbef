//! The `--weights` option: its values, and what the numerics profile has to say about them.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use stagebus_shards::WeightMode;
use stagebus_worker::ProfileChoice;

use crate::exit::UsageError;

/// Parses a weight mode and lists the modes in the help.
#[must_use]
pub fn parser() -> impl TypedValueParser<Value = WeightMode> {
    PossibleValuesParser::new(WeightMode::ALL.map(|mode| mode.as_str()))
        .try_map(|text| text.parse::<WeightMode>())
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
