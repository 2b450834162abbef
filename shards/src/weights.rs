//! Weights of a model on their way into a stage's weight file.
//!
//! A matrix is never held in memory: every constant that comes from it (codes, scales, zero
//! points, corrections) is written by one pass over its rows in the memory map.

pub(crate) mod coded;
pub(crate) mod layout;
pub(crate) mod rows;
pub(crate) mod store;
