//! A tensor on the wire: dtype, shape and little-endian bytes.

mod half;
mod int8;

use ::half::{bf16, f16};
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
    /// IEEE half precision; rounded so that bfloat16 of it is bfloat16 of the value itself.
    F16,
    /// bfloat16.
    Bf16,
    /// Whole numbers of 8 bits with a scale for every [`INT8_GROUP`]; the largest elements of a row
    /// ([`int8_outliers`] of them) are kept beside in single precision.
    Int8,
}

/// Elements of a row that share a scale with [`Dtype::Int8`].
pub const INT8_GROUP: usize = 32;

/// One element of so many of a row is kept in single precision with [`Dtype::Int8`].
const INT8_PER_OUTLIER: usize = 128;

/// Elements of a row of `hidden_dim` that [`Dtype::Int8`] keeps in single precision.
#[must_use]
pub const fn int8_outliers(hidden_dim: usize) -> usize {
    hidden_dim.div_ceil(INT8_PER_OUTLIER)
}

impl Dtype {
    /// Bytes of a row of `hidden_dim` elements.
    #[must_use]
    pub const fn row_bytes(self, hidden_dim: usize) -> usize {
        match self {
            Self::F32 => hidden_dim.saturating_mul(4),
            Self::F16 | Self::Bf16 => hidden_dim.saturating_mul(2),
            // A scale is a bfloat16; an outlier is its place in four bytes and itself in four.
            Self::Int8 => hidden_dim
                .saturating_add(2 * hidden_dim.div_ceil(INT8_GROUP))
                .saturating_add(8 * int8_outliers(hidden_dim)),
        }
    }

    /// The bytes of rows.
    ///
    /// **Shape**: `[n_rows, hidden_dim]`, row-major.
    #[must_use]
    pub fn encode(self, hidden: &[f32], hidden_dim: usize) -> Vec<u8> {
        let rows = hidden.chunks(hidden_dim.max(1));
        let mut bytes = Vec::with_capacity(rows.len() * self.row_bytes(hidden_dim));
        match self {
            Self::F32 => hidden.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
            Self::F16 => {
                let half = |x: &f32| half::from_f32(*x).to_le_bytes();
                hidden.iter().for_each(|x| bytes.extend_from_slice(&half(x)));
            }
            Self::Bf16 => {
                let half = |x: &f32| bf16::from_f32(*x).to_le_bytes();
                hidden.iter().for_each(|x| bytes.extend_from_slice(&half(x)));
            }
            Self::Int8 => rows.for_each(|row| int8::encode(row, &mut bytes)),
        }
        bytes
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
    /// Returns `n_rows` rows from row `first` on. Rows that the tensor does not hold are left out.
    ///
    /// **Shape**: `[n_rows, hidden_dim]`, row-major.
    #[must_use]
    pub fn rows(&self, first: usize, n_rows: usize) -> Vec<f32> {
        let hidden_dim = self.hidden_dim as usize;
        let row_bytes = self.dtype.row_bytes(hidden_dim);
        let end = first.saturating_add(n_rows).saturating_mul(row_bytes).min(self.data.len());
        let bytes = self.data.get(first.saturating_mul(row_bytes)..end).unwrap_or_default();
        match self.dtype {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => {
                bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).into()).collect()
            }
            Dtype::Bf16 => {
                bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).into()).collect()
            }
            Dtype::Int8 => {
                let mut rows = Vec::with_capacity(bytes.len());
                let whole = bytes.chunks_exact(row_bytes.max(1));
                whole.for_each(|row| int8::decode(row, hidden_dim, &mut rows));
                rows
            }
        }
    }

    /// Checks that the bytes match dtype and shape.
    ///
    /// # Errors
    /// [`TensorError::TooLarge`] or [`TensorError::Length`].
    pub fn validate(&self) -> Result<(), TensorError> {
        let (n_rows, hidden_dim) = (self.n_rows, self.hidden_dim);
        let expected = self
            .dtype
            .row_bytes(hidden_dim as usize)
            .checked_mul(n_rows as usize)
            .filter(|n| *n <= MAX_TENSOR_BYTES)
            .ok_or(TensorError::TooLarge { n_rows, hidden_dim })?;
        if self.data.len() != expected {
            let found = self.data.len();
            return Err(TensorError::Length { n_rows, hidden_dim, expected, found });
        }
        Ok(())
    }
}

pub(crate) mod bytes_field {
    //! MessagePack `bin` for [`bytes::Bytes`]; an array of integers, half as large again and a
    //! hundred times as slow, is refused.

    use std::fmt;

    use bytes::Bytes;
    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(data: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(data)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dtype_carries_rows_in_place() {
        let hidden = [0.5, -2.0, 3.25, 1024.0, -0.0, 7.0];
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Int8] {
            let data = dtype.encode(&hidden, 2).into();
            let tensor = Tensor { dtype, n_rows: 3, hidden_dim: 2, data };
            tensor.validate().expect("length fits");
            // Eight bits hold one of two elements as it is, and the other beside it as well as alone.
            let whole = tensor.rows(0, 3);
            if dtype != Dtype::Int8 {
                assert_eq!(whole, hidden, "{dtype:?}");
            }
            for (x, found) in hidden.iter().zip(&whole) {
                assert!((x - found).abs() <= x.abs() / 100.0, "{dtype:?}: {x} became {found}");
            }
            for first in 0..3 {
                for n_rows in 0..=3 - first {
                    let expected = &whole[first * 2..(first + n_rows) * 2];
                    assert_eq!(tensor.rows(first, n_rows), expected, "{dtype:?}");
                }
            }
            assert_eq!(tensor.rows(2, 9), &whole[4..]);
            assert_eq!(tensor.rows(9, 1), Vec::<f32>::new());
        }
    }
}
