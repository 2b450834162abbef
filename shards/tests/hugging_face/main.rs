//! Model folders in the format of Hugging Face: what is read, and what is refused.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test stops at the first surprise, in its own functions too"
)]
#![expect(clippy::cast_possible_truncation, reason = "sizes of made-up models are small")]

mod coding;
mod drafts;
mod hostile;
mod model;
mod reading;
