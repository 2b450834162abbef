//! The `llama` architecture: from GGUF metadata and tensors to stage graphs.

pub(crate) mod attention;
pub(crate) mod config;
pub(crate) mod layer;
pub(crate) mod linear;
pub(crate) mod stage;
pub(crate) mod tensors;
