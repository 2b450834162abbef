//! A tensor of a model file, whatever the file's format.

use std::ops::Range;

use half::{bf16, f16};

use crate::gguf::GgmlType;
use crate::map::Map;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// In a type that ggml knows too, row by row.
    Ggml(GgmlType),
    /// `value = code * scale` with int8 codes and one f32 scale per row.
    RowScaledI8,
}

impl Encoding {
    /// Bytes of a row, without scales.
    pub(crate) fn row_bytes(self, n_cols: usize) -> usize {
        match self {
            Self::Ggml(ggml_type) => {
                ggml_type.block_bytes() as usize * n_cols / ggml_type.block_len() as usize
            }
            Self::RowScaledI8 => n_cols,
        }
    }

    /// Whether elements are plain floats.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::Ggml(GgmlType::F32 | GgmlType::F16 | GgmlType::BF16))
    }

    /// Replaces `floats` by the values of plain floats; by nothing for other encodings.
    pub(crate) fn decode_floats(self, bytes: &[u8], floats: &mut Vec<f32>) {
        floats.clear();
        let pairs = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self {
            Self::Ggml(GgmlType::F32) => {
                let words = bytes.chunks_exact(4);
                floats.extend(words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
            Self::Ggml(GgmlType::F16) => {
                floats.extend(pairs.map(|b| f16::from_le_bytes(b).to_f32()));
            }
            Self::Ggml(GgmlType::BF16) => {
                floats.extend(pairs.map(|b| bf16::from_le_bytes(b).to_f32()));
            }
            Self::Ggml(_) | Self::RowScaledI8 => {}
        }
    }
}

/// A matrix, or a vector as a matrix of one row, in the memory map of its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) encoding: Encoding,
    pub(crate) n_rows: usize,
    pub(crate) n_cols: usize,
    map: &'a Map,
    start: usize,
    len: usize,
    /// The scale of each row, f32 little-endian; empty for other encodings.
    scales: &'a [u8],
    /// Its name in the model file.
    pub(crate) name: &'a str,
}

impl<'a> Tensor<'a> {
    /// A tensor of `n_rows * row_bytes` bytes at `place` of the map.
    pub(crate) fn new(
        name: &'a str,
        encoding: Encoding,
        (n_rows, n_cols): (usize, usize),
        (map, place): (&'a Map, Range<usize>),
    ) -> Self {
        let (start, len) = (place.start, place.len());
        Self { encoding, n_rows, n_cols, map, start, len, scales: &[], name }
    }

    /// The same tensor with a scale for each row.
    pub(crate) fn with_scales(self, scales: &'a [u8]) -> Self {
        Self { scales, ..self }
    }

    /// The bytes as they are in the file.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        &self.map.bytes()[self.start..self.start + self.len]
    }

    /// The bytes of a row.
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        let row_bytes = self.encoding.row_bytes(self.n_cols);
        &self.bytes()[row * row_bytes..][..row_bytes]
    }

    /// The scale of a row, f32 little-endian; nothing for encodings without.
    pub(crate) fn row_scale(&self, row: usize) -> &'a [u8] {
        self.scales.get(4 * row..4 * row + 4).unwrap_or(&[])
    }

    /// Bytes that the tensor takes in the file.
    pub(crate) fn n_bytes(&self) -> usize {
        self.len + self.scales.len()
    }

    /// Whether both are the same bytes of the same file.
    pub(crate) fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self.bytes(), other.bytes())
    }

    /// Gives the mapped pages back to the system.
    pub(crate) fn release(&self) {
        self.map.release(self.start, self.len);
    }

    /// The values of a small tensor of plain floats; empty for other encodings.
    pub(crate) fn floats(&self) -> Vec<f32> {
        let mut floats = Vec::new();
        self.encoding.decode_floats(self.bytes(), &mut floats);
        floats
    }
}
