//! Chooses how a model is spread over machines that were measured. Pure: no I/O, no clock.
//!
//! - [`fit()`] turns the times of a few probe stages into what a layer, the head, the embedding table
//!   and the call itself cost on a device.
//! - [`plan()`] finds for every number of stages the nodes, their order, their devices and the cut,
//!   and chooses among them.
//!
//! # The time of a token
//! One session goes through the stages one after the other, so its token takes the sum of
//! - every stage's pass: call + layers, with the embedding table in the first and the head in the
//!   last stage; of several stages each has rested before, while the others ran,
//! - every message from one machine to the next, and from the last one back to the coordinator,
//!   which is on the machine of the first stage and hosts that stage, so that this hop is none,
//! - what each process needs to pass the step to its inference thread and back; the coordinator's
//!   process does so once more.
//!
//! Many sessions make as many batches as there are stages, and a round of all batches takes at least
//! the time of one batch through all stages, and at least as many passes of the slowest stage as
//! there are batches.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "estimates: rows, layers and bytes are far below 2^53"
)]

mod choose;
mod error;
mod facts;
mod fit;
mod layout;
mod search;
#[cfg(test)]
mod testing;

pub use choose::{Plan, Reason, plan};
pub use error::PlanError;
pub use facts::{DeviceCosts, Duty, LinkTimes, ModelFacts, NodeFacts, Question, RowCost, Wish};
pub use fit::{FitError, Fitted, ProbeStage, StageTimes, fit, probe_split};
pub use layout::{Layout, Placed, TokenParts};

/// Rows of the measured micro-batch of many sessions.
pub const MANY_ROWS: usize = 8;
