//! Harness of the end-to-end tests: a real broker, a real model, real processes.
//!
//! The tests use what `cargo xtask setup` puts into the runtime folder and the built program
//! `stagebus`; without them they fail and say what to run. Shard sets are made once for a build of
//! the program and shared by all tests. No test waits for a fixed time: they wait for an event or
//! for a state ([`wait::until`]), with an end.
//!
//! One test at a time has running processes ([`turn::take`]): a fleet keeps every core busy, and
//! beside another one its deadlines would lose their meaning.

pub mod answer;
pub mod broker;
pub mod browser;
pub mod collector;
pub mod fleet;
pub mod foreign;
pub mod keys;
pub mod program;
pub mod scrape;
pub mod setup;
pub mod shard_sets;
pub mod terminal;
pub mod turn;
pub mod wait;
