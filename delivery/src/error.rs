//! Why a shard set cannot be pushed or pulled.

use std::io;
use std::path::PathBuf;

use stagebus_bus::StoreError;
use stagebus_schemas::ids::ModelName;
use stagebus_shards::ShardSetError;

/// Why a shard set cannot be pushed or pulled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeliveryError {
    /// The broker does not store or give it.
    #[error("the broker's store cannot be used")]
    Store(#[from] StoreError),
    /// The shard set on this machine is not valid.
    #[error("the shard set cannot be used")]
    Shards(#[from] ShardSetError),
    /// A file or folder of this machine cannot be read or written.
    #[error("cannot read or write {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// There is no place for what is pulled.
    #[error("there is neither a runtime folder nor a user cache folder: set store.cache_dir")]
    NoCache,
    /// No model was named and none is stored.
    #[error(
        "the broker has no shard set: store one with `stagebus push DIR`, or name a folder with --shards"
    )]
    NothingStored,
    /// No model was named and several are stored.
    #[error(
        "the broker has shard sets of several models, choose one with --model: {}",
        models.iter().map(ModelName::as_str).collect::<Vec<_>>().join(", ")
    )]
    SeveralModels {
        /// Their names.
        models: Vec<ModelName>,
    },
    /// The model has no complete shard set.
    #[error(
        "the broker has no complete shard set of model {model}: store one with `stagebus push`, or \
         let a push that was interrupted go on"
    )]
    NoSet {
        /// The model.
        model: ModelName,
    },
    /// No shard set of the model, or more than one, has such a fingerprint.
    #[error(
        "{} complete shard sets of model {model} have a fingerprint that begins with {wanted}, \
         expected one; stored are: {}", found, stored.join(", ")
    )]
    Fingerprint {
        /// The model.
        model: ModelName,
        /// What was asked for.
        wanted: String,
        /// Shard sets that fit.
        found: usize,
        /// The fingerprints of all.
        stored: Vec<String>,
    },
    /// The store lacks a file of the manifest.
    #[error("the broker lacks {file} of the shard set {fingerprint}: push it again")]
    NotStored {
        /// The file.
        file: String,
        /// The shard set.
        fingerprint: String,
    },
    /// The store has another file than the manifest names.
    #[error(
        "{file} on the broker has {field} {found}, the manifest says {expected}: push it again"
    )]
    Differs {
        /// The file.
        file: String,
        /// What differs.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// What came has another hash than what was announced.
    #[error(
        "{file} as the broker gave it has SHA-256 {found}, expected {expected}: the store is \
         damaged, remove the shard set with `stagebus models remove` and push it again"
    )]
    Hash {
        /// The file.
        file: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The manifest is that of another model or shard set than the one that it is stored under.
    #[error("the manifest of shard set {fingerprint} says {field} {found}, expected {expected}")]
    Manifest {
        /// The fingerprint under which it is stored.
        fingerprint: String,
        /// What differs.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The manifest is too large to be one.
    #[error("the manifest of shard set {fingerprint} has {bytes} bytes, at most {limit} are read")]
    ManifestSize {
        /// The shard set.
        fingerprint: String,
        /// Its size.
        bytes: u64,
        /// The largest.
        limit: u64,
    },
    /// A thread did not survive.
    #[error("a thread that reads or writes files has ended unexpectedly")]
    Thread(#[source] io::Error),
}

impl DeliveryError {
    /// Names the path that an error of the system is about.
    pub(crate) fn file(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}
