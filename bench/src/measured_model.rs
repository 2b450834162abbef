//! The model that scenarios measure, and its shard sets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use stagebus_shards::known_draft::{DEFAULT_HEAD_TOKENS, DraftSearch, known_draft};
use stagebus_shards::{ShardSet, WeightMode};

use crate::shard_once::{self, ShardOnceArgs};

/// The model that `cargo xtask setup` puts into the runtime folder.
const DEFAULT_MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// The model file: the named one, or that of the set-up.
///
/// # Errors
/// There is none.
pub fn find(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    let model = match named {
        Some(model) => model.to_owned(),
        None => stagebus_settings::runtime_dir()
            .context("there is no runtime folder: run `cargo xtask setup`, or give --model")?
            .join(DEFAULT_MODEL),
    };
    anyhow::ensure!(
        model.is_file(),
        "there is no model at {}: run `cargo xtask setup`, or give --model",
        model.display()
    );
    Ok(model)
}

/// The file name of a model, for results.
#[must_use]
pub fn name(model: &Path) -> String {
    model.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Shard sets of one model, by stages and weights.
#[derive(Debug, Default)]
pub struct ShardSets(BTreeMap<(usize, &'static str), PathBuf>);

impl ShardSets {
    /// Makes a set of each kind in `folder`.
    ///
    /// # Errors
    /// What the sharder says.
    pub async fn make(
        model: &Path,
        folder: &Path,
        kinds: impl IntoIterator<Item = (usize, WeightMode)>,
    ) -> anyhow::Result<Self> {
        let mut sets = Self::default();
        for (n_stages, weights) in kinds {
            if sets.0.contains_key(&(n_stages, weights.as_str())) {
                continue;
            }
            let out = folder.join(format!("set-{n_stages}-{weights}"));
            let model = model.to_owned();
            let args =
                ShardOnceArgs { model, stages: n_stages, weights, split: None, out: out.clone() };
            shard_once::in_child(&args).await?;
            sets.0.insert((n_stages, weights.as_str()), out);
        }
        Ok(sets)
    }

    /// The set with `n_stages` stages and these weights.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, n_stages: usize, weights: WeightMode) -> anyhow::Result<&Path> {
        let set = self.0.get(&(n_stages, weights.as_str()));
        set.map(PathBuf::as_path)
            .with_context(|| format!("no set with {n_stages} stages and {weights} weights"))
    }
}

/// The settings that give a coordinator the draft model of a shard set; `None` if it has none.
/// The draft's shard set is kept in `folder`.
///
/// # Errors
/// A draft model that cannot be used.
pub async fn draft_settings(set: &Path, folder: &Path) -> anyhow::Result<Option<String>> {
    let (set, cache_dir) = (set.to_owned(), folder.join("drafts"));
    let search = move || {
        let folders = stagebus_settings::draft_folders();
        let search = DraftSearch {
            folders: &folders,
            cache_dir: &cache_dir,
            head_tokens: Some(DEFAULT_HEAD_TOKENS),
        };
        anyhow::Ok(known_draft(&search, &ShardSet::open(&set)?)?)
    };
    let draft = tokio::task::spawn_blocking(search).await.context("the search failed")??;
    Ok(draft.map(|draft| format!("coordinator.draft_shards={}", draft.dir.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_model_is_named() {
        let error = find(Some(Path::new("no/such.gguf"))).expect_err("missing");
        assert!(error.to_string().contains("no/such.gguf"), "{error}");
    }

    #[test]
    fn a_missing_set_is_named() {
        let error = ShardSets::default().get(2, WeightMode::Compact).expect_err("missing");
        assert!(error.to_string().contains("2 stages and compact"), "{error}");
    }
}
