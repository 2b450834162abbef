//! Encoding and decoding: named MessagePack inside, JSON or MessagePack outside.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cloud_events::EnvelopeError;
use crate::error::ErrorClass;
use crate::tensor::TensorError;
use crate::version::MessageVersion;

/// Largest message that is decoded, in bytes: the largest that the broker passes by our
/// configuration is 8 MiB, a custom one may raise it up to the broker's own ceiling of 64 MiB.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Deepest nesting that is followed: more than twice that of any message, and far below what a
/// thread's stack bears.
const MAX_DEPTH: usize = 32;

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
    /// The fields are a list without names, so that swapped ones would go unseen.
    #[error("the message is a list, expected a map of named fields")]
    Positional,
    /// Bytes follow the message.
    #[error("{bytes} bytes follow the message")]
    Trailing {
        /// Number of bytes.
        bytes: usize,
    },
    /// Not valid MessagePack for the type.
    #[error("not a valid MessagePack message: {0}")]
    MessagePack(#[from] rmp_serde::decode::Error),
    /// The message could not be written as MessagePack.
    #[error("message cannot be encoded as MessagePack")]
    Encode(#[from] rmp_serde::encode::Error),
    /// Not valid JSON for the type.
    #[error("not a valid JSON message: {0}")]
    Json(#[from] serde_json::Error),
    /// The envelope of a public message is not understood.
    #[error(transparent)]
    CloudEvent(#[from] EnvelopeError),
    /// A tensor does not match its shape.
    #[error("tensor is not valid")]
    Tensor(#[from] TensorError),
    /// A number is none (NaN, infinite), or has no meaning in its field.
    #[error("{field} is no number of its kind, expected {expected}")]
    Number {
        /// Name of the field.
        field: &'static str,
        /// What is allowed.
        expected: &'static str,
    },
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

impl CodecError {
    /// Classifies the failure to read a peer's or a client's message.
    #[must_use]
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Version { .. } => ErrorClass::VersionMismatch,
            Self::Encode(_) => ErrorClass::Internal,
            Self::TooLarge { .. }
            | Self::Positional
            | Self::Trailing { .. }
            | Self::MessagePack(_)
            | Self::Json(_)
            | Self::CloudEvent(_)
            | Self::Tensor(_)
            | Self::Number { .. }
            | Self::Field { .. } => ErrorClass::InvalidRequest,
        }
    }
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
/// A message of another version is told as that, whatever its other fields are. A tensor is
/// copied once, from the message into its own buffer.
///
/// # Errors
/// [`CodecError::TooLarge`], [`CodecError::Positional`], [`CodecError::MessagePack`],
/// [`CodecError::Trailing`], [`CodecError::Version`], and what [`Message::validate`] returns.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, CodecError> {
    check_size(bytes.len())?;
    check_named(ContentType::MessagePack, bytes)?;
    let message: M = match from_message_pack(bytes) {
        Ok(message) => message,
        Err(error) => return Err(other_version(bytes).unwrap_or(error)),
    };
    if message.version() != MessageVersion::CURRENT {
        return Err(version_mismatch(message.version()));
    }
    message.validate()?;
    Ok(message)
}

/// Looks for the version alone in a message whose other fields are not understood.
fn other_version(bytes: &[u8]) -> Option<CodecError> {
    #[derive(Deserialize)]
    struct VersionOnly {
        version: MessageVersion,
    }
    let found = VersionOnly::deserialize(&mut deserializer(bytes)).ok()?.version;
    (found != MessageVersion::CURRENT).then(|| version_mismatch(found))
}

const fn version_mismatch(found: MessageVersion) -> CodecError {
    CodecError::Version { found, expected: MessageVersion::CURRENT }
}

/// Checks a count of a message against its limits.
pub(crate) fn check_count(
    field: &'static str,
    found: usize,
    allowed: std::ops::RangeInclusive<usize>,
    expected: &'static str,
) -> Result<(), CodecError> {
    if allowed.contains(&found) {
        return Ok(());
    }
    Err(CodecError::Field { field, found: found as u64, expected })
}

pub(crate) fn check_size(bytes: usize) -> Result<(), CodecError> {
    if bytes > MAX_MESSAGE_BYTES {
        return Err(CodecError::TooLarge { bytes, limit: MAX_MESSAGE_BYTES });
    }
    Ok(())
}

/// Refuses a list where a map is due; the decoders would take its entries for the fields in order.
pub(crate) fn check_named(content: ContentType, bytes: &[u8]) -> Result<(), CodecError> {
    let is_list = match content {
        ContentType::Json => bytes.trim_ascii_start().first() == Some(&b'['),
        ContentType::MessagePack => matches!(bytes.first(), Some(0x90..=0x9f | 0xdc | 0xdd)),
    };
    if is_list { Err(CodecError::Positional) } else { Ok(()) }
}

type SliceDeserializer<'a> = rmp_serde::Deserializer<rmp_serde::decode::ReadRefReader<'a, [u8]>>;

fn deserializer(bytes: &[u8]) -> SliceDeserializer<'_> {
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(MAX_DEPTH);
    deserializer
}

fn from_message_pack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let mut deserializer = deserializer(bytes);
    let value = T::deserialize(&mut deserializer)?;
    // Reading a number fails on its first byte only if there is none: nothing follows the message.
    match u8::deserialize(&mut deserializer) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(_)) => Ok(value),
        Ok(_) | Err(_) => Err(CodecError::Trailing { bytes: trailing::<T>(bytes) }),
    }
}

/// Counts the bytes after a message by reading it again through a reader that tells its position.
fn trailing<T: DeserializeOwned>(bytes: &[u8]) -> usize {
    let mut deserializer = rmp_serde::Deserializer::new(std::io::Cursor::new(bytes));
    drop(T::deserialize(&mut deserializer));
    let read = usize::try_from(deserializer.position()).unwrap_or(usize::MAX);
    bytes.len().saturating_sub(read)
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
/// [`CodecError::TooLarge`], [`CodecError::Positional`], [`CodecError::Json`],
/// [`CodecError::MessagePack`], [`CodecError::Trailing`].
pub fn decode_public<T: DeserializeOwned>(
    content: ContentType,
    bytes: &[u8],
) -> Result<T, CodecError> {
    check_size(bytes.len())?;
    check_named(content, bytes)?;
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
