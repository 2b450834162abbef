//! The messages, one module per conversation.

pub mod bulk;
pub mod constraint;
pub mod control;
pub mod fleet;
pub mod forward;
pub mod head;
pub mod node;
pub mod public;
pub mod sampling;
