//! The folder that comes out: complete or not there, never in anyone's way.

use stagebus_shards::{ShardError, ShardSet, ShardSetError, model_dims, shard};

use crate::synthetic::Synthetic;
use crate::{Workshop, names};

#[test]
fn a_shard_set_opens_and_verifies() {
    let workshop = Workshop::new(&Synthetic::default());
    let manifest = workshop.shard(2).unwrap();
    assert_eq!(workshop.entries(), ["made-up.gguf", "set"]);
    let set = ShardSet::open(&workshop.out()).unwrap();
    assert_eq!(set.manifest, manifest);
    assert_eq!(manifest.model, "made-up");
    assert_eq!((manifest.bos_id, &*manifest.eos_ids), (Some(0), &[1][..]));
    assert_eq!(manifest.dims.head_dim, 64);
    assert_eq!(model_dims(&workshop.request(2).source).unwrap(), manifest.dims);
    set.verify_text().unwrap();
    set.verify_stage(0).unwrap();
    set.verify_stage(1).unwrap();
    assert!(matches!(
        set.verify_stage(2),
        Err(ShardSetError::NoSuchStage { stage: 2, n_stages: 2 })
    ));
    let mut files = vec!["manifest.json".to_owned()];
    files.extend(manifest.text_files.iter().map(|file| file.name.clone()));
    for stage in &manifest.stages {
        files.extend([stage.xml.name.clone(), stage.bin.name.clone()]);
    }
    files.sort();
    assert_eq!(names(&workshop.out()), files);
}

#[test]
fn the_same_request_gives_the_same_fingerprint() {
    let workshop = Workshop::new(&Synthetic::default());
    let mut request = workshop.request(2);
    let first = shard(&request, &mut |_| {}).unwrap();
    request.force = true;
    request.model_name = Some("renamed".to_owned());
    let second = shard(&request, &mut |_| {}).unwrap();
    assert_eq!(first.fingerprint, second.fingerprint);
    request.n_stages = 3;
    let third = shard(&request, &mut |_| {}).unwrap();
    assert_ne!(first.fingerprint, third.fingerprint);
}

#[test]
fn progress_ends_at_its_total() {
    for (tied, n_stages) in [(true, 1), (true, 2), (false, 1), (false, 3)] {
        let workshop = Workshop::new(&Synthetic { tied, ..Synthetic::default() });
        let mut seen = Vec::new();
        let mut n_bytes = 0;
        shard(&workshop.request(n_stages), &mut |progress| {
            assert!(progress.coded.is_empty() && progress.n_stages == n_stages);
            seen.push((progress.stage, progress.bytes_done));
            n_bytes = progress.bytes_total;
        })
        .unwrap();
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&(n_stages - 1, n_bytes)), "tied {tied}, {n_stages} stages");
    }
}

#[test]
fn damaged_files_are_named() {
    let workshop = Workshop::new(&Synthetic::default());
    let manifest = workshop.shard(1).unwrap();
    let set = ShardSet::open(&workshop.out()).unwrap();
    let bin = set.stage_files(0).unwrap().bin;
    let mut bytes = std::fs::read(&bin).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&bin, &bytes).unwrap();
    match set.verify_stage(0) {
        Err(ShardSetError::Hash { path, expected, found }) => {
            assert_eq!(path, bin);
            assert_eq!(expected, manifest.stages[0].bin.sha256);
            assert_ne!(found, expected);
        }
        other => panic!("{other:?}"),
    }
    bytes.pop();
    std::fs::write(&bin, &bytes).unwrap();
    assert!(matches!(set.verify_stage(0), Err(ShardSetError::Size { path, .. }) if path == bin));
    std::fs::remove_file(&bin).unwrap();
    assert!(matches!(set.verify_stage(0), Err(ShardSetError::Read { path, .. }) if path == bin));

    let path = workshop.out().join("manifest.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let renumbered = text.replacen("\"format_version\": 1", "\"format_version\": 99", 1);
    std::fs::write(&path, renumbered).unwrap();
    assert!(matches!(ShardSet::open(&workshop.out()), Err(ShardSetError::Invalid { .. })));
    std::fs::write(&path, &text[..text.len() / 2]).unwrap();
    assert!(matches!(ShardSet::open(&workshop.out()), Err(ShardSetError::Parse { .. })));
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(ShardSet::open(&workshop.out()), Err(ShardSetError::Read { .. })));
}

#[test]
fn an_existing_set_is_replaced_only_when_asked() {
    let workshop = Workshop::new(&Synthetic::default());
    let first = workshop.shard(1).unwrap();
    assert!(matches!(workshop.shard(2), Err(ShardError::OutExists { .. })));
    assert_eq!(ShardSet::open(&workshop.out()).unwrap().manifest, first);
    let mut request = workshop.request(2);
    request.force = true;
    let second = shard(&request, &mut |_| {}).unwrap();
    assert_eq!(ShardSet::open(&workshop.out()).unwrap().manifest, second);
    assert_eq!(workshop.entries(), ["made-up.gguf", "set"]);
    assert!(!names(&workshop.out()).contains(&"set".to_owned()));
}

#[test]
fn a_foreign_folder_is_never_replaced() {
    let workshop = Workshop::new(&Synthetic::default());
    std::fs::create_dir(workshop.out()).unwrap();
    std::fs::write(workshop.out().join("thesis.txt"), "precious").unwrap();
    let mut request = workshop.request(1);
    request.force = true;
    let refused = shard(&request, &mut |_| {});
    assert!(matches!(refused, Err(ShardError::OutNotShardSet { path }) if path == workshop.out()));
    assert_eq!(names(&workshop.out()), ["thesis.txt"]);
    assert_eq!(workshop.entries(), ["made-up.gguf", "set"]);
}

#[test]
fn a_late_failure_leaves_nothing_behind() {
    let workshop = Workshop::new(&Synthetic::default());
    // Someone makes the folder while the stages are being written.
    let refused = shard(&workshop.request(1), &mut |_| {
        std::fs::create_dir_all(workshop.out()).unwrap();
        std::fs::write(workshop.out().join("thesis.txt"), "precious").unwrap();
    });
    assert!(matches!(refused, Err(ShardError::OutNotShardSet { .. })), "{refused:?}");
    assert_eq!(names(&workshop.out()), ["thesis.txt"]);
    assert_eq!(workshop.entries(), ["made-up.gguf", "set"]);
}

#[test]
fn a_missing_parent_is_made_and_a_file_in_its_place_is_named() {
    let workshop = Workshop::new(&Synthetic::default());
    let mut request = workshop.request(1);
    let parent = workshop.dir.path().join("sets");
    std::fs::write(&parent, "no folder").unwrap();
    request.out_dir = parent.join("of-mine").join("set");
    let refused = shard(&request, &mut |_| {});
    assert!(matches!(refused, Err(ShardError::Io { path, .. }) if path == request.out_dir));
    assert_eq!(workshop.entries(), ["made-up.gguf", "sets"]);
    std::fs::remove_file(&parent).unwrap();
    shard(&request, &mut |_| {}).unwrap();
    assert_eq!(names(&parent.join("of-mine")), ["set"]);
}
