//! What the tensors of a model are called in each file format.

use super::families::Family;
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
    /// Query, key and value in one.
    pub(crate) qkv: &'static str,
    pub(crate) q_norm: &'static str,
    pub(crate) k_norm: &'static str,
    pub(crate) output: &'static str,
    /// Of what attention gives.
    pub(crate) attention_output_norm: &'static str,
    pub(crate) ffn_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    /// Gate and up in one.
    pub(crate) gate_up: &'static str,
    pub(crate) down: &'static str,
    /// Of what the feed-forward gives.
    pub(crate) ffn_output_norm: &'static str,
    pub(crate) experts: ExpertNames,
}

/// The names of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    /// What weighs the experts.
    pub(crate) router: &'static str,
    /// In front of an expert's index; none if one tensor holds all experts.
    pub(crate) each: Option<&'static str>,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
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
    qkv: "attn_qkv",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    output: "attn_output",
    attention_output_norm: "post_attention_norm",
    ffn_norm: "ffn_norm",
    gate: "ffn_gate",
    up: "ffn_up",
    gate_up: "ffn_up",
    down: "ffn_down",
    ffn_output_norm: "post_ffw_norm",
    experts: ExpertNames {
        router: "ffn_gate_inp",
        each: None,
        gate: "ffn_gate_exps",
        up: "ffn_up_exps",
        down: "ffn_down_exps",
    },
};

/// **Source**: the models of huggingface/transformers.
pub(super) const HUGGING_FACE: Names = Names {
    embedding: "model.embed_tokens.weight",
    output_norm: "model.norm.weight",
    head: "lm_head",
    layer: "model.layers.",
    attention_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    qkv: "self_attn.qkv_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    output: "self_attn.o_proj",
    attention_output_norm: "post_attention_layernorm",
    ffn_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    gate_up: "mlp.gate_up_proj",
    down: "mlp.down_proj",
    ffn_output_norm: "post_feedforward_layernorm",
    experts: ExpertNames {
        router: "mlp.gate",
        each: Some("mlp.experts."),
        gate: "gate_proj",
        up: "up_proj",
        down: "down_proj",
    },
};

/// Here the norm after attention is one of its output, and the feed-forward has another before it.
pub(super) const HUGGING_FACE_GEMMA3: Names =
    Names { ffn_norm: "pre_feedforward_layernorm", ..HUGGING_FACE };

pub(super) const HUGGING_FACE_MIXTRAL: Names = Names {
    experts: ExpertNames {
        router: "block_sparse_moe.gate",
        each: Some("block_sparse_moe.experts."),
        gate: "w1",
        up: "w3",
        down: "w2",
    },
    ..HUGGING_FACE
};

impl Names {
    /// The names that a source uses.
    pub(crate) fn of(source: &Source, family: &Family) -> &'static Self {
        match source {
            Source::Gguf(_) => &GGUF,
            Source::HuggingFace(_) => family.hf_names,
        }
    }
}
