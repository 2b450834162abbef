//! Weights of a model on their way into a stage's weight file.
//!
//! A matrix is never held in memory: its codes are written by one pass over its rows in the memory
//! map, which gathers what stands behind them in the file (zero points, scales, corrections).

pub(crate) mod coded;
pub(crate) mod layout;
pub(crate) mod rows;
pub(crate) mod store;
