//! A part of a message that is too large to stand in the way of others.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::messages::forward::MAX_TEXT_BYTES;
use crate::tensor::bytes_field;
use crate::version::MessageVersion;

/// Most parts of a message.
pub const MAX_PARTS: u32 = 8192;

/// One part of a message. All parts of one message go to the same subject, in order; each is
/// acknowledged on the reply subject that it was published with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Version of this message.
    pub version: MessageVersion,
    /// Random number of the message.
    pub transfer: u64,
    /// Place of the part.
    pub index: u32,
    /// Parts of the message.
    pub n_parts: u32,
    /// Reply subject of the whole message; only in the first part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply: Option<String>,
    /// The bytes of the part.
    #[serde(with = "bytes_field")]
    pub data: Bytes,
}

impl Message for Part {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        check_count("n_parts", self.n_parts as usize, 1..=MAX_PARTS as usize, "1 to 8,192")?;
        let last = self.n_parts as usize - 1;
        check_count("index", self.index as usize, 0..=last, "less than n_parts")?;
        let longest = if self.index == 0 { MAX_TEXT_BYTES } else { 0 };
        let reply = self.reply.as_ref().map_or(0, String::len);
        check_count("reply", reply, 0..=longest, "at most 256 bytes, in the first part")
    }
}
