//! What a backend must know about its stage beyond the files.

use std::ops::Range;

use stagebus_shards::Manifest;

/// The place of one stage in its model, and the model's sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageSpec {
    /// Layers of this stage, counted over the whole model.
    pub layers: Range<usize>,
    /// Layers of the whole model.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub hidden_dim: usize,
    /// Key and value heads of a layer.
    pub n_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of a logits row: the vocabulary, unless the head is cut.
    pub n_head_rows: usize,
    /// Longest sequence, in tokens.
    pub context_length: usize,
}

/// The manifest has no such stage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stage {stage} does not exist, the model has {n_stages}")]
pub struct StageSpecError {
    /// Stage asked for.
    pub stage: usize,
    /// Stages of the model.
    pub n_stages: usize,
}

impl StageSpec {
    /// The specification of stage `stage` of a shard set.
    ///
    /// # Errors
    /// [`StageSpecError`] if the model has no such stage.
    pub fn from_manifest(manifest: &Manifest, stage: usize) -> Result<Self, StageSpecError> {
        let n_stages = manifest.n_stages();
        let entry = manifest.stages.get(stage).ok_or(StageSpecError { stage, n_stages })?;
        let dims = &manifest.dims;
        Ok(Self {
            layers: entry.first_layer..entry.end_layer,
            n_layers: dims.n_layers,
            hidden_dim: dims.hidden_dim,
            n_kv_heads: dims.n_kv_heads,
            head_dim: dims.head_dim,
            vocab_size: dims.vocab_size,
            n_head_rows: manifest.n_head_rows(),
            context_length: dims.context_length,
        })
    }

    /// Whether the stage takes token ids instead of hidden states.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the stage gives logits instead of hidden states.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.layers.end == self.n_layers
    }

    /// Numbers of the KV cache per token over the stage's layers.
    #[must_use]
    pub fn kv_values_per_token(&self) -> usize {
        self.layers.len() * 2 * self.n_kv_heads * self.head_dim
    }
}
