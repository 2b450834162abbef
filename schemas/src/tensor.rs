//! A tensor on the wire: dtype, shape and little-endian bytes.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Largest tensor that is accepted, in bytes: above any step that fits a broker message.
pub const MAX_TENSOR_BYTES: usize = 64 << 20;

/// Number format of the hidden states on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Hidden states of the rows of one message.
///
/// **Shape**: `[n_rows, hidden_dim]`, row-major, little-endian.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Number format.
    pub dtype: Dtype,
    /// Number of rows.
    pub n_rows: u32,
    /// Elements per row.
    pub hidden_dim: u32,
    /// The elements.
    #[serde(with = "bytes_field")]
    pub data: Bytes,
}

/// Why a tensor is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// More bytes than any valid step can hold.
    #[error("tensor of {n_rows} x {hidden_dim} elements exceeds {MAX_TENSOR_BYTES} bytes")]
    TooLarge {
        /// Rows claimed.
        n_rows: u32,
        /// Elements per row claimed.
        hidden_dim: u32,
    },
    /// The bytes do not match the shape.
    #[error("tensor of {n_rows} x {hidden_dim} elements needs {expected} bytes, found {found}")]
    Length {
        /// Rows claimed.
        n_rows: u32,
        /// Elements per row claimed.
        hidden_dim: u32,
        /// Bytes that the shape needs.
        expected: usize,
        /// Bytes present.
        found: usize,
    },
}

impl Tensor {
    /// Checks that the bytes match dtype and shape.
    ///
    /// # Errors
    /// [`TensorError::TooLarge`] or [`TensorError::Length`].
    pub fn validate(&self) -> Result<(), TensorError> {
        let (n_rows, hidden_dim) = (self.n_rows, self.hidden_dim);
        let expected = u64::from(n_rows)
            .checked_mul(u64::from(hidden_dim))
            .and_then(|n| n.checked_mul(self.dtype.size_bytes() as u64))
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n <= MAX_TENSOR_BYTES)
            .ok_or(TensorError::TooLarge { n_rows, hidden_dim })?;
        if self.data.len() != expected {
            let found = self.data.len();
            return Err(TensorError::Length { n_rows, hidden_dim, expected, found });
        }
        Ok(())
    }
}

mod bytes_field {
    //! MessagePack `bin` for [`bytes::Bytes`]; an array of integers, half as large again and a
    //! hundred times as slow, is refused.

    use std::fmt;

    use bytes::Bytes;
    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(data: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(data)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Bytes, D::Error> {
        deserializer.deserialize_byte_buf(BytesVisitor)
    }

    struct BytesVisitor;

    impl Visitor<'_> for BytesVisitor {
        type Value = Bytes;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Bytes, E> {
            Ok(Bytes::copy_from_slice(bytes))
        }

        fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
            Ok(bytes.into())
        }
    }
}
