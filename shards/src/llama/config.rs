//! Reads and checks the hyper-parameters of a `llama` GGUF.
//!
//! **Source**: the GGUF specification, section "LLM", and `llama-model.cpp` of
//! ggml-org/llama.cpp for defaults.

use crate::gguf::Gguf;
use crate::manifest::ModelDims;
use crate::shard::ShardError;
use crate::source::Source;

/// The architecture's name in `general.architecture`.
pub(crate) const ARCHITECTURE: &str = "llama";

/// What the graph needs to know beyond the tensors.
#[derive(Clone, Debug)]
pub(crate) struct LlamaConfig {
    pub(crate) dims: ModelDims,
    pub(crate) ffn_dim: usize,
    /// Dimensions of a head that are rotated.
    pub(crate) rotary_dim: usize,
    pub(crate) rope_base: f32,
    /// Positions are divided by this (linear scaling); 1 without scaling.
    pub(crate) rope_factor: f32,
    pub(crate) rms_eps: f32,
    /// Whether a model without a head of its own uses the embedding table.
    pub(crate) tied_head: bool,
}

impl LlamaConfig {
    /// Reads the configuration of a model.
    ///
    /// # Errors
    /// Those of [`Self::read_gguf`] and [`Self::read_hugging_face`].
    pub(crate) fn read(source: &Source) -> Result<Self, ShardError> {
        match source {
            Source::Gguf(gguf) => Self::read_gguf(gguf),
            Source::HuggingFace(model) => Ok(Self::read_hugging_face(&model.config)?),
        }
    }

    /// Reads the configuration of a GGUF file.
    ///
    /// # Errors
    /// [`ShardError::Gguf`] for a missing key or a wrong type, [`ShardError::UnknownArchitecture`],
    /// [`ShardError::Unsupported`] for a value that no graph is written for.
    pub(crate) fn read_gguf(gguf: &Gguf) -> Result<Self, ShardError> {
        let metadata = gguf.metadata();
        let architecture = metadata.str("general.architecture")?;
        if architecture != ARCHITECTURE {
            return Err(ShardError::UnknownArchitecture { found: architecture.to_owned() });
        }
        let size = |key: &str| metadata.u32(key).map(|value| value as usize);
        let optional = |key: &str| metadata.get::<u32>(key).map(|v| v.map(|value| value as usize));

        let hidden_dim = size("llama.embedding_length")?;
        let n_heads = size("llama.attention.head_count")?;
        positive("llama.embedding_length", hidden_dim)?;
        positive("llama.attention.head_count", n_heads)?;
        let n_kv_heads = optional("llama.attention.head_count_kv")?.unwrap_or(n_heads);
        positive("llama.attention.head_count_kv", n_kv_heads)?;
        let head_dim = optional("llama.attention.key_length")?.unwrap_or(hidden_dim / n_heads);
        let rotary_dim = optional("llama.rope.dimension_count")?.unwrap_or(head_dim);
        let vocab_size = match gguf.tensor("token_embd.weight") {
            Some(table) if table.dims.len() == 2 => table.dims[1] as usize,
            _ => size("llama.vocab_size")?,
        };
        let config = Self {
            dims: ModelDims {
                n_layers: size("llama.block_count")?,
                hidden_dim,
                n_heads,
                n_kv_heads,
                head_dim,
                vocab_size,
                context_length: size("llama.context_length")?,
            },
            ffn_dim: size("llama.feed_forward_length")?,
            rotary_dim,
            rope_base: metadata.get("llama.rope.freq_base")?.unwrap_or(10_000.0),
            rope_factor: rope_factor(gguf)?,
            rms_eps: metadata.f32("llama.attention.layer_norm_rms_epsilon")?,
            tied_head: true,
        };
        config.check(gguf)?;
        Ok(config)
    }

    fn check(&self, gguf: &Gguf) -> Result<(), ShardError> {
        let ModelDims { n_layers, n_heads, n_kv_heads, head_dim, context_length, .. } = self.dims;
        positive("llama.block_count", n_layers)?;
        positive("llama.feed_forward_length", self.ffn_dim)?;
        positive("llama.context_length", context_length)?;
        positive("llama.attention.key_length", head_dim)?;
        if n_heads % n_kv_heads != 0 {
            return Err(unsupported(
                "llama.attention.head_count_kv",
                n_kv_heads,
                "a divisor of llama.attention.head_count",
            ));
        }
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) || self.rotary_dim > head_dim
        {
            return Err(unsupported(
                "llama.rope.dimension_count",
                self.rotary_dim,
                "an even number up to the head's length",
            ));
        }
        let metadata = gguf.metadata();
        let value_length = metadata.get::<u32>("llama.attention.value_length")?;
        if let Some(found) = value_length.filter(|found| *found as usize != head_dim) {
            let key = "llama.attention.value_length";
            return Err(unsupported(key, found, "the length of the keys"));
        }
        let n_experts = metadata.get::<u32>("llama.expert_count")?;
        if let Some(found) = n_experts.filter(|found| *found > 0) {
            return Err(unsupported("llama.expert_count", found, "0 (no mixture of experts)"));
        }
        Ok(())
    }
}

/// The factor of linear RoPE scaling.
fn rope_factor(gguf: &Gguf) -> Result<f32, ShardError> {
    let metadata = gguf.metadata();
    match metadata.get::<&str>("llama.rope.scaling.type")? {
        None | Some("none") => {
            // Files from before `scaling.type` carry only the factor.
            Ok(metadata.get("llama.rope.scale_linear")?.unwrap_or(1.0))
        }
        Some("linear") => Ok(metadata.f32("llama.rope.scaling.factor")?),
        Some(found) => Err(unsupported(
            "llama.rope.scaling.type",
            found,
            "none or linear (llama3 scaling comes as tensor rope_freqs.weight)",
        )),
    }
}

fn positive(key: &'static str, value: usize) -> Result<(), ShardError> {
    if value == 0 { Err(unsupported(key, value, "a positive number")) } else { Ok(()) }
}

fn unsupported(key: &'static str, found: impl ToString, expected: &'static str) -> ShardError {
    ShardError::Unsupported { key, found: found.to_string(), expected }
}
