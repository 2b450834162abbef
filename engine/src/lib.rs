//! Runs one stage of a model: sessions, their KV caches, steps.
//!
//! [`Backend`] is the contract. [`open_backend`] gives the backend that an [`EngineKind`] names:
//! the **paged** one runs ragged micro-batches of many sessions over shared KV blocks, the
//! **stateful** one runs one infer request per session, the one of [`testing`] computes a toy model
//! without OpenVINO, and the **static** one runs shard sets of the static form. Nothing here knows the broker; only `openvino`, the paged backend's
//! `native` module and [`trim`] call OpenVINO.
//!
//! **Example**: a whole model in one process is [`open_backend`], [`Backend::open`] and a loop of
//! [`Backend::run`] and [`argmax::greedy`].

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "tensor code: positions and token ids are checked against the model's dimensions first"
)]

pub mod argmax;
pub mod backend;
mod inputs;
mod load;
pub mod memory;
pub mod open;
pub mod openvino;
pub mod options;
pub mod paged;
mod properties;
pub mod stage;
pub mod stateful;
pub mod static_form;
pub mod testing;
pub mod trim;
mod validate;

pub use backend::{
    Backend, KvUse, OpenError, RowPath, SessionKey, StageOutput, StepDone, StepError, StepRows,
};
pub use load::{GraphMismatch, LoadError};
pub use memory::Memory;
pub use open::{OpenStageError, StageRequest, open_backend};
pub use openvino::{Runtime, RuntimeError};
pub use options::{EngineKind, EngineOptions, Profile};
pub use paged::{PagedBackend, PagedError};
pub use stage::{StageSpec, StageSpecError};
pub use stateful::StatefulBackend;
pub use static_form::StaticBackend;
pub use trim::{TrimError, TrimmedModel};
