//! Shard sets: the manifest, every file's size and hash, the draft model's tokenizer.

use std::path::Path;

use stagebus_draft::drafter::{DraftLoadError, open_draft};
use stagebus_shards::{ShardSet, ShardSetError};

use super::finding::{Check, Fault, Findings};
use super::machine::line;

/// Looks at a shard set: at all of it, or at what a worker of `stage` reads. Returns it if its
/// manifest can be used.
pub fn shard_set(dir: &Path, stage: Option<u16>, findings: &mut Findings) -> Option<ShardSet> {
    let set = match ShardSet::open(dir) {
        Ok(set) => set,
        Err(error) => {
            findings.fault(fault(&error), line(&error.into()));
            return None;
        }
    };
    let stages = match stage {
        Some(stage) => vec![usize::from(stage)],
        None => (0..set.manifest.n_stages()).collect(),
    };
    let parts = stages.into_iter().map(|stage| set.verify_stage(stage));
    // A damaged file says nothing of the others: all are looked at.
    let mut is_sound = true;
    for error in parts.chain([set.verify_text()]).filter_map(Result::err) {
        is_sound = false;
        findings.fault(fault(&error), line(&error.into()));
    }
    if is_sound {
        let what = match stage {
            Some(stage) => format!("stage {stage}"),
            None => format!("{} stages", set.manifest.n_stages()),
        };
        let (model, dir) = (&set.manifest.model, dir.display());
        findings.ok(Check::Shards, format!("{dir}: {model}, {what}, every hash is right"));
    }
    Some(set)
}

fn fault(error: &ShardSetError) -> Fault {
    match error {
        ShardSetError::Read { path, .. } => {
            if path.ends_with(stagebus_shards::manifest::MANIFEST_FILE) {
                Fault::ShardSetMissing
            } else {
                Fault::ShardUnreadable
            }
        }
        ShardSetError::Parse { .. } | ShardSetError::Invalid { .. } => Fault::ManifestInvalid,
        ShardSetError::NoSuchStage { .. } => Fault::StageUnknown,
        ShardSetError::Size { .. } => Fault::ShardSizeDiffers,
        ShardSetError::Hash { .. } | ShardSetError::HeadTokens { .. } => Fault::ShardHashDiffers,
    }
}

/// Looks whether a draft model can draft for a shard set.
pub fn draft(dir: &Path, target: &ShardSet, findings: &mut Findings) {
    let opened = open_draft(dir, target).and_then(|draft| {
        draft.verify_stage(0)?;
        Ok(draft)
    });
    match opened {
        Ok(draft) => {
            let name = &draft.manifest.model;
            findings.ok(Check::Draft, format!("{name} has the tokenizer of the model"));
        }
        Err(error @ DraftLoadError::OtherTokenizer { .. }) => {
            findings.fault(Fault::DraftTokenizerDiffers, line(&error.into()));
        }
        Err(error) => findings.fault(Fault::DraftUnusable, line(&error.into())),
    }
}
