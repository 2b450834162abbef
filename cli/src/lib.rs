//! The command line of Stagebus: one module per command, the program itself is thin.

pub mod ask;
pub mod chat;
pub mod check;
pub mod client;
pub mod command;
pub mod completions;
pub mod console;
pub mod coordinator;
pub mod discover;
pub mod doctor;
pub mod draft;
pub mod drain;
pub mod exit;
pub mod gateway;
pub mod jobs;
pub mod keys;
pub mod local;
pub mod man;
pub mod progress;
pub mod shard;
pub mod source;
pub mod status;
pub mod top;
pub mod up;
pub mod weights;
