//! Identifiers. Each is a newtype whose text form is one valid subject token.

use serde::{Deserialize, Deserializer, Serialize, de};

/// Longest id in bytes; subjects stay well below the broker's control line limit of 4,096.
pub const MAX_ID_BYTES: usize = 64;

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The text is empty.
    #[error("{kind} is empty")]
    Empty {
        /// Which id.
        kind: &'static str,
    },
    /// The text is longer than [`MAX_ID_BYTES`].
    #[error("{kind} has {bytes} bytes, at most {MAX_ID_BYTES} are allowed")]
    TooLong {
        /// Which id.
        kind: &'static str,
        /// Length found.
        bytes: usize,
    },
    /// The text holds a character that is not allowed in a subject token.
    #[error("{kind} contains {found:?}, allowed are a-z, A-Z, 0-9, '-' and '_'")]
    Character {
        /// Which id.
        kind: &'static str,
        /// First offending character.
        found: char,
    },
}

fn check_token(kind: &'static str, text: &str) -> Result<(), IdError> {
    if text.is_empty() {
        return Err(IdError::Empty { kind });
    }
    if text.len() > MAX_ID_BYTES {
        return Err(IdError::TooLong { kind, bytes: text.len() });
    }
    match text.chars().find(|c| !(c.is_ascii_alphanumeric() || *c == '-' || *c == '_')) {
        Some(found) => Err(IdError::Character { kind, found }),
        None => Ok(()),
    }
}

macro_rules! token_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// Checks and wraps a text.
            ///
            /// # Errors
            /// [`IdError`] if the text is empty, too long or not a valid subject token.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                check_token($kind, &text)?;
                Ok(Self(text))
            }

            /// Returns the text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::new(text).map_err(de::Error::custom)
            }
        }
    };
}

token_id!(
    /// Name of a model: the `<model>` token of every subject.
    ModelName,
    "model name"
);
token_id!(
    /// One start of one stage worker; a restarted worker has a new id.
    WorkerId,
    "worker id"
);
token_id!(
    /// One start of one coordinator.
    CoordinatorId,
    "coordinator id"
);
token_id!(
    /// One start of a machine that may take part in a plan.
    NodeId,
    "node id"
);
token_id!(
    /// A request, named by the client or, if it gave no name, by the coordinator.
    RequestId,
    "request id"
);
token_id!(
    /// A name that stands in the subjects of one client's answers: its public key, or its user name.
    ClientName,
    "client name"
);
token_id!(
    /// Who holds a key, in the list of a fleet's keys.
    HolderName,
    "name of a key"
);

fn random_suffix() -> String {
    let mut text = uuid::Uuid::new_v4().simple().to_string();
    text.truncate(12);
    text
}

impl WorkerId {
    /// Makes an id that is unique per process start, for logs readable by its stage.
    #[must_use]
    pub fn random(stage: StageIndex) -> Self {
        Self(format!("w{stage}-{}", random_suffix()))
    }
}

impl CoordinatorId {
    /// Makes an id that is unique per process start.
    #[must_use]
    pub fn random() -> Self {
        Self(format!("c-{}", random_suffix()))
    }
}

impl NodeId {
    /// Makes an id that is unique per process start.
    #[must_use]
    pub fn random() -> Self {
        Self(format!("n-{}", random_suffix()))
    }
}

impl RequestId {
    /// Makes an id for a request that came without one.
    #[must_use]
    pub fn random() -> Self {
        Self(format!("r-{}", uuid::Uuid::new_v4().simple()))
    }

    /// Makes the id of a job that came without one: who submitted it knows its number in the
    /// queue, and every coordinator that gets it finds the same name.
    #[must_use]
    pub fn of_job(sequence: u64) -> Self {
        Self(format!("job-{sequence}"))
    }
}

/// Position of a stage in the pipeline, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StageIndex(u16);

impl StageIndex {
    /// The stage that takes token ids.
    pub const FIRST: Self = Self(0);

    /// Wraps a position.
    #[must_use]
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Returns the position as an index into per-stage lists.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the position of the stage after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl std::fmt::Display for StageIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One sequence being generated and its KV cache on every stage; random, so that two coordinators
/// never meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(u64);

impl SessionId {
    /// Makes a fresh id.
    #[must_use]
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4().as_u64_pair().0)
    }

    /// Wraps a number.
    #[must_use]
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl std::fmt::Display for SessionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

macro_rules! counter_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(u32);

        impl $name {
            /// The first value.
            pub const FIRST: Self = Self(0);

            /// Wraps a number.
            #[must_use]
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            /// Returns the number.
            #[must_use]
            pub const fn number(self) -> u32 {
                self.0
            }

            /// Returns the value after this one.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

counter_id!(
    /// Raised at each recovery of a session; messages of an older epoch are refused.
    Epoch
);
counter_id!(
    /// Number of a step within (session, epoch), from 0 without gaps.
    StepNumber
);
