//! Shard sets that are good, damaged, or lack the stage.

use stagebus_shards::ShardSetError;

use super::*;
use crate::shard_set_fixture::write_shard_set;

fn settings(dir: &std::path::Path, stage: u16) -> WorkerSettings {
    WorkerSettings {
        shards: dir.to_owned(),
        stage: Some(stage),
        engine: EngineChoice::Test,
        ..WorkerSettings::default()
    }
}

#[test]
fn a_stage_knows_its_place() {
    let dir = tempfile::tempdir().expect("a folder");
    let manifest = write_shard_set(dir.path(), 3);
    let named =
        WorkerSettings { name: Some("desk-by-the-window".to_owned()), ..settings(dir.path(), 1) };
    let (stage, _) = load(&named).expect("loads");
    assert_eq!((stage.index.index(), stage.n_stages), (1, 3));
    assert_eq!((stage.first_layer, stage.end_layer), (3, 6));
    assert_eq!(stage.fingerprint, manifest.fingerprint);
    let (name, suffix) = stage.worker.as_str().rsplit_once('-').expect("a random end");
    assert_eq!(name, "desk-by-the-window");
    assert_eq!(suffix.len(), 12);
    let (again, _) = load(&named).expect("loads");
    assert_ne!(again.worker, stage.worker);
}

#[test]
fn a_damaged_file_is_named_with_both_hashes() {
    let dir = tempfile::tempdir().expect("a folder");
    let manifest = write_shard_set(dir.path(), 2);
    let bin = dir.path().join("stage-1.bin");
    std::fs::write(&bin, "kontent of stage-1.bin").expect("written");
    load(&settings(dir.path(), 0)).expect("the other stage is whole");
    let error = load(&settings(dir.path(), 1)).err().expect("damaged");
    let WorkerError::Shards(ShardSetError::Hash { path, expected, found }) = error else {
        panic!("expected a wrong hash, got {error}");
    };
    assert_eq!((path, &expected), (bin, &manifest.stages[1].bin.sha256));
    assert_ne!(found, expected);
}

#[test]
fn a_stage_that_does_not_exist_and_a_name_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    write_shard_set(dir.path(), 2);
    let error = load(&settings(dir.path(), 2)).err().expect("no such stage");
    assert!(matches!(
        error,
        WorkerError::Shards(ShardSetError::NoSuchStage { stage: 2, n_stages: 2 })
    ));
    let named = WorkerSettings { name: Some("my desk".to_owned()), ..settings(dir.path(), 0) };
    let error = load(&named).err().expect("no such name");
    assert!(matches!(error, WorkerError::Name { what: "worker.name", .. }));
    let error = load(&settings(&dir.path().join("no"), 0)).err().expect("no folder");
    assert!(matches!(error, WorkerError::Shards(ShardSetError::Read { .. })));
}
