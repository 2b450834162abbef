//! Finds the tensors of a Llama model and checks their shapes.

use super::config::LlamaConfig;
use super::names::Names;
use crate::shard::ShardError;
use crate::source::Source;
use crate::tensor::Tensor;
use crate::weights::rows::RowOrder;

/// A matrix that inputs are multiplied with, and its bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection<'a> {
    pub(crate) weight: Tensor<'a>,
    pub(crate) bias: Option<Tensor<'a>>,
    pub(crate) order: RowOrder<'a>,
    pub(crate) n_rows: usize,
}

impl<'a> Projection<'a> {
    /// A whole matrix as it is stored.
    pub(crate) fn plain(weight: Tensor<'a>) -> Self {
        Self { weight, bias: None, order: RowOrder::Plain, n_rows: weight.n_rows }
    }

    /// Source bytes of the rows (biases, which are small, left out).
    pub(crate) fn n_bytes(&self) -> usize {
        let row_bytes = self.weight.encoding.row_bytes(self.weight.n_cols);
        self.n_rows * (row_bytes + self.weight.row_scale(0).len())
    }

    /// Weights of the matrix.
    pub(crate) fn n_weights(&self) -> u64 {
        self.n_rows as u64 * self.weight.n_cols as u64
    }
}

/// The tensors of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerTensors<'a> {
    pub(crate) attention_norm: Tensor<'a>,
    pub(crate) q: Projection<'a>,
    pub(crate) k: Projection<'a>,
    pub(crate) v: Projection<'a>,
    pub(crate) output: Projection<'a>,
    pub(crate) ffn_norm: Tensor<'a>,
    pub(crate) gate: Projection<'a>,
    pub(crate) up: Projection<'a>,
    pub(crate) down: Projection<'a>,
}

/// All tensors of a model.
#[derive(Clone, Debug)]
pub(crate) struct LlamaTensors<'a> {
    pub(crate) embedding: Tensor<'a>,
    pub(crate) layers: Vec<LayerTensors<'a>>,
    pub(crate) output_norm: Tensor<'a>,
    /// The head's matrix, or some rows of it; the embedding table if the model has none of its own.
    pub(crate) head: Projection<'a>,
    /// Divisors of the rotary frequencies (llama3 scaling), f32 `[rotary_dim / 2]`.
    pub(crate) rope_divisors: Option<Tensor<'a>>,
}

impl<'a> LlamaTensors<'a> {
    /// Finds and checks every tensor.
    ///
    /// # Errors
    /// [`ShardError::MissingTensor`], [`ShardError::TensorShape`], or the error of the source's
    /// format for a type that is not mapped.
    pub(crate) fn find(source: &'a Source, config: &LlamaConfig) -> Result<Self, ShardError> {
        let find = Finder { source, names: Names::of(source) };
        let dims = &config.dims;
        let (vocab_size, hidden_dim) = (dims.vocab_size, dims.hidden_dim);
        let embedding = source.matrix(find.names.embedding, vocab_size, hidden_dim)?;
        let layers =
            (0..dims.n_layers).map(|layer| find.layer(layer, config)).collect::<Result<_, _>>()?;
        let output_norm = source.vector(find.names.output_norm, hidden_dim)?;
        let head_name = format!("{}.weight", find.names.head);
        let head = if config.tied_head && !source.has(&head_name) {
            Projection::plain(embedding)
        } else {
            find.projection(find.names.head, vocab_size, hidden_dim)?
        };
        let rope_divisors = match find.names.rope_divisors {
            Some(name) => find.optional_vector(name, config.rotary_dim / 2)?,
            None => None,
        };
        Ok(Self { embedding, layers, output_norm, head, rope_divisors })
    }

    /// Keeps only the head's rows of these tokens, which the vocabulary has.
    pub(crate) fn cut_head(&mut self, tokens: &'a [u32]) {
        self.head =
            Projection { order: RowOrder::Picked(tokens), n_rows: tokens.len(), ..self.head };
    }

    /// Whether the head is the whole embedding table.
    pub(crate) fn head_is_embedding(&self) -> bool {
        self.head.weight.is(&self.embedding) && self.head.order == RowOrder::Plain
    }
}

struct Finder<'a> {
    source: &'a Source,
    names: &'static Names,
}

impl<'a> Finder<'a> {
    fn layer(&self, layer: usize, config: &LlamaConfig) -> Result<LayerTensors<'a>, ShardError> {
        let (dims, names) = (&config.dims, self.names);
        let (hidden, ffn) = (dims.hidden_dim, config.ffn_dim);
        let (q_rows, kv_rows) = (dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim);
        let order = match self.source {
            Source::Gguf(_) => RowOrder::InterleavedPairs {
                head_dim: dims.head_dim,
                rotary_dim: config.rotary_dim,
            },
            Source::HuggingFace(_) => RowOrder::Plain,
        };
        let stem = |part: &str| format!("{}{layer}.{part}", names.layer);
        let norm = |part: &str| self.source.vector(&format!("{}.weight", stem(part)), hidden);
        let projection =
            |part: &str, n_rows: usize, n_cols: usize| self.projection(&stem(part), n_rows, n_cols);
        Ok(LayerTensors {
            attention_norm: norm(names.attention_norm)?,
            q: Projection { order, ..projection(names.q, q_rows, hidden)? },
            k: Projection { order, ..projection(names.k, kv_rows, hidden)? },
            v: projection(names.v, kv_rows, hidden)?,
            output: projection(names.output, hidden, q_rows)?,
            ffn_norm: norm(names.ffn_norm)?,
            gate: projection(names.gate, ffn, hidden)?,
            up: projection(names.up, ffn, hidden)?,
            down: projection(names.down, hidden, ffn)?,
        })
    }

    fn projection(
        &self,
        stem: &str,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<Projection<'a>, ShardError> {
        let weight = self.source.matrix(&format!("{stem}.weight"), n_rows, n_cols)?;
        let bias = self.optional_vector(&format!("{stem}.bias"), n_rows)?;
        Ok(Projection { bias, ..Projection::plain(weight) })
    }

    fn optional_vector(&self, name: &str, len: usize) -> Result<Option<Tensor<'a>>, ShardError> {
        self.source.has(name).then(|| self.source.vector(name, len)).transpose()
    }
}

impl<'a> LayerTensors<'a> {
    /// The matrices.
    pub(crate) fn matrices(&self) -> [Projection<'a>; 7] {
        [self.q, self.k, self.v, self.output, self.gate, self.up, self.down]
    }

    /// Source bytes of the norms and matrices.
    pub(crate) fn n_bytes(&self) -> u64 {
        let norms = [self.attention_norm, self.ffn_norm].map(|norm| norm.n_bytes());
        let matrices = self.matrices().map(|projection| projection.n_bytes());
        norms.iter().chain(&matrices).map(|bytes| *bytes as u64).sum()
    }
}
