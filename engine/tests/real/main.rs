//! The stateful backend with a real model: SmolLM2-135M, cut by the sharder, on the CPU.
//!
//! Needs what `cargo xtask setup` puts into `.runtime`; without it the tests fail and say so.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod chain;
mod errors;
mod steps;
mod trim;
