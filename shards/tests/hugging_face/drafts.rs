//! A target finds its draft model by tokenizer.

use std::fs;

use serde_json::json;
use stagebus_shards::text::tokenizer_fingerprint;
use stagebus_shards::{DraftSearch, KnownDraftError, ShardSet, find_draft, known_draft};

use crate::model::{Folder, Workshop};

/// A target and a folder of drafts, one of which is made for it.
fn drafts() -> (Workshop, ShardSet) {
    let mut folder = Folder::default();
    let workshop = Workshop::new(&folder);
    workshop.shard(None).unwrap();
    let target = ShardSet::open(&workshop.set()).unwrap();
    let drafts = workshop.dir.path().join("drafts");
    folder.write(&drafts.join("a-unnamed"));
    folder.config.insert("tokenizer_sha256".to_owned(), json!("00"));
    folder.write(&drafts.join("b-other"));
    let fingerprint = tokenizer_fingerprint(&target.dir).unwrap();
    folder.config.insert("tokenizer_sha256".to_owned(), json!(fingerprint));
    folder.write(&drafts.join("c-right"));
    fs::write(drafts.join("a-file.gguf"), "no folder").unwrap();
    (workshop, target)
}

#[test]
fn the_draft_of_the_same_tokenizer_is_found_and_made_once() {
    let (workshop, target) = drafts();
    let root = workshop.dir.path();
    let (none, all) = ([root.join("nothing")], [root.join("nothing"), root.join("drafts")]);
    assert_eq!(find_draft(&none, &target).unwrap(), None);
    let right = root.join("drafts").join("c-right");
    assert_eq!(find_draft(&all, &target).unwrap(), Some(right.clone()));
    assert_eq!(find_draft(std::slice::from_ref(&right), &target).unwrap(), Some(right.clone()));

    let cache_dir = root.join("cache");
    let search = DraftSearch { folders: &all, cache_dir: &cache_dir, head_tokens: Some(4) };
    let set = known_draft(&search, &target).unwrap().unwrap();
    assert_eq!((set.manifest.n_stages(), set.manifest.n_head_rows()), (1, 4));
    assert_eq!(set.manifest.eos_ids, target.manifest.eos_ids);
    set.verify_stage(0).unwrap();
    set.verify_text().unwrap();
    let made = fs::metadata(set.dir.join("manifest.json")).unwrap().modified().unwrap();
    let again = known_draft(&search, &target).unwrap().unwrap();
    assert_eq!(again.dir, set.dir);
    assert_eq!(fs::metadata(set.dir.join("manifest.json")).unwrap().modified().unwrap(), made);
    let whole = DraftSearch { head_tokens: None, ..search };
    assert_ne!(known_draft(&whole, &target).unwrap().unwrap().dir, set.dir);
    // More rows than the draft ranks: the whole head.
    let large = DraftSearch { head_tokens: Some(7), ..search };
    assert_eq!(known_draft(&large, &target).unwrap().unwrap().manifest.n_head_rows(), 6);
    let nowhere = DraftSearch { folders: &none, ..search };
    assert!(known_draft(&nowhere, &target).unwrap().is_none());
}

#[test]
fn several_that_make_the_same_draft_use_one() {
    let (workshop, target) = drafts();
    let folders = [workshop.dir.path().join("drafts")];
    let cache_dir = workshop.dir.path().join("cache");
    let search = DraftSearch { folders: &folders, cache_dir: &cache_dir, head_tokens: None };
    std::thread::scope(|scope| {
        let make = || known_draft(&search, &target).unwrap().unwrap().dir;
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
        let dirs: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(dirs.windows(2).all(|pair| pair[0] == pair[1]));
    });
    assert_eq!(fs::read_dir(&cache_dir).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn a_damaged_draft_is_an_error_that_names_it() {
    let (workshop, target) = drafts();
    let folders = [workshop.dir.path().join("drafts")];
    fs::write(folders[0].join("b-other").join("config.json"), "{").unwrap();
    match find_draft(&folders, &target) {
        Err(KnownDraftError::Config(error)) => {
            assert!(error.file().ends_with("b-other/config.json"));
        }
        other => panic!("{other:?}"),
    }
}
