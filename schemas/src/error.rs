//! The error that crosses the wire: a closed class, a message for people, a hint when to retry.

use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, check_count};

/// Longest message of an error, in bytes: the longest that a runtime gives, and a line in a log.
const MAX_ERROR_BYTES: usize = 4096;

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

impl ErrorClass {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::InvalidRequest,
        Self::Overloaded,
        Self::StageUnavailable,
        Self::UnknownSession,
        Self::StaleEpoch,
        Self::StepGap,
        Self::Preempted,
        Self::VersionMismatch,
        Self::Cancelled,
        Self::Internal,
    ];

    /// Its name, as it stands on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Overloaded => "overloaded",
            Self::StageUnavailable => "stage_unavailable",
            Self::UnknownSession => "unknown_session",
            Self::StaleEpoch => "stale_epoch",
            Self::StepGap => "step_gap",
            Self::Preempted => "preempted",
            Self::VersionMismatch => "version_mismatch",
            Self::Cancelled => "cancelled",
            Self::Internal => "internal",
        }
    }
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
    /// Makes a reply without a retry hint; of a message beyond 4,096 bytes the beginning is
    /// kept.
    #[must_use]
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        let mut message = message.into();
        let mut end = MAX_ERROR_BYTES.min(message.len());
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        Self { class, message, retry_after_ms: None }
    }

    /// Checks what a peer sent.
    pub(crate) fn validate(&self) -> Result<(), CodecError> {
        let bytes = self.message.len();
        check_count("error.message", bytes, 0..=MAX_ERROR_BYTES, "at most 4096 bytes of text")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_named_as_on_the_wire() {
        for class in ErrorClass::ALL {
            let wire = serde_json::to_value(class).expect("a class can be represented");
            assert_eq!(wire, class.as_str());
        }
    }

    #[test]
    fn all_classes_are_all_that_are_read() {
        let unknown = serde_json::from_str::<ErrorClass>("\"none\"").expect_err("no class");
        let names = ErrorClass::ALL.map(|class| format!("`{}`", class.as_str())).join(", ");
        let told = unknown.to_string();
        assert!(told.contains(&format!("expected one of {names} at")), "{told}");
    }

    #[test]
    fn a_long_message_keeps_its_beginning_and_whole_characters() {
        let long = format!("a{}", "\u{e9}".repeat(MAX_ERROR_BYTES));
        let reply = ErrorReply::new(ErrorClass::Internal, long.as_str());
        assert_eq!(reply.message.len(), MAX_ERROR_BYTES - 1);
        assert!(long.starts_with(&reply.message));
        reply.validate().expect("short enough");
        let raw = ErrorReply { message: long, ..reply };
        assert!(matches!(raw.validate(), Err(CodecError::Field { field: "error.message", .. })));
        assert_eq!(ErrorReply::new(ErrorClass::Internal, "").message, "");
    }
}
