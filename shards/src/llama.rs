//! The `llama` architecture: from sizes and tensors to stage graphs.

pub(crate) mod attention;
pub(crate) mod config;
mod config_hf;
pub(crate) mod layer;
pub(crate) mod linear;
mod names;
pub(crate) mod stage;
pub(crate) mod tensors;
