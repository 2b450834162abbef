//! Rows of one or several stacked matrices, in the order in which a graph wants them.

use crate::gguf::{GgmlType, Gguf, TensorInfo};

/// How the rows of a matrix are ordered in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
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
}

impl RowOrder {
    /// The source row of a graph row.
    pub(crate) fn source_row(self, row: usize) -> usize {
        let Self::InterleavedPairs { head_dim, rotary_dim } = self else { return row };
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
    tensor: &'a TensorInfo,
    bytes: &'a [u8],
    n_rows: usize,
    order: RowOrder,
}

/// Matrices of the same type and width, stacked by rows.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    gguf: &'a Gguf,
    parts: Vec<Part<'a>>,
    ggml_type: GgmlType,
    n_cols: usize,
}

impl<'a> Rows<'a> {
    /// Stacks tensors whose type and width are equal and whose shapes are checked.
    pub(crate) fn stack(gguf: &'a Gguf, tensors: &[(&'a TensorInfo, RowOrder)]) -> Self {
        let parts: Vec<_> = tensors
            .iter()
            .map(|(tensor, order)| Part {
                tensor,
                bytes: gguf.data(tensor),
                n_rows: (tensor.n_elements / tensor.dims[0]) as usize,
                order: *order,
            })
            .collect();
        let first = tensors[0].0;
        Self { gguf, parts, ggml_type: first.ggml_type, n_cols: first.dims[0] as usize }
    }

    pub(crate) fn ggml_type(&self) -> GgmlType {
        self.ggml_type
    }

    pub(crate) fn n_cols(&self) -> usize {
        self.n_cols
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.parts.iter().map(|part| part.n_rows).sum()
    }

    /// The bytes of every row, in graph order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a [u8]> + '_ {
        let row_bytes = self.ggml_type.block_bytes() as usize * self.n_cols
            / self.ggml_type.block_len() as usize;
        self.parts.iter().flat_map(move |part| {
            let Part { bytes, n_rows, order, .. } = *part;
            (0..n_rows).map(move |row| &bytes[order.source_row(row) * row_bytes..][..row_bytes])
        })
    }

    /// Gives the mapped pages back to the system.
    pub(crate) fn release(&self) {
        for part in &self.parts {
            self.gguf.release(part.tensor);
        }
    }
}
