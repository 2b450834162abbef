//! Why nothing could be measured.

use std::time::Duration;

use stagebus_bus::RequestError;
use stagebus_schemas::error::ErrorReply;

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// Nobody answered.
    #[error(
        "no node answered within {waited:?}: start `stagebus node --model MODEL` on every machine that \
         may take part, with the same broker"
    )]
    Nobody {
        /// How long it was waited.
        waited: Duration,
    },
    /// Fewer than asked for answered.
    #[error("{found} of {expected} nodes answered within {waited:?}: {names}")]
    TooFew {
        /// Nodes asked for.
        expected: usize,
        /// Nodes that answered.
        found: usize,
        /// Their names.
        names: String,
        /// How long it was waited.
        waited: Duration,
    },
    /// A question could not be asked, or was not answered.
    #[error("node {name} is not there, or does not answer")]
    Unanswered {
        /// The node.
        name: String,
        /// What happened.
        #[source]
        source: RequestError,
    },
    /// A node says that it cannot.
    #[error("node {name}: {source}")]
    Failed {
        /// The node.
        name: String,
        /// What it says.
        source: ErrorReply,
    },
    /// An answer that does not fit the question.
    #[error("node {name} gave an answer to another question than {asked}")]
    OtherAnswer {
        /// The node.
        name: String,
        /// What was asked.
        asked: &'static str,
    },
    /// A measurement says something that cannot be.
    #[error("node {name} measured stage {stage} of a probe with {n_stages}")]
    NoSuchStage {
        /// The node.
        name: String,
        /// The stage.
        stage: u32,
        /// Stages of the probe.
        n_stages: usize,
    },
}
