//! Shard sets of the model, made once for a build of the program.
//!
//! `e2e-shards/<program>/<stages>` below the build folder, where `<program>` changes whenever the
//! program is built anew. Several test processes may ask at the same time: each makes the set in a
//! folder of its own and renames it, and the first one wins.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result};

use stagebus_shards::{DEFAULT_HEAD_TOKENS, DraftSearch, ShardSet, known_draft};

use crate::program::Call;
use crate::setup;

/// The shard set of the model with `n_stages` stages and exact weights.
///
/// # Errors
/// The set-up is missing, or the model cannot be cut.
pub async fn get(n_stages: usize) -> Result<PathBuf> {
    let cache = cache()?;
    let target = cache.join(n_stages.to_string());
    if target.join("manifest.json").is_file() {
        return Ok(target);
    }
    let folder = tempfile::tempdir_in(&cache)?;
    let made = folder.path().join("set");
    Call::new(["shard", "--weights", "exact", "--stages"])
        .arg(n_stages.to_string())
        .arg("--out")
        .arg(&made)
        .arg(setup::model()?)
        .run()
        .await?
        .success()?;
    if let Err(error) = fs::rename(&made, &target)
        && !target.join("manifest.json").is_file()
    {
        return Err(error).with_context(|| format!("cannot make {}", target.display()));
    }
    Ok(target)
}

/// The shard set of the model's draft model, its head cut as a local fleet's is.
///
/// # Errors
/// The set-up is missing, or it has no draft model.
pub async fn draft() -> Result<PathBuf> {
    let target = ShardSet::open(&get(1).await?)?;
    let (folders, cache_dir) = (stagebus_settings::draft_folders(), cache()?);
    let search = DraftSearch {
        folders: &folders,
        cache_dir: &cache_dir,
        head_tokens: Some(DEFAULT_HEAD_TOKENS),
    };
    let draft = known_draft(&search, &target)?;
    Ok(draft.context("no draft model for the model: run `cargo xtask setup`")?.dir)
}

/// Copies a shard set for a test that spoils it.
///
/// # Errors
/// A file that cannot be copied.
pub fn copy(set: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(set)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// The folder for sets made by this build of the program; those of other builds are removed.
fn cache() -> Result<PathBuf> {
    let program = fs::metadata(setup::program()?)?;
    let built = program.modified()?.duration_since(UNIX_EPOCH)?.as_nanos();
    let all = setup::target_dir()?.join("e2e-shards");
    let cache = all.join(format!("{built}-{}", program.len()));
    if !cache.is_dir() {
        fs::create_dir_all(&cache)?;
        for entry in fs::read_dir(&all)? {
            let path = entry?.path();
            if path != cache {
                fs::remove_dir_all(&path)
                    .with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
    }
    Ok(cache)
}
