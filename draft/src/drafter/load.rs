//! From a draft model's shard set to a drafter.

use std::path::{Path, PathBuf};

use stagebus_engine::{EngineKind, EngineOptions, OpenStageError, StageRequest, open_backend};
use stagebus_shards::text::{TextError, tokenizer_fingerprint};
use stagebus_shards::{ShardSet, ShardSetError};

use super::head::{DraftHead, DraftHeadError};
use super::model::ModelDrafter;

/// Why a shard set cannot draft for a target.
#[derive(Debug, thiserror::Error)]
pub enum DraftLoadError {
    /// The draft's shard set cannot be read, or a file differs from its manifest.
    #[error("the draft model cannot be used")]
    Shards(#[from] ShardSetError),
    /// A tokenizer cannot be read.
    #[error("the tokenizers cannot be compared")]
    Tokenizer(#[from] TextError),
    /// A token id means something else to the draft than to the target.
    #[error(
        "draft model {draft} has another tokenizer than {target} \
         (fingerprints {draft_tokenizer} and {target_tokenizer}): its tokens would mean nothing"
    )]
    OtherTokenizer {
        /// Name of the draft model.
        draft: String,
        /// Its tokenizer's fingerprint.
        draft_tokenizer: String,
        /// Name of the target.
        target: String,
        /// Its tokenizer's fingerprint.
        target_tokenizer: String,
    },
    /// A draft model runs in one process, as one stage.
    #[error("{} has {n_stages} stages, a draft model has one", path.display())]
    Stages {
        /// The draft's shard set.
        path: PathBuf,
        /// Its stages.
        n_stages: usize,
    },
    /// The list of head tokens is not usable.
    #[error("the draft model's head cannot be used")]
    Head(#[from] DraftHeadError),
    /// The engine does not run the draft model.
    #[error("the draft model does not load")]
    Open(#[from] OpenStageError),
}

/// Opens a draft model's shard set and checks what can be checked without loading it: it must have
/// one stage and the target's tokenizer. Weights are not read.
///
/// # Errors
/// [`DraftLoadError`], without [`DraftLoadError::Head`] and [`DraftLoadError::Open`].
pub fn open_draft(draft_shards: &Path, target: &ShardSet) -> Result<ShardSet, DraftLoadError> {
    let shards = ShardSet::open(draft_shards)?;
    let n_stages = shards.manifest.n_stages();
    if n_stages != 1 {
        return Err(DraftLoadError::Stages { path: draft_shards.to_owned(), n_stages });
    }
    shards.verify_text()?;
    let draft_tokenizer = tokenizer_fingerprint(&shards.dir)?;
    let target_tokenizer = tokenizer_fingerprint(&target.dir)?;
    if draft_tokenizer != target_tokenizer {
        return Err(DraftLoadError::OtherTokenizer {
            draft: shards.manifest.model,
            draft_tokenizer,
            target: target.manifest.model.clone(),
            target_tokenizer,
        });
    }
    Ok(shards)
}

impl ModelDrafter {
    /// Loads a draft model, which must have one stage and the target's tokenizer. Reads its files
    /// in full and compiles the graph.
    ///
    /// `library` is OpenVINO's C library, as for [`StageRequest`]. `options` say how many threads
    /// the draft gets, how many sessions it drafts for, and how much memory their caches take.
    ///
    /// # Errors
    /// [`DraftLoadError`].
    pub fn load(
        kind: EngineKind,
        draft_shards: &Path,
        target: &ShardSet,
        library: Option<&Path>,
        options: &EngineOptions,
    ) -> Result<Self, DraftLoadError> {
        let shards = open_draft(draft_shards, target)?;
        shards.verify_stage(0)?;
        let vocab_size = shards.manifest.dims.vocab_size;
        let head = match shards.head_tokens()? {
            Some(tokens) => DraftHead::cut(vocab_size, tokens)?,
            None => DraftHead::whole(vocab_size),
        };
        let request = StageRequest { shards: &shards, stage: 0, library };
        let backend = open_backend(kind, &request, options)?;
        let context_length = options.context_limit(shards.manifest.dims.context_length);
        Ok(Self::new(backend, context_length, head))
    }
}
