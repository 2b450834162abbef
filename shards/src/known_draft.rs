//! Finds the draft model that was made for a target, and its shard set.
//!
//! A draft model is a folder in the format of Hugging Face whose `config.json` names the
//! tokenizer that it was trained with (`tokenizer_sha256`, see [`tokenizer_fingerprint`]). What a
//! model is called does not matter: a draft serves every target with its tokenizer.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::hugging_face::{CONFIG_FILE, ConfigJson, HfError, WEIGHTS_FILE, n_ranked};
use crate::manifest::hex;
use crate::shard::{ShardError, ShardRequest, shard};
use crate::shard_set::{ShardSet, ShardSetError, hash_file};
use crate::text::{TextError, tokenizer_fingerprint};

/// The field of a draft's `config.json` that names its tokenizer.
const TOKENIZER_FIELD: &str = "tokenizer_sha256";

/// Rows of a draft's head that pay: with SmolLM2's draft, 98 % of what the target writes, one
/// point of agreement less than the whole head, and two thirds of the time.
pub const DEFAULT_HEAD_TOKENS: usize = 16_384;

/// Digits of a hash in a folder's name.
const KEY_DIGITS: usize = 16;

/// Where draft models are looked for, and how one is cut.
#[derive(Clone, Copy, Debug)]
pub struct DraftSearch<'a> {
    /// Folders of draft models, or folders that hold such folders; the first that fits is taken.
    pub folders: &'a [PathBuf],
    /// Where shard sets of drafts are kept. Created if it is missing.
    pub cache_dir: &'a Path,
    /// Cuts the head to this many of the most frequent tokens, if the draft ranks its tokens;
    /// `None` keeps it whole. [`DEFAULT_HEAD_TOKENS`] is a good number.
    pub head_tokens: Option<usize>,
}

/// Why a draft model that is there cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KnownDraftError {
    /// A folder or file cannot be read or made.
    #[error("cannot read or create {}", path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A draft's `config.json` is not usable.
    #[error("a draft model is not usable")]
    Config(#[from] HfError),
    /// The target's tokenizer cannot be read.
    #[error("the target's tokenizer cannot be read")]
    Tokenizer(#[from] TextError),
    /// The draft cannot be sharded.
    #[error("draft model {} cannot be sharded", path.display())]
    Shard {
        /// The draft's folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: ShardError,
    },
    /// The cached shard set cannot be opened.
    #[error("the draft's shard set cannot be opened")]
    Open(#[from] ShardSetError),
}

/// The folder of the draft model for a target; `None` if no folder has one.
///
/// # Errors
/// [`KnownDraftError::Io`], [`KnownDraftError::Config`] or [`KnownDraftError::Tokenizer`].
pub fn find_draft(
    folders: &[PathBuf],
    target: &ShardSet,
) -> Result<Option<PathBuf>, KnownDraftError> {
    let wanted = tokenizer_fingerprint(&target.dir)?;
    for folder in folders {
        for candidate in candidates(folder)? {
            let config = ConfigJson::read(&candidate.join(CONFIG_FILE))?;
            if config.text(TOKENIZER_FIELD)? == Some(&*wanted) {
                return Ok(Some(candidate));
            }
        }
    }
    Ok(None)
}

/// The one-stage shard set of the draft model for a target, made on first use; `None` if there is
/// no draft model for it.
///
/// The set appears complete or not at all; of several processes that make it, one wins and all
/// use its set. Its name in the cache follows from the content, so a changed draft is made anew.
///
/// # Errors
/// [`KnownDraftError`].
pub fn known_draft(
    search: &DraftSearch<'_>,
    target: &ShardSet,
) -> Result<Option<ShardSet>, KnownDraftError> {
    let Some(source) = find_draft(search.folders, target)? else { return Ok(None) };
    let n_ranked = n_ranked(&source);
    let head_tokens = search.head_tokens.filter(|n| *n < n_ranked);
    let out_dir = search.cache_dir.join(cache_name(&source, head_tokens, target)?);
    if !out_dir.is_dir() {
        fs::create_dir_all(search.cache_dir)
            .map_err(|source| KnownDraftError::Io { path: search.cache_dir.to_owned(), source })?;
        let request = ShardRequest {
            tokenizer_from: Some(target.dir.clone()),
            head_tokens,
            ..ShardRequest::new(source.clone(), out_dir.clone(), 1)
        };
        match shard(&request, &mut |_| {}) {
            // Another process was quicker.
            Ok(_) | Err(ShardError::OutExists { .. }) => {}
            Err(error) => return Err(KnownDraftError::Shard { path: source, source: error }),
        }
    }
    Ok(Some(ShardSet::open(&out_dir)?))
}

/// The folder itself if it is a model, else the models in it, by name.
fn candidates(folder: &Path) -> Result<Vec<PathBuf>, KnownDraftError> {
    let is_model = |path: &Path| path.join(CONFIG_FILE).is_file();
    if is_model(folder) {
        return Ok(vec![folder.to_owned()]);
    }
    let failed = |source| KnownDraftError::Io { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if is_model(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A name that changes with the draft, the cut and the target's text files.
fn cache_name(
    source: &Path,
    head_tokens: Option<usize>,
    target: &ShardSet,
) -> Result<String, KnownDraftError> {
    let mut hash = Sha256::new();
    for name in [CONFIG_FILE, WEIGHTS_FILE] {
        let path = source.join(name);
        let (_, sha256) =
            hash_file(&path).map_err(|source| KnownDraftError::Io { path, source })?;
        hash.update(sha256);
    }
    for file in &target.manifest.text_files {
        hash.update(&file.sha256);
    }
    // The token rank belongs to the weights; only its use counts.
    hash.update((head_tokens.unwrap_or(0) as u64).to_le_bytes());
    let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(format!("{name}-{}", &hex(&hash.finalize())[..KEY_DIGITS]))
}
