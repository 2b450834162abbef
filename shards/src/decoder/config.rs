//! What a graph needs to know beyond the tensors, whatever the file's format.

use super::families::Family;
use super::rope::Rope;
use crate::manifest::ModelDims;
use crate::shard::ShardError;
use crate::source::Source;

/// Far more layers than any model has; what is kept for each must not follow any number that a
/// file claims.
pub(super) const MAX_LAYERS: usize = 4096;

/// The hyper-parameters of a model.
#[derive(Clone, Debug)]
pub(crate) struct DecoderConfig {
    pub(crate) family: &'static Family,
    pub(crate) dims: ModelDims,
    pub(crate) ffn_dim: usize,
    /// Rotary angles of layers that see all positions.
    pub(crate) rope: Rope,
    /// What layers see only the last positions.
    pub(crate) window: Option<Window>,
    pub(crate) rms_eps: f32,
    /// What is added to the stored weights of norms.
    pub(crate) norm_offset: f32,
    /// What scores are multiplied with; the root of a head's length divides them if absent.
    pub(crate) attention_scale: Option<f32>,
    /// Logits become `cap * tanh(logits / cap)`.
    pub(crate) logit_cap: Option<f32>,
    /// Whether a model without a head of its own uses the embedding table.
    pub(crate) tied_head: bool,
    /// Mixtures of experts instead of one feed-forward a layer.
    pub(crate) experts: Option<Experts>,
}

/// Layers that see only the last positions.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Window {
    /// Positions that a row sees, its own among them.
    pub(crate) len: usize,
    /// Whether each layer of the model is one of them.
    pub(crate) layers: Vec<bool>,
    /// Their rotary angles.
    pub(crate) rope: Rope,
}

/// Mixtures of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Experts {
    /// Experts of a layer.
    pub(crate) n: usize,
    /// Experts that a row uses.
    pub(crate) n_used: usize,
    /// Whether the shares of those add up to 1.
    pub(crate) normalised: bool,
}

impl DecoderConfig {
    /// Reads and checks the configuration of a model.
    ///
    /// # Errors
    /// [`ShardError::Gguf`] or [`ShardError::HuggingFace`] for what is missing, of another type or
    /// (in a folder) not supported, [`ShardError::UnknownArchitecture`], and
    /// [`ShardError::Unsupported`] for a value that no graph is written for.
    pub(crate) fn read(source: &Source) -> Result<Self, ShardError> {
        let mut config = match source {
            Source::Gguf(gguf) => Self::read_gguf(gguf, source)?,
            Source::HuggingFace(model) => Self::read_hugging_face(&model.config.model)?,
        };
        let Self { dims, rope, window, .. } = &mut config;
        // A window that no position leaves is none.
        *window = window.take().filter(|window| {
            let differs = window.len < dims.context_length || window.rope != *rope;
            differs && window.layers.contains(&true)
        });
        Ok(config)
    }

    /// The window of a layer, if it has one.
    pub(crate) fn window_of(&self, layer: usize) -> Option<&Window> {
        self.window.as_ref().filter(|window| window.layers[layer])
    }

    /// Rows of the queries' matrix.
    pub(crate) fn q_rows(&self) -> usize {
        self.dims.n_heads * self.dims.head_dim
    }

    /// Rows of the keys' and of the values' matrix.
    pub(crate) fn kv_rows(&self) -> usize {
        self.dims.n_kv_heads * self.dims.head_dim
    }
}
