//! Parts that die, freeze, vanish and lose messages: real processes, a real broker, the real model.
//!
//! Every answer must be that of the undisturbed run. Moments are random, from a fixed seed; nothing
//! is timed here. `stagebus bench faults` is the long form, with times.

mod broker;
mod clients;
mod dice;
mod disk;
mod link;
mod messages;
mod soak;
mod workers;
