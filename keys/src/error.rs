//! Errors of making and reading a folder of keys.

use std::path::PathBuf;

use stagebus_schemas::ids::{HolderName, IdError};

/// Why keys were not made or read. None of the messages holds a secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Something is there already.
    #[error("{} exists, keys are never written over; choose another folder", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The list of keys is not one.
    #[error("{} is not a list of keys", path.display())]
    List {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The list is of another version of this program.
    #[error("{} has version {found}, expected {expected}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version found.
        found: u32,
        /// Version of this program.
        expected: u32,
    },
    /// A name cannot be used.
    #[error("no key can be named {name:?}")]
    Name {
        /// The name.
        name: String,
        /// Why.
        #[source]
        source: IdError,
    },
    /// A holder of that name exists.
    #[error("a key named {name} exists; remove it first, or choose another name")]
    Taken {
        /// The name.
        name: HolderName,
    },
    /// A folder of the key folder has that name.
    #[error("no key can be named {name}, the broker's files are in a folder of that name")]
    Reserved {
        /// The name.
        name: HolderName,
    },
    /// No holder has that name.
    #[error("no key is named {name}")]
    Unknown {
        /// The name.
        name: HolderName,
    },
    /// Without keys the broker would let everybody in.
    #[error("{name} is the last key; without any, the broker would let everybody in")]
    Last {
        /// The name.
        name: HolderName,
    },
    /// A coordinator or worker acts for one model.
    #[error("a {role} acts for exactly one model, {found} are given")]
    Models {
        /// The role.
        role: &'static str,
        /// Models given.
        found: usize,
    },
    /// Only a client needs leave to read results.
    #[error("only a client is given the right to read results, not a {role}")]
    Results {
        /// The role.
        role: &'static str,
    },
    /// A text is no public key of a user.
    #[error("{found:?} is no public nkey of a user, expected the text that starts with U")]
    PublicKey {
        /// The text.
        found: String,
    },
    /// The system gives no randomness, or the key cannot be written as text.
    #[error("an nkey cannot be made")]
    Nkey(#[source] nkeys::error::Error),
    /// A certificate cannot be made.
    #[error("a certificate for {hosts:?} cannot be made")]
    Certificate {
        /// Names and addresses of the broker.
        hosts: Vec<String>,
        /// Why.
        #[source]
        source: rcgen::Error,
    },
}
