//! The wire of Stagebus: ids, subjects, codec and messages.
//!
//! Nothing here does I/O. Every process converts between these types and its own at its edge; the
//! checks on versions, sizes and shapes live beside the types ([`messages`] have `validate`
//! methods that [`codec::decode`] calls).

pub mod access;
pub mod cloud_events;
pub mod codec;
pub mod error;
pub mod ids;
pub mod messages;
pub mod store;
pub mod subjects;
pub mod tensor;
pub mod trace;
pub mod version;
