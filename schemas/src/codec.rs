//! Encoding and decoding: named MessagePack inside, JSON or MessagePack outside.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::messages::control::{Control, ControlReply};
use crate::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement};
use crate::messages::forward::{Forward, MAX_ROWS, MAX_STEPS};
use crate::messages::head::Head;
use crate::tensor::TensorError;
use crate::version::MessageVersion;

/// Largest message that is decoded, in bytes: the largest that the broker passes by our
/// configuration is 8 MiB, a custom one may raise it up to the broker's own ceiling of 64 MiB.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Why a message could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The message is larger than any valid one.
    #[error("message of {bytes} bytes, at most {limit} are accepted")]
    TooLarge {
        /// Size found.
        bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// The sender speaks another version.
    #[error("message version {found}, this build speaks {expected}")]
    Version {
        /// Version found.
        found: MessageVersion,
        /// Version of this build.
        expected: MessageVersion,
    },
    /// Bytes follow the message.
    #[error("{bytes} bytes follow the message")]
    Trailing {
        /// Number of bytes.
        bytes: usize,
    },
    /// Not valid MessagePack for the type.
    #[error("not a valid MessagePack message")]
    MessagePack(#[from] rmp_serde::decode::Error),
    /// The message could not be written as MessagePack.
    #[error("message cannot be encoded as MessagePack")]
    Encode(#[from] rmp_serde::encode::Error),
    /// Not valid JSON for the type.
    #[error("not a valid JSON message: {0}")]
    Json(#[from] serde_json::Error),
    /// A tensor does not match its shape.
    #[error("tensor is not valid")]
    Tensor(#[from] TensorError),
    /// A field breaks a rule of the message.
    #[error("{field} is {found}, expected {expected}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: u64,
        /// What is allowed.
        expected: &'static str,
    },
}

/// An internal message: it has a version and rules beyond its types.
pub trait Message: Serialize + DeserializeOwned {
    /// Version that the message carries.
    fn version(&self) -> MessageVersion;

    /// Checks the rules that types do not express.
    ///
    /// # Errors
    /// [`CodecError::Field`] or [`CodecError::Tensor`].
    fn validate(&self) -> Result<(), CodecError> {
        Ok(())
    }
}

/// Encodes an internal message as MessagePack with named fields.
///
/// # Errors
/// [`CodecError::Encode`]; [`CodecError::TooLarge`] above [`MAX_MESSAGE_BYTES`].
#[expect(clippy::disallowed_methods, reason = "this module is the owner of the codec")]
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, CodecError> {
    let bytes = rmp_serde::to_vec_named(message)?;
    check_size(bytes.len())?;
    Ok(bytes)
}

/// Decodes an internal message and checks its size, version, rules and end.
///
/// # Errors
/// [`CodecError::TooLarge`], [`CodecError::MessagePack`], [`CodecError::Trailing`],
/// [`CodecError::Version`], and what [`Message::validate`] returns.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, CodecError> {
    check_size(bytes.len())?;
    let message: M = from_message_pack(bytes)?;
    if message.version() != MessageVersion::CURRENT {
        let (found, expected) = (message.version(), MessageVersion::CURRENT);
        return Err(CodecError::Version { found, expected });
    }
    message.validate()?;
    Ok(message)
}

fn check_size(bytes: usize) -> Result<(), CodecError> {
    if bytes > MAX_MESSAGE_BYTES {
        return Err(CodecError::TooLarge { bytes, limit: MAX_MESSAGE_BYTES });
    }
    Ok(())
}

fn from_message_pack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let mut deserializer = rmp_serde::Deserializer::new(std::io::Cursor::new(bytes));
    let value = T::deserialize(&mut deserializer)?;
    let read = usize::try_from(deserializer.position()).unwrap_or(usize::MAX);
    match bytes.len().saturating_sub(read) {
        0 => Ok(value),
        bytes => Err(CodecError::Trailing { bytes }),
    }
}

/// Encoding of a public message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentType {
    /// `application/json`.
    Json,
    /// `application/msgpack`.
    MessagePack,
}

impl ContentType {
    /// Tells the encoding by the header if there is one, else by the first byte: JSON objects
    /// start with `{` or white space, MessagePack maps do not.
    #[must_use]
    pub fn detect(header: Option<&str>, bytes: &[u8]) -> Self {
        match header {
            Some(text) if text.to_ascii_lowercase().contains("msgpack") => Self::MessagePack,
            Some(text) if text.to_ascii_lowercase().contains("json") => Self::Json,
            _ => match bytes.first() {
                Some(0x80..=0x8f | 0xde | 0xdf) => Self::MessagePack,
                _ => Self::Json,
            },
        }
    }

    /// Text of the `Content-Type` header.
    #[must_use]
    pub const fn header(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::MessagePack => "application/msgpack",
        }
    }
}

/// Decodes a public message.
///
/// # Errors
/// [`CodecError::TooLarge`], [`CodecError::Json`], [`CodecError::MessagePack`],
/// [`CodecError::Trailing`].
pub fn decode_public<T: DeserializeOwned>(
    content: ContentType,
    bytes: &[u8],
) -> Result<T, CodecError> {
    check_size(bytes.len())?;
    match content {
        ContentType::Json => Ok(serde_json::from_slice(bytes)?),
        ContentType::MessagePack => from_message_pack(bytes),
    }
}

/// Encodes a public message.
///
/// # Errors
/// [`CodecError::Json`] or [`CodecError::Encode`].
#[expect(clippy::disallowed_methods, reason = "this module is the owner of the codec")]
pub fn encode_public<T: Serialize>(content: ContentType, value: &T) -> Result<Vec<u8>, CodecError> {
    match content {
        ContentType::Json => Ok(serde_json::to_vec(value)?),
        ContentType::MessagePack => Ok(rmp_serde::to_vec_named(value)?),
    }
}

impl Message for Forward {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        let limit = |field, found: usize, expected| CodecError::Field {
            field,
            found: found as u64,
            expected,
        };
        if self.steps.is_empty() || self.steps.len() > MAX_STEPS {
            return Err(limit("steps", self.steps.len(), "1 to 256 steps"));
        }
        let mut n_rows = 0;
        for step in &self.steps {
            let rows = step.tokens.len();
            if rows == 0 {
                return Err(limit("tokens", rows, "at least one row per step"));
            }
            let ascending = step.wanted.windows(2).all(|pair| pair[0] < pair[1]);
            let inside = step.wanted.last().is_none_or(|last| (*last as usize) < rows);
            if !ascending || !inside {
                return Err(limit("wanted", step.wanted.len(), "ascending rows of the step"));
            }
            if u32::try_from(rows).ok().and_then(|n| step.start_pos.checked_add(n)).is_none() {
                return Err(limit("start_pos", step.start_pos as usize, "a position below 2^32"));
            }
            n_rows += rows;
        }
        if n_rows > MAX_ROWS {
            return Err(limit("rows", n_rows, "at most 8192 rows"));
        }
        if let Some(hidden) = &self.hidden {
            hidden.validate()?;
            if hidden.n_rows as usize != n_rows {
                let found = hidden.n_rows as usize;
                return Err(limit("hidden.n_rows", found, "one row per token of the steps"));
            }
        }
        Ok(())
    }
}

macro_rules! plain_message {
    ($($name:ident),*) => {
        $(impl Message for $name {
            fn version(&self) -> MessageVersion {
                self.version
            }
        })*
    };
}

plain_message!(Head, Control, ControlReply, WorkerAnnouncement, CoordinatorAnnouncement);
