//! Reads and checks the hyper-parameters of a model from `config.json`.
//!
//! **Source**: the configurations of huggingface/transformers for names and defaults.

use serde_json::Value;

use super::config::{DecoderConfig, Experts, MAX_LAYERS, Window};
use super::families::{Activation, Family, Windows};
use super::rope::{Llama3, Rope, longrope_magnitude};
use crate::hugging_face::{ConfigJson, HfError};
use crate::manifest::ModelDims;
use crate::shard::ShardError;

/// A layer in so many sees everything where a file with windows does not say.
const WINDOW_PATTERN: usize = 6;

/// The base of rotary angles of layers with a window where a file does not say.
const WINDOW_ROPE_BASE: f32 = 10_000.0;

impl DecoderConfig {
    /// Reads the configuration of a model folder.
    ///
    /// # Errors
    /// [`ShardError::UnknownArchitecture`], and [`ShardError::HuggingFace`] for a field that is
    /// missing, of another type, or has a value that no graph is written for.
    pub(super) fn read_hugging_face(config: &ConfigJson) -> Result<Self, ShardError> {
        let Some(model_type) = config.text("model_type")? else {
            return Err(config.unsupported("model_type", "the name of an architecture").into());
        };
        let Some(family) = Family::of_hugging_face(model_type) else {
            return Err(ShardError::UnknownArchitecture {
                found: model_type.to_owned(),
                known: Family::model_types(),
            });
        };
        check(config, family)?;
        let dims = dims(config)?;
        let (rope, context_length) = rope(config, &dims, family)?;
        let experts = experts(config, family)?;
        let ffn_dim = match (&experts, config.optional_size("moe_intermediate_size")?) {
            (Some(_), Some(ffn_dim)) => ffn_dim,
            _ => config.size("intermediate_size")?,
        };
        Ok(Self {
            window: window(config, &dims, family, &rope)?,
            attention_scale: attention_scale(config, dims.head_dim)?,
            dims: ModelDims { context_length, ..dims },
            ffn_dim,
            rope,
            rms_eps: config.float("rms_norm_eps", 1e-6)?,
            norm_offset: if family.hf_norms_less_one { 1.0 } else { 0.0 },
            logit_cap: config.optional_float("final_logit_softcapping")?,
            tied_head: config.flag("tie_word_embeddings", family.tied)?,
            experts,
            family,
        })
    }
}

/// Refuses what no graph is written for.
fn check(config: &ConfigJson, family: &Family) -> Result<(), HfError> {
    let (field, expected) = match family.activation {
        Activation::Silu => ("hidden_act", "silu"),
        Activation::GeluTanh => ("hidden_activation", "gelu_pytorch_tanh"),
    };
    if config.text(field)?.is_some_and(|found| found != expected) {
        return Err(config.unsupported(field, expected));
    }
    for field in ["attn_logit_softcapping", "use_bidirectional_attention"] {
        if config.present(field).is_some_and(|value| *value != Value::Bool(false)) {
            return Err(config.unsupported(field, "absent"));
        }
    }
    Ok(())
}

fn dims(config: &ConfigJson) -> Result<ModelDims, HfError> {
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
    let n_layers = config.size("num_hidden_layers")?;
    if n_layers > MAX_LAYERS {
        return Err(config.unsupported("num_hidden_layers", "at most 4096 layers"));
    }
    Ok(ModelDims {
        n_layers,
        hidden_dim,
        n_heads,
        n_kv_heads,
        head_dim,
        vocab_size: config.size("vocab_size")?,
        context_length: config.size("max_position_embeddings")?,
    })
}

/// The rotary angles of layers that see everything, and the context that they are made for.
fn rope(config: &ConfigJson, dims: &ModelDims, family: &Family) -> Result<(Rope, usize), HfError> {
    let share = f64::from(config.float("partial_rotary_factor", 1.0)?);
    let dim = (dims.head_dim as f64 * share) as usize;
    if dim == 0 || !dim.is_multiple_of(2) || share > 1.0 {
        return Err(config.unsupported("partial_rotary_factor", "a share of an even length"));
    }
    let mut rope = Rope::new(dim, config.float("rope_theta", family.rope_base)?);
    let mut context_length = dims.context_length;
    let Some(scaling) = config.present("rope_scaling") else { return Ok((rope, context_length)) };
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
    let number = |name: &str| scaling.get(name).and_then(Value::as_f64).filter(|n| *n > 0.0);
    let wrong = |expected| Err(config.unsupported("rope_scaling", expected));
    match kind {
        Some("default") => {}
        Some("linear") => match number("factor").filter(|factor| *factor >= 1.0) {
            Some(factor) => rope.factor = factor as f32,
            None => return wrong("of type linear with a factor of at least 1"),
        },
        Some("llama3") => match llama3(number) {
            Some(scaling) => rope = rope.with_llama3(scaling),
            None => {
                return wrong(
                    "of type llama3 with factor, low_freq_factor below high_freq_factor and \
                     original_max_position_embeddings",
                );
            }
        },
        Some("longrope" | "su") => {
            let original = config.size("original_max_position_embeddings")?;
            let Some(divisors) = numbers(scaling.get("short_factor"), dim / 2) else {
                return wrong("of type longrope with a short_factor for every rotary pair");
            };
            let times = context_length as f64 / original as f64;
            rope.divisors = divisors;
            rope.magnitude = number("attention_factor")
                .map_or_else(|| longrope_magnitude(times, original as f64), |found| found as f32);
            context_length = context_length.min(original);
        }
        _ => return wrong("absent, or of type default, linear, llama3 or longrope"),
    }
    Ok((rope, context_length))
}

fn llama3(number: impl Fn(&str) -> Option<f64>) -> Option<Llama3> {
    let scaling = Llama3 {
        factor: number("factor")?,
        low: number("low_freq_factor")?,
        high: number("high_freq_factor")?,
        original_context: number("original_max_position_embeddings")?,
    };
    (scaling.low < scaling.high).then_some(scaling)
}

/// So many positive numbers.
fn numbers(value: Option<&Value>, n: usize) -> Option<Vec<f32>> {
    let values = value?.as_array().filter(|values| values.len() == n)?;
    values.iter().map(|v| v.as_f64().filter(|v| *v > 0.0).map(|v| v as f32)).collect()
}

/// What scores are multiplied with, if it is not the usual.
fn attention_scale(config: &ConfigJson, head_dim: usize) -> Result<Option<f32>, HfError> {
    let scalar = config.optional_float("query_pre_attn_scalar")?.map(f64::from);
    let other = scalar.filter(|scalar| (scalar - head_dim as f64).abs() > 0.0);
    Ok(other.map(|scalar| (1.0 / scalar.sqrt()) as f32))
}

/// The layers with a window.
fn window(
    config: &ConfigJson,
    dims: &ModelDims,
    family: &Family,
    rope: &Rope,
) -> Result<Option<Window>, HfError> {
    let used = match family.windows {
        Windows::None => false,
        Windows::All => config.flag("use_sliding_window", true)?,
        Windows::Pattern => true,
        Windows::Upper => config.flag("use_sliding_window", false)?,
    };
    let len = if used { config.optional_size("sliding_window")? } else { None };
    let Some(len) = len else { return Ok(None) };
    let layers = match config.present("layer_types") {
        Some(types) if family.windows != Windows::All => match layer_types(types, dims.n_layers) {
            Some(layers) => layers,
            None => {
                let expected = "\"full_attention\" or \"sliding_attention\" for every layer";
                return Err(config.unsupported("layer_types", expected));
            }
        },
        _ => layers_by_rule(config, dims.n_layers, family.windows)?,
    };
    let rope = match family.windows {
        Windows::Pattern => {
            Rope::new(rope.dim, config.float("rope_local_base_freq", WINDOW_ROPE_BASE)?)
        }
        Windows::None | Windows::All | Windows::Upper => rope.clone(),
    };
    Ok(Some(Window { len, layers, rope }))
}

/// Whether each layer has a window, as the file lists them.
fn layer_types(types: &Value, n_layers: usize) -> Option<Vec<bool>> {
    let types = types.as_array().filter(|types| types.len() == n_layers)?;
    let has_window = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    types.iter().map(has_window).collect()
}

fn layers_by_rule(
    config: &ConfigJson,
    n_layers: usize,
    windows: Windows,
) -> Result<Vec<bool>, HfError> {
    let layers = 0..n_layers;
    Ok(match windows {
        Windows::None => layers.map(|_| false).collect(),
        Windows::All => layers.map(|_| true).collect(),
        Windows::Upper => {
            // Absent or 0: from the first layer on.
            let first = config.count("max_window_layers", 28)?;
            layers.map(|layer| layer >= first).collect()
        }
        Windows::Pattern => {
            let pattern = config.optional_size("sliding_window_pattern")?;
            let pattern = pattern.unwrap_or(WINDOW_PATTERN);
            layers.map(|layer| !(layer + 1).is_multiple_of(pattern)).collect()
        }
    })
}

fn experts(config: &ConfigJson, family: &Family) -> Result<Option<Experts>, HfError> {
    if !family.experts {
        return Ok(None);
    }
    // Mixtral counts "local" experts, and its shares always add up to 1.
    let (field, normalised) = match config.optional_size("num_local_experts")? {
        Some(_) => ("num_local_experts", true),
        None => ("num_experts", config.flag("norm_topk_prob", false)?),
    };
    let (n, n_used) = (config.size(field)?, config.size("num_experts_per_tok")?);
    if n_used > n {
        return Err(config.unsupported("num_experts_per_tok", "at most the number of experts"));
    }
    if config.optional_size("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        return Err(config.unsupported("decoder_sparse_step", "1 (experts in every layer)"));
    }
    let dense = config.present("mlp_only_layers").and_then(Value::as_array);
    if dense.is_some_and(|layers| !layers.is_empty()) {
        return Err(config.unsupported("mlp_only_layers", "none (experts in every layer)"));
    }
    Ok(Some(Experts { n, n_used, normalised }))
}
