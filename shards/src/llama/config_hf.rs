//! Reads and checks the hyper-parameters of a Llama model from `config.json`.
//!
//! **Source**: `LlamaConfig` of huggingface/transformers for names and defaults.

use super::config::LlamaConfig;
use crate::hugging_face::{ConfigJson, HfError};
use crate::manifest::ModelDims;

impl LlamaConfig {
    /// Reads the configuration of a model folder.
    ///
    /// # Errors
    /// [`HfError`] for a field that is missing, of another type, or has a value that no graph is
    /// written for.
    pub(crate) fn read_hugging_face(config: &ConfigJson) -> Result<Self, HfError> {
        if config.text("model_type")? != Some("llama") {
            return Err(config.unsupported("model_type", "\"llama\""));
        }
        if config.text("hidden_act")?.is_some_and(|activation| activation != "silu") {
            return Err(config.unsupported("hidden_act", "\"silu\""));
        }
        let hidden_dim = config.size("hidden_size")?;
        let n_heads = config.size("num_attention_heads")?;
        let n_kv_heads = config.optional_size("num_key_value_heads")?.unwrap_or(n_heads);
        if n_heads % n_kv_heads != 0 {
            let expected = "a divisor of num_attention_heads";
            return Err(config.unsupported("num_key_value_heads", expected));
        }
        let head_dim = match config.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden_dim.is_multiple_of(n_heads) => hidden_dim / n_heads,
            None => {
                return Err(config.unsupported("hidden_size", "a multiple of num_attention_heads"));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(config.unsupported("head_dim", "an even number"));
        }
        Ok(Self {
            dims: ModelDims {
                n_layers: config.size("num_hidden_layers")?,
                hidden_dim,
                n_heads,
                n_kv_heads,
                head_dim,
                vocab_size: config.size("vocab_size")?,
                context_length: config.size("max_position_embeddings")?,
            },
            ffn_dim: config.size("intermediate_size")?,
            rotary_dim: head_dim,
            rope_base: config.float("rope_theta", 10_000.0)?,
            rope_factor: rope_factor(config)?,
            rms_eps: config.float("rms_norm_eps", 1e-6)?,
            tied_head: config.flag("tie_word_embeddings")?,
        })
    }
}

/// The factor of linear RoPE scaling.
fn rope_factor(config: &ConfigJson) -> Result<f32, HfError> {
    let Some(scaling) = config.present("rope_scaling") else { return Ok(1.0) };
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(|v| v.as_str());
    let factor = scaling.get("factor").and_then(serde_json::Value::as_f64);
    match (kind, factor) {
        (Some("default"), _) => Ok(1.0),
        (Some("linear"), Some(factor)) if factor >= 1.0 => Ok(factor as f32),
        _ => Err(config.unsupported("rope_scaling", "absent, or of type linear with a factor")),
    }
}
