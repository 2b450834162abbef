//! Runs one stage of a model behind the broker.
//!
//! [`run()`] is a worker from start to end; [`serve`] is the same as a process, with flags,
//! configuration, logging and the ready line. The `stage-worker` program and `stagebus worker`
//! call it.
//!
//! Inside, one owner task holds the sessions and applies one action at a time, and one thread
//! owns the backend. Rules of the sessions, scheduling policy and message forms are pure modules
//! with their own tests.

mod config;
mod error;
#[cfg(test)]
mod gated_backend;
#[cfg(test)]
mod guide_fixture;
mod heads;
mod inference;
mod intake;
mod joining;
mod load;
mod need;
mod presence;
mod process;
mod results;
mod rows;
mod run;
mod schedule;
mod sessions;
#[cfg(test)]
mod shard_set_fixture;
mod shutdown;
mod stage;
#[cfg(test)]
mod stage_fixture;
mod worker;

pub use config::{EngineChoice, ProfileChoice, SettingError, WorkerConfig, WorkerSettings};
pub use error::WorkerError;
pub use inference::CommandError;
pub use process::{
    ACCESS_REFUSED_EXIT, SHUTDOWN_DEADLINE_EXIT, WorkerArgs, serve, serve_until_signalled,
};
pub use run::{Ready, run};
pub use shutdown::Shutdown;
