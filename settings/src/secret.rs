//! Values that must not reach a log.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

/// What stands in for a secret wherever one would be printed.
pub(crate) const REDACTED: &str = "[redacted]";

/// A password or token: readable through [`Secret::expose`] only.
///
/// `Debug` and `Serialize` give a placeholder, so that an effective configuration may be logged.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The secret itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(REDACTED)
    }
}
