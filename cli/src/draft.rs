//! Who drafts in a local fleet: options, and the draft model that fits the target.

use std::path::{Path, PathBuf};

use stagebus_coordinator::{CoordinatorSettings, DraftChoice};
use stagebus_settings::{Overrides, ProcessArgs, draft_folders};
use stagebus_shards::ShardSet;
use stagebus_shards::known_draft::{DEFAULT_HEAD_TOKENS, DraftSearch, known_draft};

use crate::source;

/// Options that say who drafts.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DraftArgs {
    /// Who drafts tokens for the stages to verify: auto, off, ngram, model or hybrid
    #[arg(long, value_name = "NAME")]
    draft: Option<DraftChoice>,

    /// Shard set of the draft model [default: the one that is known for the model]
    #[arg(long, value_name = "DIR")]
    draft_shards: Option<PathBuf>,
}

impl DraftArgs {
    /// The first option that was given.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        match self {
            Self { draft: Some(_), .. } => Some("--draft"),
            Self { draft_shards: Some(_), .. } => Some("--draft-shards"),
            Self { draft: None, draft_shards: None } => None,
        }
    }

    /// The coordinator's settings for these options. Where neither they nor the configuration name
    /// a draft model, the known one of the target is made ready in `cache`.
    ///
    /// # Errors
    /// A configuration that cannot be read, a draft model that is there but cannot be used.
    pub(crate) fn settings(
        &self,
        target: &ShardSet,
        cache: Option<&Path>,
        process: &ProcessArgs,
    ) -> anyhow::Result<Vec<String>> {
        let configured =
            process.load::<CoordinatorSettings>("coordinator", &Overrides::default())?.process;
        let choice = self.draft.unwrap_or(configured.draft);
        let needs_model = !matches!(choice, DraftChoice::Off | DraftChoice::Ngram);
        let draft_shards = match &self.draft_shards {
            None if needs_model && configured.draft_shards.is_none() => find(target, cache)?,
            named => named.clone(),
        };
        let name = clap::ValueEnum::to_possible_value(&choice);
        let choice =
            self.draft.and(name).map(|name| format!("coordinator.draft={}", name.get_name()));
        let draft_shards =
            draft_shards.map(|dir| format!("coordinator.draft_shards={}", dir.display()));
        Ok(choice.into_iter().chain(draft_shards).collect())
    }
}

/// The shard set of the draft model that was made for the target's tokenizer.
fn find(target: &ShardSet, cache: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    let cache_dir = cache.map_or_else(source::default_cache, |cache| Ok(cache.to_owned()))?;
    let folders = draft_folders();
    let head_tokens = Some(DEFAULT_HEAD_TOKENS);
    let search = DraftSearch { folders: &folders, cache_dir: &cache_dir, head_tokens };
    Ok(known_draft(&search, target)?.map(|set| set.dir))
}
