//! The version that every internal message carries.

use serde::{Deserialize, Serialize};

/// Version of the internal messages; a change of any field or variant raises it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MessageVersion(u16);

impl MessageVersion {
    /// The version that this build writes and accepts: open, close, keep, drain, stats and
    /// progress with sampling, a constraint and priority, forward steps that stages may hold, large
    /// ones in parts, head rows with log-probabilities, announcements with the progress of
    /// inference, also of workers that start, nodes without a model file
    /// and passes after a rest.
    pub const CURRENT: Self = Self(9);

    /// Returns the number as it stands on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }
}

impl std::fmt::Display for MessageVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}
