//! What is fuzzed: everything that reads bytes from another machine or from a model's maker.
//!
//! Each function takes any bytes and must return: no panic, no memory or time out of proportion.
//! The programs in `fuzz_targets/` call them under libFuzzer (`cargo xtask fuzz`); a test of this
//! crate calls them with every kept input in `corpus/`, so that what was found once stays mended.
#![expect(
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a broken property is reported to the fuzzer by a panic, like any other fault"
)]

mod models;
mod wire;

pub use models::{folder, gguf, graph, manifest};
pub use wire::{golden, message, request};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// All targets by name.
pub const TARGETS: [(&str, Target); 6] = [
    ("message", message),
    ("request", request),
    ("manifest", manifest),
    ("gguf", gguf),
    ("folder", folder),
    ("graph", graph),
];
