//! Finds the tensors of a `llama` GGUF and checks their shapes.

use super::config::LlamaConfig;
use crate::gguf::{GgmlType, Gguf, TensorInfo};
use crate::manifest::WeightMode;
use crate::shard::ShardError;
use crate::weights::layout;
use crate::weights::rows::RowOrder;

/// A matrix that inputs are multiplied with, and its bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection<'a> {
    pub(crate) weight: &'a TensorInfo,
    pub(crate) bias: Option<&'a TensorInfo>,
    pub(crate) order: RowOrder,
    pub(crate) n_rows: usize,
}

/// The tensors of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerTensors<'a> {
    pub(crate) attention_norm: &'a TensorInfo,
    pub(crate) q: Projection<'a>,
    pub(crate) k: Projection<'a>,
    pub(crate) v: Projection<'a>,
    pub(crate) output: Projection<'a>,
    pub(crate) ffn_norm: &'a TensorInfo,
    pub(crate) gate: Projection<'a>,
    pub(crate) up: Projection<'a>,
    pub(crate) down: Projection<'a>,
}

/// All tensors of a model.
#[derive(Clone, Debug)]
pub(crate) struct LlamaTensors<'a> {
    pub(crate) embedding: &'a TensorInfo,
    pub(crate) layers: Vec<LayerTensors<'a>>,
    pub(crate) output_norm: &'a TensorInfo,
    /// The head's matrix; the embedding table if the model has none of its own.
    pub(crate) head: Projection<'a>,
    /// Divisors of the rotary frequencies (llama3 scaling), f32 `[rotary_dim / 2]`.
    pub(crate) rope_divisors: Option<&'a TensorInfo>,
}

impl<'a> LlamaTensors<'a> {
    /// Finds and checks every tensor.
    ///
    /// # Errors
    /// [`ShardError::MissingTensor`], [`ShardError::TensorShape`] or [`ShardError::TensorType`].
    pub(crate) fn find(gguf: &'a Gguf, config: &LlamaConfig) -> Result<Self, ShardError> {
        let find = Finder { gguf };
        let dims = &config.dims;
        let embedding = find.matrix("token_embd.weight", dims.vocab_size, dims.hidden_dim)?;
        let layers =
            (0..dims.n_layers).map(|layer| find.layer(layer, config)).collect::<Result<_, _>>()?;
        let output_norm = find.vector("output_norm.weight", dims.hidden_dim)?;
        let head = match gguf.tensor("output.weight") {
            Some(_) => find.projection("output", dims.vocab_size, dims.hidden_dim)?,
            None => Projection {
                weight: embedding,
                bias: None,
                order: RowOrder::Plain,
                n_rows: dims.vocab_size,
            },
        };
        let rope_divisors = find.optional_vector("rope_freqs.weight", config.rotary_dim / 2)?;
        Ok(Self { embedding, layers, output_norm, head, rope_divisors })
    }
}

struct Finder<'a> {
    gguf: &'a Gguf,
}

impl<'a> Finder<'a> {
    fn layer(&self, layer: usize, config: &LlamaConfig) -> Result<LayerTensors<'a>, ShardError> {
        let dims = &config.dims;
        let (hidden, ffn) = (dims.hidden_dim, config.ffn_dim);
        let (q_rows, kv_rows) = (dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim);
        let order =
            RowOrder::InterleavedPairs { head_dim: dims.head_dim, rotary_dim: config.rotary_dim };
        let name = |part: &str| format!("blk.{layer}.{part}");
        let projection =
            |part: &str, n_rows: usize, n_cols: usize| self.projection(&name(part), n_rows, n_cols);
        Ok(LayerTensors {
            attention_norm: self.vector(&name("attn_norm.weight"), hidden)?,
            q: Projection { order, ..projection("attn_q", q_rows, hidden)? },
            k: Projection { order, ..projection("attn_k", kv_rows, hidden)? },
            v: projection("attn_v", kv_rows, hidden)?,
            output: projection("attn_output", hidden, q_rows)?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), hidden)?,
            gate: projection("ffn_gate", ffn, hidden)?,
            up: projection("ffn_up", ffn, hidden)?,
            down: projection("ffn_down", hidden, ffn)?,
        })
    }

    fn projection(
        &self,
        stem: &str,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<Projection<'a>, ShardError> {
        let weight = self.matrix(&format!("{stem}.weight"), n_rows, n_cols)?;
        let bias = self.optional_vector(&format!("{stem}.bias"), n_rows)?;
        Ok(Projection { weight, bias, order: RowOrder::Plain, n_rows })
    }

    fn matrix(
        &self,
        name: &str,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<&'a TensorInfo, ShardError> {
        let tensor = self.with_dims(name, &[n_cols as u64, n_rows as u64])?;
        // Every mode supports the same types.
        if layout::layout(tensor.ggml_type, WeightMode::Exact).is_none() {
            let tensor_name = name.to_owned();
            return Err(ShardError::TensorType { tensor: tensor_name, found: tensor.ggml_type });
        }
        Ok(tensor)
    }

    /// A vector is always f32: converters never quantise them.
    fn vector(&self, name: &str, len: usize) -> Result<&'a TensorInfo, ShardError> {
        let tensor = self.with_dims(name, &[len as u64])?;
        if tensor.ggml_type == GgmlType::F32 {
            Ok(tensor)
        } else {
            Err(ShardError::VectorType { tensor: name.to_owned(), found: tensor.ggml_type })
        }
    }

    fn optional_vector(
        &self,
        name: &str,
        len: usize,
    ) -> Result<Option<&'a TensorInfo>, ShardError> {
        self.gguf.tensor(name).map(|_| self.vector(name, len)).transpose()
    }

    fn with_dims(&self, name: &str, expected: &[u64]) -> Result<&'a TensorInfo, ShardError> {
        let Some(tensor) = self.gguf.tensor(name) else {
            return Err(ShardError::MissingTensor { tensor: name.to_owned() });
        };
        if tensor.dims == expected {
            Ok(tensor)
        } else {
            Err(ShardError::TensorShape {
                tensor: name.to_owned(),
                expected: expected.to_vec(),
                found: tensor.dims.clone(),
            })
        }
    }
}

impl<'a> LayerTensors<'a> {
    /// The norms and matrices of the layer (biases, which are small, left out).
    pub(crate) fn all(&self) -> [&'a TensorInfo; 9] {
        [
            self.attention_norm,
            self.q.weight,
            self.k.weight,
            self.v.weight,
            self.output.weight,
            self.ffn_norm,
            self.gate.weight,
            self.up.weight,
            self.down.weight,
        ]
    }
}
