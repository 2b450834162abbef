//! OpenAI's requests and answers, and how they map to those of the bus.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod format;
mod logprobs;
pub(crate) mod order;
