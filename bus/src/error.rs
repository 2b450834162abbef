//! Errors, one enum per operation. Addresses in them never hold a password.

use std::path::PathBuf;
use std::time::Duration;

use stagebus_schemas::codec::CodecError;

use crate::settings::SeedError;
use crate::violation::Violation;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// What a broker on another machine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// Encryption.
    Tls,
    /// Credentials.
    Credentials,
}

impl std::fmt::Display for Requirement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tls => "TLS (a tls:// address or tls required)",
            Self::Credentials => "credentials (an nkey, a user and password, or a token)",
        })
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// No address was given.
    #[error("no broker address was given, expected one like nats://127.0.0.1:4222")]
    NoUrl,
    /// An address cannot be read.
    #[error("broker address {url:?} is not valid, expected one like nats://127.0.0.1:4222")]
    Url {
        /// The address without its password.
        url: String,
        /// Why.
        #[source]
        source: Source,
    },
    /// An address has a scheme that is not spoken here.
    #[error("broker address {url:?} has scheme {scheme:?}, expected nats or tls")]
    Scheme {
        /// The address without its password.
        url: String,
        /// The scheme.
        scheme: String,
    },
    /// A host other than this machine, without what that needs.
    #[error(
        "broker {url} is not on this machine and needs {missing}; configure it under [broker], \
         see docs/security.md"
    )]
    Insecure {
        /// The address without its password.
        url: String,
        /// What is missing.
        missing: Requirement,
    },
    /// A certificate or key file cannot be opened.
    #[error("cannot read TLS file {path}", path = path.display())]
    TlsFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Nobody answers there.
    #[error(
        "cannot reach a broker at {url}; start one with `nats-server -c nats.conf` or correct the \
         address"
    )]
    Unreachable {
        /// The addresses without passwords.
        url: String,
        /// Why the last attempt failed.
        #[source]
        source: Source,
    },
    /// Something accepts the connection but does not answer.
    #[error("broker at {url} gave no answer within {timeout:?}; is it a NATS server, and is it up")]
    TimedOut {
        /// The addresses without passwords.
        url: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The broker refused our identity.
    #[error("broker at {url} refused {offered}; check the credentials of this role")]
    AuthRefused {
        /// The addresses without passwords.
        url: String,
        /// Kind of credentials that was offered.
        offered: &'static str,
        /// The refusal.
        #[source]
        source: Source,
    },
    /// The nkey seed is not one.
    #[error("nkey seed for {url} is not valid, expected the text that starts with SU")]
    NkeySeed {
        /// The addresses without passwords.
        url: String,
        /// Why.
        #[source]
        source: Source,
    },
    /// TLS failed: an unknown authority, a wrong host name, a refused client certificate.
    #[error("TLS with the broker at {url} failed; check the CA, the host name and the certificate")]
    Tls {
        /// The addresses without passwords.
        url: String,
        /// Why.
        #[source]
        source: Source,
    },
}

impl BusError {
    /// Whether the reason is who we are, or what a safe connection needs: trying again is in vain
    /// until somebody changes keys or configuration.
    #[must_use]
    pub fn is_access_refusal(&self) -> bool {
        match self {
            Self::Insecure { .. }
            | Self::TlsFile { .. }
            | Self::AuthRefused { .. }
            | Self::NkeySeed { .. }
            | Self::Tls { .. } => true,
            Self::NoUrl
            | Self::Url { .. }
            | Self::Scheme { .. }
            | Self::Unreachable { .. }
            | Self::TimedOut { .. } => false,
        }
    }
}

/// Whether an error, or what caused it, is a refusal: an unsafe connection, credentials that the
/// broker does not take or that cannot be read, or a forbidden subject.
#[must_use]
pub fn is_access_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut chain = std::iter::successors(Some(error), |error| error.source());
    chain.any(|error| {
        error.is::<Violation>()
            || error.is::<SeedError>()
            || error.downcast_ref().is_some_and(BusError::is_access_refusal)
    })
}

/// Why a message was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The broker accepts no message of this size; nothing was sent.
    #[error("message of {bytes} bytes exceeds the broker's limit of {limit}")]
    PayloadTooLarge {
        /// Size of payload and headers.
        bytes: usize,
        /// The broker's limit.
        limit: usize,
    },
    /// The connection was away, or its queue full, for too long.
    #[error("no connection to the broker within {waited:?}")]
    Disconnected {
        /// How long was waited.
        waited: Duration,
    },
    /// The connection was drained.
    #[error("connection to the broker is closed")]
    Closed,
    /// Too many large messages wait for their turn.
    #[error("large messages wait already, {capacity_bytes} bytes are the most")]
    BulkFull {
        /// Bytes that may wait.
        capacity_bytes: u32,
    },
    /// The subject is not one.
    #[error("subject {subject:?} is not valid")]
    Subject {
        /// The subject.
        subject: String,
    },
    /// The message asked for no answer.
    #[error("message on {subject:?} has no reply subject")]
    NoReply {
        /// Subject of the message.
        subject: String,
    },
    /// The message cannot be encoded.
    #[error("message cannot be encoded")]
    Encode(#[from] CodecError),
}

/// Why a subscription was not made or ended.
#[derive(Debug, thiserror::Error)]
pub enum SubscribeError {
    /// The connection was away, or its queue full, for too long.
    #[error("no connection to the broker within {waited:?}")]
    Disconnected {
        /// How long was waited.
        waited: Duration,
    },
    /// The connection was drained.
    #[error("connection to the broker is closed")]
    Closed,
    /// The subject or the queue group is not one.
    #[error("subject {subject:?} is not valid")]
    Subject {
        /// The subject.
        subject: String,
    },
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Nobody listens there; known in a fraction of a millisecond.
    #[error("nobody listens on {subject}")]
    NoResponders {
        /// Subject of the request.
        subject: String,
    },
    /// Somebody listens and did not answer in time, or the answer was lost.
    #[error("no answer on {subject} within {timeout:?}")]
    Timeout {
        /// Subject of the request.
        subject: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The broker's permissions forbid the question or the answer.
    #[error("question on {subject} is not permitted")]
    Forbidden {
        /// Subject of the request.
        subject: String,
        /// What is forbidden.
        #[source]
        violation: Violation,
    },
    /// The answer is not what was expected.
    #[error("answer on {subject} is not valid")]
    Decode {
        /// Subject of the request.
        subject: String,
        /// Why.
        #[source]
        source: CodecError,
    },
    /// The request was not sent.
    #[error("request was not sent")]
    Publish(#[from] PublishError),
}

/// Why an event stream ended early.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// No coordinator listens on the prompt subject.
    #[error("nobody listens on {subject}; is a coordinator of this model running")]
    NoResponders {
        /// Subject of the request.
        subject: String,
    },
    /// The broker's permissions forbid the request or its answers.
    #[error("request on {subject} is not permitted")]
    Forbidden {
        /// Subject of the request.
        subject: String,
        /// What is forbidden.
        #[source]
        violation: Violation,
    },
    /// Nothing came for too long.
    #[error("no event for {subject} within {timeout:?}")]
    Idle {
        /// Subject of the request.
        subject: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The coordinator of a request that runs says something at least every second; it has not for
    /// far longer. It, the broker or the way to it is gone: the request must be sent again.
    #[error("nothing was heard for {timeout:?}: the coordinator of the request is gone")]
    CoordinatorGone {
        /// How long was waited.
        timeout: Duration,
    },
    /// Events were lost between the coordinator and us.
    #[error("token event {expected} is missing, {found} came")]
    Gap {
        /// Number that was due.
        expected: u64,
        /// Number that came.
        found: u64,
    },
    /// The stream ended without `done` or `error`.
    #[error("event stream for {subject} ended without a final event")]
    Unfinished {
        /// Subject of the request.
        subject: String,
    },
    /// An event is not valid.
    #[error("event is not valid")]
    Decode(#[from] CodecError),
    /// The connection was drained.
    #[error("connection to the broker is closed")]
    Closed,
    /// The reply subject cannot be subscribed to.
    #[error("reply subject cannot be subscribed to")]
    Subscribe(#[from] SubscribeError),
    /// The request was not sent.
    #[error("request was not sent")]
    Publish(#[from] PublishError),
}

/// Why a connection was not flushed or closed in an orderly way.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// It took too long; messages may be unsent.
    #[error("broker connection was not flushed within {timeout:?}")]
    Timeout {
        /// How long was waited.
        timeout: Duration,
    },
    /// The connection is already closed.
    #[error("connection to the broker is closed")]
    Closed,
}
