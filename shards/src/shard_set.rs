//! Opens a shard set from disk and checks its files against the manifest.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::bounded;
use crate::manifest::{self, FileEntry, MANIFEST_FILE, Manifest, ManifestError, StageEntry};

/// Bytes read per turn while hashing: large enough that system calls do not count.
const HASH_CHUNK_BYTES: usize = 1 << 20;

/// A folder with a valid manifest.
#[derive(Clone, Debug)]
pub struct ShardSet {
    /// The folder.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// The files of one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageFiles {
    /// The graph (OpenVINO IR).
    pub xml: PathBuf,
    /// The weights.
    pub bin: PathBuf,
}

/// Why a shard set or one of its files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ShardSetError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// `manifest.json` is not the JSON that this version writes.
    #[error("{} is not a manifest", path.display())]
    Parse {
        /// The manifest's path.
        path: PathBuf,
        /// Where and what.
        #[source]
        source: serde_json::Error,
    },
    /// The manifest contradicts itself or has another version.
    #[error("{} is not valid", path.display())]
    Invalid {
        /// The manifest's path.
        path: PathBuf,
        /// The field.
        #[source]
        source: ManifestError,
    },
    /// The model has no such stage.
    #[error("stage {stage} does not exist, the shard set has stages 0 to {}", n_stages - 1)]
    NoSuchStage {
        /// The stage asked for.
        stage: usize,
        /// Stages of the set.
        n_stages: usize,
    },
    /// A file's size differs from the manifest.
    #[error("{} has {found} bytes, the manifest says {expected}", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes that the manifest names.
        expected: u64,
        /// Bytes on disk.
        found: u64,
    },
    /// The list of head tokens is not what the manifest and the vocabulary allow.
    #[error(
        "entry {entry} of {} is not a token below {vocab_size} that is larger than the one before",
        path.display()
    )]
    HeadTokens {
        /// The file.
        path: PathBuf,
        /// Place in the list; its length if the list is empty or ends within an entry.
        entry: usize,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A file's content differs from the manifest.
    #[error("{} has SHA-256 {found}, the manifest says {expected}", path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// The manifest's hash.
        expected: String,
        /// The file's hash.
        found: String,
    },
}

impl ShardSet {
    /// Reads and validates `manifest.json` of a folder. No other file is touched.
    ///
    /// # Errors
    /// [`ShardSetError::Read`], [`ShardSetError::Parse`] or [`ShardSetError::Invalid`].
    pub fn open(dir: &Path) -> Result<Self, ShardSetError> {
        let path = dir.join(MANIFEST_FILE);
        let text = match bounded::read(&path, bounded::MAX_MANIFEST_BYTES) {
            Ok(text) => text,
            Err(source) => return Err(ShardSetError::Read { path, source }),
        };
        // The version comes first: a later format may well have other fields.
        #[derive(serde::Deserialize)]
        struct Versioned {
            format_version: u32,
        }
        let parsed = serde_json::from_slice::<Versioned>(&text).and_then(|versioned| {
            if versioned.format_version == manifest::FORMAT_VERSION {
                Ok(Ok(serde_json::from_slice::<Manifest>(&text)?))
            } else {
                Ok(Err(ManifestError::Version {
                    found: versioned.format_version,
                    expected: manifest::FORMAT_VERSION,
                }))
            }
        });
        let manifest = match parsed {
            Ok(Ok(manifest)) => manifest,
            Ok(Err(source)) => return Err(ShardSetError::Invalid { path, source }),
            Err(source) => return Err(ShardSetError::Parse { path, source }),
        };
        match manifest.validate() {
            Ok(()) => Ok(Self { dir: dir.to_owned(), manifest }),
            Err(source) => Err(ShardSetError::Invalid { path, source }),
        }
    }

    /// The manifest's entry of a stage.
    ///
    /// # Errors
    /// [`ShardSetError::NoSuchStage`].
    pub fn stage(&self, stage: usize) -> Result<&StageEntry, ShardSetError> {
        let n_stages = self.manifest.n_stages();
        self.manifest.stages.get(stage).ok_or(ShardSetError::NoSuchStage { stage, n_stages })
    }

    /// Paths of a stage's files. Nothing is checked: see [`ShardSet::verify_stage`].
    ///
    /// # Errors
    /// [`ShardSetError::NoSuchStage`].
    pub fn stage_files(&self, stage: usize) -> Result<StageFiles, ShardSetError> {
        let entry = self.stage(stage)?;
        Ok(StageFiles { xml: self.dir.join(&entry.xml.name), bin: self.dir.join(&entry.bin.name) })
    }

    /// Checks size and SHA-256 of a stage's files. Reads them in full.
    ///
    /// # Errors
    /// [`ShardSetError::NoSuchStage`], [`ShardSetError::Read`], [`ShardSetError::Size`] or
    /// [`ShardSetError::Hash`].
    pub fn verify_stage(&self, stage: usize) -> Result<(), ShardSetError> {
        let entry = self.stage(stage)?;
        verify_file(&self.dir, &entry.xml)?;
        verify_file(&self.dir, &entry.bin)
    }

    /// Reads and checks the token of each logits row; `None` if the head is whole.
    ///
    /// # Errors
    /// [`ShardSetError::Read`], [`ShardSetError::Size`], [`ShardSetError::Hash`] or
    /// [`ShardSetError::HeadTokens`].
    pub fn head_tokens(&self) -> Result<Option<Vec<u32>>, ShardSetError> {
        let Some(entry) = &self.manifest.head_tokens else { return Ok(None) };
        verify_file(&self.dir, entry)?;
        let path = self.dir.join(&entry.name);
        let bytes = match bounded::read(&path, bounded::MAX_TEXT_BYTES) {
            Ok(bytes) => bytes,
            Err(source) => return Err(ShardSetError::Read { path, source }),
        };
        let words = bytes.chunks_exact(manifest::HEAD_TOKEN_BYTES as usize);
        let is_whole = words.remainder().is_empty() && !bytes.is_empty();
        let tokens: Vec<u32> =
            words.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let vocab_size = self.manifest.dims.vocab_size;
        let is_wrong = |idx: usize| {
            tokens[idx] as usize >= vocab_size || idx > 0 && tokens[idx - 1] >= tokens[idx]
        };
        let wrong = (0..tokens.len()).find(|idx| is_wrong(*idx));
        match wrong.or((!is_whole).then_some(tokens.len())) {
            Some(entry) => Err(ShardSetError::HeadTokens { path, entry, vocab_size }),
            None => Ok(Some(tokens)),
        }
    }

    /// Checks size and SHA-256 of the text files, which [`crate::text::TextModel::load`] reads
    /// from the same folder.
    ///
    /// # Errors
    /// [`ShardSetError::Read`], [`ShardSetError::Size`] or [`ShardSetError::Hash`].
    pub fn verify_text(&self) -> Result<(), ShardSetError> {
        self.manifest.text_files.iter().try_for_each(|file| verify_file(&self.dir, file))
    }
}

/// Checks size and SHA-256 of a file in a folder. Reads it in full.
///
/// # Errors
/// [`ShardSetError::Read`], [`ShardSetError::Size`] or [`ShardSetError::Hash`].
pub fn verify_file(dir: &Path, entry: &FileEntry) -> Result<(), ShardSetError> {
    let path = dir.join(&entry.name);
    match hash_file(&path) {
        Err(source) => Err(ShardSetError::Read { path, source }),
        Ok((found, _)) if found != entry.bytes => {
            Err(ShardSetError::Size { path, expected: entry.bytes, found })
        }
        Ok((_, found)) if found != entry.sha256 => {
            Err(ShardSetError::Hash { path, expected: entry.sha256.clone(), found })
        }
        Ok(_) => Ok(()),
    }
}

/// Size and SHA-256 of a file.
pub(crate) fn hash_file(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; HASH_CHUNK_BYTES];
    let mut bytes = 0;
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok((bytes, manifest::hex(&hash.finalize()))),
            n => {
                hash.update(&chunk[..n]);
                bytes += n as u64;
            }
        }
    }
}
