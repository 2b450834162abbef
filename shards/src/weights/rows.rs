//! Rows of one or several stacked matrices, in the order in which a graph wants them.

use crate::tensor::{Encoding, Tensor};

/// How the rows of a matrix are ordered in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder<'a> {
    /// As the graph wants them.
    Plain,
    /// Query or key rows of a `llama` GGUF: within a head, the two rows of each rotary pair are
    /// neighbours. The graph rotates the first half of a head against the second.
    ///
    /// **Source**: `LlamaModel.permute` in ggml-org/llama.cpp, `convert_hf_to_gguf.py`.
    InterleavedPairs {
        /// Rows of one head.
        head_dim: usize,
        /// Rows of one head that are rotated, the first ones.
        rotary_dim: usize,
    },
    /// Only these rows of the source.
    Picked(&'a [u32]),
    /// Rows from this one on: a part of a tensor that holds several matrices.
    From(usize),
}

impl RowOrder<'_> {
    /// The source row of a graph row.
    pub(crate) fn source_row(self, row: usize) -> usize {
        let (head_dim, rotary_dim) = match self {
            Self::Plain => return row,
            Self::Picked(rows) => return rows[row] as usize,
            Self::From(first) => return first + row,
            Self::InterleavedPairs { head_dim, rotary_dim } => (head_dim, rotary_dim),
        };
        let (head, index) = (row / head_dim, row % head_dim);
        let half = rotary_dim / 2;
        let source = match index {
            _ if index < half => 2 * index,
            _ if index < rotary_dim => 2 * (index - half) + 1,
            _ => index,
        };
        head * head_dim + source
    }
}

#[derive(Clone, Copy, Debug)]
struct Part<'a> {
    tensor: Tensor<'a>,
    n_rows: usize,
    order: RowOrder<'a>,
}

/// Matrices of the same encoding and width, stacked by rows.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    parts: Vec<Part<'a>>,
    encoding: Encoding,
    n_cols: usize,
}

impl<'a> Rows<'a> {
    /// Stacks the first `n_rows` of each tensor in its order. Encoding and width are equal and
    /// shapes are checked.
    pub(crate) fn stack(tensors: &[(Tensor<'a>, RowOrder<'a>, usize)]) -> Self {
        let parts: Vec<_> =
            tensors.iter().map(|&(tensor, order, n_rows)| Part { tensor, n_rows, order }).collect();
        let first = tensors[0].0;
        Self { parts, encoding: first.encoding, n_cols: first.n_cols }
    }

    pub(crate) fn encoding(&self) -> Encoding {
        self.encoding
    }

    pub(crate) fn n_cols(&self) -> usize {
        self.n_cols
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.parts.iter().map(|part| part.n_rows).sum()
    }

    /// The stacked tensors, each with the bytes of its rows, in graph order.
    pub(crate) fn by_tensor(
        &self,
    ) -> impl Iterator<Item = (Tensor<'a>, impl Iterator<Item = &'a [u8]>)> + '_ {
        self.parts.iter().map(|part| {
            let Part { tensor, n_rows, order } = *part;
            (tensor, (0..n_rows).map(move |row| tensor.row(order.source_row(row))))
        })
    }

    /// The bytes of every row, in graph order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a [u8]> + '_ {
        self.source_rows().map(|(tensor, row)| tensor.row(row))
    }

    /// The stored scale of every row, f32 little-endian, in graph order; nothing where rows have
    /// none.
    pub(crate) fn row_scales(&self) -> impl Iterator<Item = &'a [u8]> + '_ {
        self.source_rows().map(|(tensor, row)| tensor.row_scale(row))
    }

    fn source_rows(&self) -> impl Iterator<Item = (Tensor<'a>, usize)> + '_ {
        self.parts.iter().flat_map(|part| {
            let Part { tensor, n_rows, order } = *part;
            (0..n_rows).map(move |row| (tensor, order.source_row(row)))
        })
    }

    /// Gives the mapped pages back to the system.
    pub(crate) fn release(&self) {
        for part in &self.parts {
            part.tensor.release();
        }
    }
}
