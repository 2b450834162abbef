//! Reads and checks the hyper-parameters of a GGUF file.
//!
//! **Source**: the GGUF specification, section "LLM", and `src/models/` of ggml-org/llama.cpp for
//! defaults.

use super::config::{DecoderConfig, Experts, MAX_LAYERS, Window};
use super::families::{Family, Windows};
use super::rope::Rope;
use crate::gguf::{FromMetadata, Gguf, Metadata};
use crate::manifest::ModelDims;
use crate::shard::ShardError;
use crate::source::Source;

/// Where a file keeps the divisors of rotary frequencies, the first that is there: those of Llama
/// 3.1, and those of `longrope` up to the original context.
const ROPE_DIVISORS: [&str; 2] = ["rope_freqs.weight", "rope_factors_short.weight"];

/// A layer in so many sees everything where a file with windows does not say.
const WINDOW_PATTERN: usize = 6;

/// The base of rotary angles of layers with a window where a file does not say.
const WINDOW_ROPE_BASE: f32 = 10_000.0;

impl DecoderConfig {
    /// Reads the configuration of a GGUF file; `source` is the same file.
    ///
    /// # Errors
    /// [`ShardError::Gguf`] for a missing key or a wrong type, [`ShardError::UnknownArchitecture`],
    /// [`ShardError::Unsupported`] for a value that no graph is written for.
    pub(super) fn read_gguf(gguf: &Gguf, source: &Source) -> Result<Self, ShardError> {
        let architecture = gguf.metadata().str("general.architecture")?;
        let Some(family) = Family::of_gguf(architecture) else {
            return Err(ShardError::UnknownArchitecture {
                found: architecture.to_owned(),
                known: Family::gguf_architectures(),
            });
        };
        let keys = Keys { metadata: gguf.metadata(), architecture };
        let dims = dims(&keys, gguf)?;
        let (rope, context_length) = rope(&keys, &dims, family, source)?;
        let experts = experts(&keys)?;
        let ffn_dim = match (&experts, keys.optional_size("expert_feed_forward_length")?) {
            (Some(_), Some(ffn_dim)) => ffn_dim,
            _ => keys.size("feed_forward_length")?,
        };
        Ok(Self {
            window: window(&keys, &dims, family)?,
            attention_scale: attention_scale(family, &dims),
            dims: ModelDims { context_length, ..dims },
            ffn_dim,
            rope,
            rms_eps: keys.require("attention.layer_norm_rms_epsilon")?,
            norm_offset: 0.0,
            logit_cap: keys.get("final_logit_softcapping")?,
            tied_head: true,
            experts,
            family,
        })
    }
}

/// The keys of an architecture.
struct Keys<'a> {
    metadata: Metadata<'a>,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn get<T: FromMetadata<'a>>(&self, name: &str) -> Result<Option<T>, ShardError> {
        Ok(self.metadata.get(&self.key(name))?)
    }

    fn require<T: FromMetadata<'a>>(&self, name: &str) -> Result<T, ShardError> {
        Ok(self.metadata.require(&self.key(name))?)
    }

    /// A positive number.
    fn size(&self, name: &str) -> Result<usize, ShardError> {
        let size: u32 = self.require(name)?;
        self.positive(name, size)
    }

    /// A positive number that may be absent.
    fn optional_size(&self, name: &str) -> Result<Option<usize>, ShardError> {
        self.get::<u32>(name)?.map(|size| self.positive(name, size)).transpose()
    }

    fn positive(&self, name: &str, size: u32) -> Result<usize, ShardError> {
        match size {
            0 => Err(self.unsupported(name, size, "a positive number")),
            _ => Ok(size as usize),
        }
    }

    fn unsupported(&self, name: &str, found: impl ToString, expected: &'static str) -> ShardError {
        ShardError::Unsupported { key: self.key(name), found: found.to_string(), expected }
    }
}

fn dims(keys: &Keys<'_>, gguf: &Gguf) -> Result<ModelDims, ShardError> {
    let hidden_dim = keys.size("embedding_length")?;
    let n_heads = keys.size("attention.head_count")?;
    let n_kv_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(n_heads);
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if hidden_dim >= n_heads => hidden_dim / n_heads,
        None => {
            let expected = "at most the embedding's length";
            return Err(keys.unsupported("attention.head_count", n_heads, expected));
        }
    };
    if n_heads % n_kv_heads != 0 {
        let expected = "a divisor of attention.head_count";
        return Err(keys.unsupported("attention.head_count_kv", n_kv_heads, expected));
    }
    let value_length = keys.get::<u32>("attention.value_length")?;
    if let Some(found) = value_length.filter(|found| *found as usize != head_dim) {
        return Err(keys.unsupported("attention.value_length", found, "the length of the keys"));
    }
    let vocab_size = match gguf.tensor("token_embd.weight") {
        Some(table) if table.dims.len() == 2 => table.dims[1] as usize,
        _ => keys.size("vocab_size")?,
    };
    let n_layers = keys.size("block_count")?;
    if n_layers > MAX_LAYERS {
        return Err(keys.unsupported("block_count", n_layers, "at most 4096 layers"));
    }
    Ok(ModelDims {
        n_layers,
        hidden_dim,
        n_heads,
        n_kv_heads,
        head_dim,
        vocab_size,
        context_length: keys.size("context_length")?,
    })
}

/// The rotary angles of layers that see everything, and the context that they are made for.
fn rope(
    keys: &Keys<'_>,
    dims: &ModelDims,
    family: &Family,
    source: &Source,
) -> Result<(Rope, usize), ShardError> {
    let dim = keys.optional_size("rope.dimension_count")?.unwrap_or(dims.head_dim);
    if !dim.is_multiple_of(2) || dim > dims.head_dim {
        let expected = "an even number up to the head's length";
        return Err(keys.unsupported("rope.dimension_count", dim, expected));
    }
    let base = keys.get("rope.freq_base")?.unwrap_or(family.rope_base);
    let mut rope = Rope { factor: linear_factor(keys)?, ..Rope::new(dim, base) };
    let mut context_length = dims.context_length;
    if let Some(name) = ROPE_DIVISORS.into_iter().find(|name| source.has(name)) {
        rope.divisors = source.vector(name, dim / 2)?.floats();
        rope.magnitude = keys.get("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let original = keys.optional_size("rope.scaling.original_context_length")?;
        if name == ROPE_DIVISORS[1] {
            context_length = context_length.min(original.unwrap_or(context_length));
        }
    }
    Ok((rope, context_length))
}

/// The factor of linear RoPE scaling.
fn linear_factor(keys: &Keys<'_>) -> Result<f32, ShardError> {
    match keys.get::<&str>("rope.scaling.type")? {
        // Files from before `scaling.type` carry only the factor.
        None | Some("none") => Ok(keys.get("rope.scale_linear")?.unwrap_or(1.0)),
        Some("linear") => keys.require("rope.scaling.factor"),
        // Its divisors are a tensor.
        Some("longrope") => Ok(1.0),
        Some(found) => {
            let expected = "none, linear or longrope (llama3 comes as tensor rope_freqs.weight)";
            Err(keys.unsupported("rope.scaling.type", found, expected))
        }
    }
}

/// The layers with a window. Files of other families than Gemma say nothing about which they are.
fn window(
    keys: &Keys<'_>,
    dims: &ModelDims,
    family: &Family,
) -> Result<Option<Window>, ShardError> {
    if family.windows != Windows::Pattern {
        return Ok(None);
    }
    let Some(len) = keys.optional_size("attention.sliding_window")? else { return Ok(None) };
    let pattern = keys.optional_size("attention.sliding_window_pattern")?;
    let pattern = pattern.unwrap_or(WINDOW_PATTERN);
    let dim = keys.optional_size("rope.dimension_count")?.unwrap_or(dims.head_dim);
    let base = keys.get("rope.freq_base_swa")?.unwrap_or(WINDOW_ROPE_BASE);
    let layers = (1..=dims.n_layers).map(|count| !count.is_multiple_of(pattern)).collect();
    Ok(Some(Window { len, layers, rope: Rope::new(dim, base) }))
}

/// Files do not say that a size of the family has another scale than the others.
fn attention_scale(family: &Family, dims: &ModelDims) -> Option<f32> {
    let is_other = family.gguf_layers_of_hidden_scale == Some(dims.n_layers);
    is_other.then(|| (dims.n_heads as f64 / dims.hidden_dim as f64).sqrt() as f32)
}

fn experts(keys: &Keys<'_>) -> Result<Option<Experts>, ShardError> {
    let Some(n) = keys.get::<u32>("expert_count")?.filter(|n| *n > 0) else { return Ok(None) };
    let (n, n_used) = (n as usize, keys.size("expert_used_count")?);
    if n_used > n {
        return Err(keys.unsupported("expert_used_count", n_used, "at most expert_count"));
    }
    let shared = keys.get::<u32>("expert_shared_count")?.unwrap_or(0);
    if shared > 0 {
        return Err(keys.unsupported("expert_shared_count", shared, "0 (no shared experts)"));
    }
    Ok(Some(Experts { n, n_used, normalised: true }))
}
