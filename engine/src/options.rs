//! How a stage is to run.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::testing::TestOptions;

/// Which backend runs the stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// The best one that shard and device allow.
    #[default]
    Auto,
    /// OpenVINO with paged attention: micro-batches of many sessions over shared KV blocks.
    Paged,
    /// OpenVINO with one infer request per session.
    Stateful,
    /// OpenVINO with graphs of fixed shapes: for shard sets of the static form, which no other
    /// engine runs.
    Static,
    /// The toy model of [`crate::testing`]; the shard's weights are not read.
    Test,
}

/// Whether a stage computes exactly or fast.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Profile {
    /// f32 throughout and no dynamic quantisation: tokens do not depend on the number of stages,
    /// on the prompt's chunks or on rewinds.
    Exact,
    /// The device's own precision and dynamic quantisation; on the CPU 8-bit KV caches.
    #[default]
    Fast,
}

/// Text that names no engine or profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is none of {expected}")]
pub struct NameError {
    /// The text.
    pub found: String,
    /// What is known.
    pub expected: &'static str,
}

impl EngineKind {
    /// The name used on the command line and in configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Paged => "paged",
            Self::Stateful => "stateful",
            Self::Static => "static",
            Self::Test => "test",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for EngineKind {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        [Self::Auto, Self::Paged, Self::Stateful, Self::Static, Self::Test]
            .into_iter()
            .find(|kind| kind.as_str() == name)
            .ok_or_else(|| NameError {
                found: name.to_owned(),
                expected: "auto, paged, stateful, static, test",
            })
    }
}

impl Profile {
    /// The name used on the command line and in configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Profile {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        [Self::Exact, Self::Fast]
            .into_iter()
            .find(|profile| profile.as_str() == name)
            .ok_or_else(|| NameError { found: name.to_owned(), expected: "exact, fast" })
    }
}

/// Everything about running a stage that is not in the shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// OpenVINO's name of the device: `CPU`, `GPU`, `NPU`, `AUTO`, `HETERO:GPU,CPU` and so on.
    pub device: String,
    /// Exact or fast.
    pub profile: Profile,
    /// Inference threads; `None` leaves the choice to OpenVINO (all cores).
    pub threads: Option<usize>,
    /// Folder for compiled models, so that the next start is quicker. OpenVINO creates it. A file
    /// in it belongs to one shard file, device and set of properties, and is about as large as the
    /// shard; [`crate::open_backend`] puts the files of a model into a folder below.
    pub cache_dir: Option<PathBuf>,
    /// Most open sessions.
    pub max_sessions: usize,
    /// Longest session, in tokens; the model's context length if that is less or this is `None`.
    pub context_limit: Option<usize>,
    /// Most masked positions of a session, in tokens. A step that would pass it is refused with
    /// [`crate::StepError::Bloated`].
    pub max_masked: usize,
    /// Masked positions, in tokens, from which a session counts in
    /// [`crate::KvUse::n_to_compact`], provided that they outnumber the others.
    pub compact_at: usize,
    /// Memory for the KV blocks of the paged backend, in bytes; `None` takes a quarter of what the
    /// machine has free. Blocks that no session can need are not made.
    pub kv_bytes: Option<u64>,
    /// Runs prompt rows as one-token sequences too (paged backend): a longer prefill, most of all
    /// where generated rows run a few at a time ([`Self::same_rows`]), but then later sessions can
    /// also share blocks that decoding wrote.
    pub invariant_prefill: bool,
    /// Keeps the bits of a row independent of the rows that run with it (paged backend). On some
    /// processors one row then costs as much as two, and many rows become several runs; a drafter
    /// can do without.
    pub same_rows: bool,
    /// Properties for OpenVINO, as (key, value). They override the profile's.
    pub properties: Vec<(String, String)>,
    /// What the test engine does besides computing.
    pub test: TestOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: "CPU".to_owned(),
            profile: Profile::default(),
            threads: None,
            cache_dir: None,
            max_sessions: 64,
            context_limit: None,
            max_masked: 4096,
            compact_at: 256,
            kv_bytes: None,
            invariant_prefill: false,
            same_rows: true,
            properties: Vec::new(),
            test: TestOptions::default(),
        }
    }
}

impl EngineOptions {
    /// The longest session, in tokens, for a model of this context length.
    #[must_use]
    pub fn context_limit(&self, context_length: usize) -> usize {
        self.context_limit.map_or(context_length, |limit| limit.min(context_length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        let kinds = [EngineKind::Auto, EngineKind::Paged, EngineKind::Stateful, EngineKind::Static];
        for kind in kinds.into_iter().chain([EngineKind::Test]) {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for profile in [Profile::Exact, Profile::Fast] {
            assert_eq!(profile.to_string().parse(), Ok(profile));
        }
        let wrong = "quick".parse::<Profile>().unwrap_err();
        assert_eq!(wrong.to_string(), "\"quick\" is none of exact, fast");
        assert!("gpu".parse::<EngineKind>().is_err());
    }
}
