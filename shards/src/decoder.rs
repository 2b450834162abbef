//! Decoder-only transformers: from a family's description, sizes and tensors to stage graphs.
//!
//! [`families`] has one row of differences for each family. Everything else is shared: a
//! difference is a field that the shared code asks for, never a copy of it.

pub(crate) mod attention;
pub(crate) mod config;
mod config_gguf;
mod config_hf;
mod experts;
pub(crate) mod families;
pub(crate) mod layer;
pub(crate) mod linear;
mod mask;
mod names;
mod rope;
pub(crate) mod stage;
pub(crate) mod tensors;
