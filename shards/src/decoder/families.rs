//! The families of models: what tells each from `llama`.

use super::names::{self, Names};

/// A family, by its differences.
#[expect(clippy::struct_excessive_bools, reason = "a table: most differences are there or not")]
#[derive(Debug)]
pub(crate) struct Family {
    /// What the manifest calls it.
    pub(crate) name: &'static str,
    /// `general.architecture` of its GGUF files; none if they come as files of another family.
    pub(crate) gguf: Option<&'static str>,
    /// `model_type` of its `config.json`.
    pub(crate) hugging_face: &'static str,
    /// Names of its tensors in a Hugging Face folder.
    pub(crate) hf_names: &'static Names,
    /// The gate's function.
    pub(crate) activation: Activation,
    /// Whether GGUF files store the two rows of a rotary pair of queries and keys side by side.
    pub(crate) gguf_pairs_rows: bool,
    /// Whether each head of queries and keys is normalised.
    pub(crate) head_norms: bool,
    /// Whether query, key and value are one tensor, and gate and up another.
    pub(crate) fused: bool,
    /// Whether what attention and feed-forward give is normalised before it is added.
    pub(crate) output_norms: bool,
    /// Whether a Hugging Face folder stores norms less 1. GGUF files never do.
    pub(crate) hf_norms_less_one: bool,
    /// Whether embeddings are multiplied with the root of the hidden size.
    pub(crate) scaled_embedding: bool,
    /// Whether the embedding table is the head where `config.json` does not say.
    pub(crate) tied: bool,
    /// Which layers see a window only.
    pub(crate) windows: Windows,
    /// The base of rotary angles where a file does not say.
    pub(crate) rope_base: f32,
    /// Whether a feed-forward is a mixture of experts. GGUF files say so themselves.
    pub(crate) experts: bool,
    /// Layers of the size whose scores are divided by the root of the hidden size per head, not of
    /// a head's length, and whose GGUF files do not say so.
    pub(crate) gguf_layers_of_hidden_scale: Option<usize>,
}

/// The function between gate and product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// GELU in its approximation by tanh.
    GeluTanh,
}

/// Which layers see only the last positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    /// None, whatever the file says.
    None,
    /// All, if the file has a window and does not say that it is not used.
    All,
    /// Those from `max_window_layers` on, if the file asks for windows.
    Upper,
    /// All but every sixth (or as the file says), with rotary angles of their own.
    Pattern,
}

const LLAMA: Family = Family {
    name: "llama",
    gguf: Some("llama"),
    hugging_face: "llama",
    hf_names: &names::HUGGING_FACE,
    activation: Activation::Silu,
    gguf_pairs_rows: true,
    head_norms: false,
    fused: false,
    output_norms: false,
    hf_norms_less_one: false,
    scaled_embedding: false,
    tied: false,
    windows: Windows::None,
    rope_base: 10_000.0,
    experts: false,
    gguf_layers_of_hidden_scale: None,
};

const MISTRAL: Family =
    Family { name: "mistral", gguf: None, hugging_face: "mistral", windows: Windows::All, ..LLAMA };

const MIXTRAL: Family = Family {
    name: "mixtral",
    hugging_face: "mixtral",
    hf_names: &names::HUGGING_FACE_MIXTRAL,
    rope_base: 1e6,
    experts: true,
    ..MISTRAL
};

const QWEN2: Family = Family {
    name: "qwen2",
    gguf: Some("qwen2"),
    hugging_face: "qwen2",
    gguf_pairs_rows: false,
    windows: Windows::Upper,
    ..LLAMA
};

const QWEN3: Family =
    Family { name: "qwen3", gguf: Some("qwen3"), hugging_face: "qwen3", head_norms: true, ..QWEN2 };

const QWEN3_MOE: Family = Family {
    name: "qwen3moe",
    gguf: Some("qwen3moe"),
    hugging_face: "qwen3_moe",
    windows: Windows::All,
    experts: true,
    ..QWEN3
};

const GEMMA3: Family = Family {
    name: "gemma3",
    gguf: Some("gemma3"),
    hugging_face: "gemma3_text",
    hf_names: &names::HUGGING_FACE_GEMMA3,
    activation: Activation::GeluTanh,
    gguf_pairs_rows: false,
    head_norms: true,
    output_norms: true,
    hf_norms_less_one: true,
    scaled_embedding: true,
    tied: true,
    windows: Windows::Pattern,
    rope_base: 1e6,
    // 27B.
    gguf_layers_of_hidden_scale: Some(62),
    ..LLAMA
};

const PHI3: Family = Family {
    name: "phi3",
    gguf: Some("phi3"),
    hugging_face: "phi3",
    gguf_pairs_rows: false,
    fused: true,
    windows: Windows::All,
    ..LLAMA
};

/// All families.
static FAMILIES: [Family; 8] = [LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3, PHI3];

impl Family {
    /// The family of a GGUF file with this `general.architecture`.
    pub(crate) fn of_gguf(architecture: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.gguf == Some(architecture))
    }

    /// The family of a folder with this `model_type`.
    pub(crate) fn of_hugging_face(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.hugging_face == model_type)
    }

    /// The architectures of GGUF files that are known.
    pub(crate) fn gguf_architectures() -> Vec<&'static str> {
        FAMILIES.iter().filter_map(|family| family.gguf).collect()
    }

    /// The `model_type`s that are known.
    pub(crate) fn model_types() -> Vec<&'static str> {
        FAMILIES.iter().map(|family| family.hugging_face).collect()
    }
}
