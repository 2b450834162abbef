//! A backend without OpenVINO, for tests of scheduling and protocol.
//!
//! [`TestModel`] is a deterministic toy with the dependencies of a transformer: a layer's output
//! for a row depends on the row, its token, its position and every earlier row of the same session
//! in that layer. A lost, doubled, swapped or misplaced row, a wrong `start_pos`, a mixed-up session
//! and wrong tokens on a later stage therefore change the answer, while any split into stages gives
//! the same one.
//! Hidden states are integers of 0 to 255, so f32, f16 and bf16 carry them without loss, and a
//! damaged number changes the tokens.

mod backend;
mod fault;
mod model;

pub use backend::{TestBackend, TestOptions};
pub use fault::{Fault, FaultParseError, InjectedFault};
pub use model::TestModel;
