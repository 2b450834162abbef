//! The keys of a fleet: an nkey for every holder, certificates for TLS, and the broker's
//! configuration that matches them.
//!
//! ```text
//! DIR/keys.json                 who holds which public key, with which rights: nothing secret
//! DIR/ca.pem  DIR/ca.key        the authority that signed the broker's certificate
//! DIR/broker/                   for the broker's machine: nats.conf, users.conf, server.pem, server.key
//! DIR/<holder>/                 for the holder's machine: stagebus.toml, seed.nk, ca.pem
//! ```
//! A folder may be copied to its machine as it is: everything in it is named relative to it.
//! Secrets (`seed.nk`, `server.key`, `ca.key`) are readable by their owner only, as is `DIR` itself.

mod certificates;
mod configuration;
mod error;
mod files;
mod folder;
mod holder;

pub use error::KeyError;
pub use folder::{KeyFolder, Plan};
pub use holder::{Grant, Holder, HolderRole};
