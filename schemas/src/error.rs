//! The error that crosses the wire: a closed class, a message for people, a hint when to retry.

use serde::{Deserialize, Serialize};

/// What kind of failure it was, classified once by the side closest to the cause.
///
/// The consumer alone decides what follows from a class: retry, recover or give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// The request can never succeed as it stands.
    InvalidRequest,
    /// No room now; the same request may succeed later (see [`ErrorReply::retry_after_ms`]).
    Overloaded,
    /// A stage has no live worker, or the worker that held the session is gone.
    StageUnavailable,
    /// The worker does not hold this session.
    UnknownSession,
    /// The message belongs to an epoch that recovery has fenced off.
    StaleEpoch,
    /// A step arrived out of order: messages were lost.
    StepGap,
    /// The worker gave the session's KV memory to another session: replay it when there is room.
    Preempted,
    /// The two sides speak different message versions or hold different shards.
    VersionMismatch,
    /// The client asked for the end of the request.
    Cancelled,
    /// A fault of this software or of its runtime.
    Internal,
}

/// A failure as it is sent to a peer or to a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(deny_unknown_fields)]
#[error("{message}")]
pub struct ErrorReply {
    /// Kind of failure.
    pub class: ErrorClass,
    /// What failed, where, what was expected and what to do; never prompt or generated text.
    pub message: String,
    /// Milliseconds after which a retry is sensible; only with [`ErrorClass::Overloaded`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl ErrorReply {
    /// Makes a reply without a retry hint.
    #[must_use]
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), retry_after_ms: None }
    }
}
