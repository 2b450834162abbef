//! What the tensors of a Llama model are called in each file format.

use crate::source::Source;

/// The names of one format. A layer's tensors are `{layer}{index}.{part}.weight`.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) embedding: &'static str,
    pub(crate) output_norm: &'static str,
    /// Without `.weight`.
    pub(crate) head: &'static str,
    /// In front of a layer's index.
    pub(crate) layer: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) q: &'static str,
    pub(crate) k: &'static str,
    pub(crate) v: &'static str,
    pub(crate) output: &'static str,
    pub(crate) ffn_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// Where the format stores rotary divisors as a tensor.
    pub(crate) rope_divisors: Option<&'static str>,
}

/// **Source**: `gguf-py/gguf/constants.py` of ggml-org/llama.cpp.
const GGUF: Names = Names {
    embedding: "token_embd.weight",
    output_norm: "output_norm.weight",
    head: "output",
    layer: "blk.",
    attention_norm: "attn_norm",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    output: "attn_output",
    ffn_norm: "ffn_norm",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    rope_divisors: Some("rope_freqs.weight"),
};

/// **Source**: `LlamaForCausalLM` of huggingface/transformers.
const HUGGING_FACE: Names = Names {
    embedding: "model.embed_tokens.weight",
    output_norm: "model.norm.weight",
    head: "lm_head",
    layer: "model.layers.",
    attention_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    output: "self_attn.o_proj",
    ffn_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    rope_divisors: None,
};

impl Names {
    pub(crate) fn of(source: &Source) -> &'static Self {
        match source {
            Source::Gguf(_) => &GGUF,
            Source::HuggingFace(_) => &HUGGING_FACE,
        }
    }
}
