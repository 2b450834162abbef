//! A gateway on a real broker: with a fleet that runs the toy model, and with a coordinator that
//! says what the test wants.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

#[path = "../../../coordinator/tests/support/shard_set.rs"]
mod shard_set;

mod access;
mod answers;
mod bed;
mod calls;
mod client;
mod malformed;
mod models;
mod page;
mod patience;
mod refusals;
mod scripted;
mod shutdown;
mod tokens;
