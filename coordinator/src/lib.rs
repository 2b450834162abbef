//! Turns prompt requests into sessions and drives them over the stages.
//!
//! One task owns everything ([`run`]); what happens reaches it as actions, which change its state
//! without waiting. It needs a shard set's manifest, tokenizer and chat template, no weights.

mod action;
mod client;
mod config;
mod coordinator;
mod drafting;
mod encoding;
mod error;
mod fault;
mod fleet_view;
mod full_head;
mod inputs;
mod jobs;
mod logprobs;
mod outbox;
mod prefill;
mod prefixes;
mod process;
mod pulling;
mod session;
#[cfg(test)]
#[path = "../tests/support/shard_set.rs"]
mod shard_set;
mod speculation;
mod state;
mod stop;
mod timings;
mod trace;
mod transcript;

pub use config::{
    AutoOr, CoordinatorConfig, CoordinatorSettings, DraftChoice, Hosted, JobSettings, JobsMode,
    SettingError,
};
pub use coordinator::{Ready, run};
pub use error::CoordinatorError;
pub use prefill::{MIN_CHUNK_ROWS, rows_per_message};
pub use process::{CoordinatorArgs, Prepared, prepare, serve, serve_until_signalled};
