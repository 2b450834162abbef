//! Model files in, OpenVINO stage graphs and a manifest out.
//!
//! [`shard::shard`] turns a model file into a **shard set**: a folder with one graph and one
//! weight file per stage, the tokenizer, the chat template and `manifest.json`.
//! [`shard_set::ShardSet`] opens such a folder and checks it. Nothing here runs a model, talks to
//! a broker or needs OpenVINO.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    reason = "tensor code: block fields are narrow by format, sizes are checked where files are read"
)]

pub mod floats;
pub mod form;
pub mod gguf;
pub mod hugging_face;
pub mod ir_input;
pub mod known_draft;
pub mod manifest;
pub mod shard;
pub mod shard_set;
pub mod split;
pub mod text;

mod bounded;
mod decoder;
mod ir;
mod map;
mod output;
mod quant;
mod source;
mod tensor;
mod weights;

pub use floats::{CodedTensor, FloatCoding, FloatException, FloatPlan};
pub use form::{Form, FormError, StaticForm};
pub use known_draft::{DEFAULT_HEAD_TOKENS, DraftSearch, KnownDraftError, find_draft, known_draft};
pub use manifest::{Manifest, WeightMode};
pub use shard::{Progress, ShardError, ShardRequest, model_dims, shard};
pub use shard_set::{ShardSet, ShardSetError};
pub use source::SourceFormat;
