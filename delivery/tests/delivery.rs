//! Shard sets through a real broker.

use std::fs;
use std::path::Path;

use sha2::{Digest as _, Sha256};
use stagebus_bus::{Bus, BusOptions, ModelStore, NewObject, PART_BYTES, StoreError};
use stagebus_delivery::{
    Cache, CachedSet, DeliveryError, Progress, Pulled, StoredSet, Wanted, choose, find_model, list,
    push, remove,
};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::store::{content_name, object_name};
use stagebus_settings::StoreSettings;
use stagebus_shards::manifest::{
    FORMAT_VERSION, FileEntry, MANIFEST_FILE, Manifest, ModelDims, StageEntry, WeightMode, hex,
};
use stagebus_shards::{Form, ShardSet, ShardSetError};
use tempfile::TempDir;
use tokio::sync::Notify;

/// A little more than three parts.
const WEIGHTS: usize = 3 * PART_BYTES + 17;

fn model() -> ModelName {
    "tiny".parse().expect("a name")
}

fn write(dir: &Path, name: &str, content: Vec<u8>) -> FileEntry {
    let (bytes, sha256) = (content.len() as u64, hex(&Sha256::digest(&content)));
    fs::write(dir.join(name), content).expect("it is written");
    FileEntry { name: name.to_owned(), bytes, sha256 }
}

/// Writes a shard set of two stages; `seed` makes it another one.
fn shard_set(dir: &Path, seed: u8) -> ShardSet {
    fs::create_dir_all(dir).expect("it is made");
    let stage = |index: usize| StageEntry {
        index,
        first_layer: index,
        end_layer: index + 1,
        cost_share: 0.5,
        xml: write(dir, &format!("stage-{index}.xml"), format!("graph {index}").into_bytes()),
        bin: write(dir, &format!("stage-{index}.bin"), vec![seed + u8::from(index > 0); WEIGHTS]),
    };
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        model: model().to_string(),
        architecture: "none".to_owned(),
        fingerprint: String::new(),
        source: "tiny".to_owned(),
        weights: WeightMode::Exact,
        floats: None,
        form: Form::Stateful,
        dims: ModelDims {
            n_layers: 2,
            hidden_dim: 1,
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: 1,
            vocab_size: 1,
            context_length: 1,
        },
        bos_id: None,
        eos_ids: Vec::new(),
        stages: vec![stage(0), stage(1)],
        text_files: vec![write(dir, "tokenizer.json", b"{}".to_vec()), write(dir, "empty", vec![])],
        head_tokens: None,
    };
    manifest.fingerprint = manifest.content_fingerprint();
    let text = serde_json::to_vec(&manifest).expect("it can be written");
    fs::write(dir.join(MANIFEST_FILE), text).expect("it is written");
    ShardSet::open(dir).expect("it is valid")
}

/// A broker, a connection and a folder.
struct Bench {
    _broker: LocalBroker,
    bus: Bus,
    store: ModelStore,
    folder: TempDir,
}

impl Bench {
    async fn start() -> Self {
        let broker = LocalBroker::start(BrokerOptions::default()).await.expect("it starts");
        let bus = Bus::connect(BusOptions::new(broker.url(), "test")).await.expect("it is up");
        let store = ModelStore::new(&bus, &model());
        let folder = tempfile::tempdir().expect("a folder");
        Self { _broker: broker, bus, store, folder }
    }

    /// Makes a shard set and pushes it.
    async fn pushed(&self, seed: u8) -> ShardSet {
        let set = shard_set(&self.folder.path().join(format!("set-{seed}")), seed);
        push(&self.store, &set, |_| ()).await.expect("it is stored");
        set
    }

    async fn chosen(&self, wanted: Option<&str>) -> StoredSet {
        let sets = list(&self.store).await.expect("they are listed");
        choose(&model(), &sets, wanted).expect("there is one").clone()
    }

    /// The cache, with room for so many MiB beside what is in use.
    fn cache(&self, cache_mib: u64) -> Cache {
        let cache_dir = Some(self.folder.path().join("cache"));
        Cache::new(&StoreSettings { cache_dir, cache_mib }).expect("a folder is named")
    }

    async fn pull(
        &self,
        set: &StoredSet,
        wanted: &Wanted,
    ) -> Result<(CachedSet, Pulled), DeliveryError> {
        let cache = self.cache(0);
        let cached = cache.open(&self.store, set).await?;
        let pulled = cache.pull((&self.store, set), &cached, wanted, |_| ()).await?;
        Ok((cached, pulled))
    }

    /// Stores a file as another program would.
    async fn put(&self, set: &StoredSet, file: &str, sha256: &str, content: &[u8]) {
        let object = NewObject {
            name: object_name(&set.fingerprint, file),
            content: content_name(&set.fingerprint, &hex(&Sha256::digest(content))),
            bytes: content.len() as u64,
            sha256: sha256.to_owned(),
            description: String::new(),
        };
        let mut writer = self.store.writer(object).await.expect("it begins");
        // What is there from an earlier time is not stored twice.
        let known = usize::try_from(writer.position()).expect("few");
        for part in content.chunks(PART_BYTES).skip(known) {
            writer.write(part.to_vec().into()).await.expect("it is sent");
        }
        writer.finish().await.expect("it is stored");
    }
}

#[tokio::test]
async fn a_process_gets_what_it_needs_once() {
    let bench = Bench::start().await;
    let set = bench.pushed(1).await;
    assert_eq!(find_model(&bench.bus, None).await.expect("the only one"), model());
    let stored = bench.chosen(None).await;
    let names: Vec<&str> = stored.files.keys().map(String::as_str).collect();
    let all =
        ["empty", "stage-0.bin", "stage-0.xml", "stage-1.bin", "stage-1.xml", "tokenizer.json"];
    assert_eq!(names, all);

    let (cached, first) = bench.pull(&stored, &Wanted::Stage(0)).await.expect("it comes");
    assert_eq!((first.fetched_bytes, first.kept_bytes), (WEIGHTS as u64 + 7, 0));
    assert_eq!(first.fetched_parts, 5);
    cached.shards.verify_stage(0).expect("it is whole");
    let files = |dir: &Path| {
        let entries = fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry"));
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    };
    assert_eq!(files(&cached.shards.dir), [MANIFEST_FILE, "stage-0.bin", "stage-0.xml"]);

    // A coordinator, then a worker of the last stage, which needs the tokenizer too.
    let (_, text) = bench.pull(&stored, &Wanted::Text { hosted: None }).await.expect("it comes");
    assert_eq!((text.fetched_bytes, text.kept_bytes), (2, 0));
    let (_, last) = bench.pull(&stored, &Wanted::Stage(1)).await.expect("it comes");
    assert_eq!((last.fetched_bytes, last.kept_bytes), (WEIGHTS as u64 + 7, 2));
    let (cached, again) = bench.pull(&stored, &Wanted::Whole).await.expect("it is there");
    assert_eq!((again.fetched_parts, again.kept_bytes), (0, 2 * (WEIGHTS as u64 + 7) + 2));
    assert_eq!(cached.shards.manifest, set.manifest);
    let none = bench.pull(&stored, &Wanted::Stage(2)).await.expect_err("two stages");
    assert!(
        matches!(none, DeliveryError::Shards(ShardSetError::NoSuchStage { stage: 2, n_stages: 2 })),
        "{none}"
    );

    // What is damaged on the disk comes anew, and nothing else.
    let spoilt = cached.shards.dir.join("stage-1.bin");
    let mut bytes = fs::read(&spoilt).expect("it is there");
    bytes[PART_BYTES + 3] ^= 1;
    fs::write(&spoilt, bytes).expect("it is written");
    let (cached, mended) = bench.pull(&stored, &Wanted::Whole).await.expect("it comes");
    assert_eq!((mended.fetched_bytes, mended.fetched_parts), (WEIGHTS as u64, 4));
    cached.shards.verify_stage(1).expect("it is whole");
}

#[tokio::test]
async fn a_pull_that_ended_goes_on_and_so_does_a_push() {
    let bench = Bench::start().await;
    let set = shard_set(&bench.folder.path().join("set"), 1);
    let stop = Notify::new();
    let pushing = push(&bench.store, &set, |progress| stop_at(&stop, progress, PART_BYTES));
    tokio::select! {
        biased;
        () = stop.notified() => {}
        done = pushing => panic!("it was not interrupted: {done:?}"),
    }
    let pushed = push(&bench.store, &set, |_| ()).await.expect("it is stored");
    let total = 2 * (WEIGHTS as u64 + 7) + 2 + manifest_bytes(&set);
    assert_eq!(pushed.sent_bytes + pushed.kept_bytes, total);
    assert!(pushed.kept_bytes > PART_BYTES as u64, "{pushed:?}");
    let again = push(&bench.store, &set, |_| ()).await.expect("it is there");
    assert_eq!((again.sent_bytes, again.kept_bytes), (0, total));

    let stored = bench.chosen(None).await;
    let cache = bench.cache(0);
    let cached = cache.open(&bench.store, &stored).await.expect("a manifest");
    let stop = Notify::new();
    let stop_pulling = |progress: &Progress| stop_at(&stop, progress, 2 * PART_BYTES);
    let from = (&bench.store, &stored);
    let pulling = cache.pull(from, &cached, &Wanted::Stage(0), stop_pulling);
    tokio::select! {
        biased;
        () = stop.notified() => {}
        done = pulling => panic!("it was not interrupted: {done:?}"),
    }
    // The writer of the one before takes what it has got to the disk, and then lets go of the file.
    let (cached, rest) = bench.pull(&stored, &Wanted::Stage(0)).await.expect("it comes");
    assert_eq!(rest.fetched_bytes + rest.kept_bytes, WEIGHTS as u64 + 7);
    assert!(rest.kept_bytes > 0, "nothing was kept");
    cached.shards.verify_stage(0).expect("it is whole");
}

/// Asks for the end once more than so many bytes are where they should be.
fn stop_at(stop: &Notify, progress: &Progress, bytes: usize) {
    if progress.bytes_done > bytes as u64 {
        stop.notify_one();
    }
}

fn manifest_bytes(set: &ShardSet) -> u64 {
    fs::metadata(set.dir.join(MANIFEST_FILE)).expect("it is there").len()
}

#[tokio::test]
async fn the_set_that_was_pushed_last_is_meant_and_others_stay() {
    let bench = Bench::start().await;
    let (old, new) = (bench.pushed(1).await, bench.pushed(2).await);
    let (old, new) = (&old.manifest.fingerprint, &new.manifest.fingerprint);
    assert_eq!(bench.chosen(None).await.fingerprint, *new);
    assert_eq!(bench.chosen(Some(&old[..10])).await.fingerprint, *old);
    let again = bench.pushed(1).await;
    assert_eq!(bench.chosen(None).await.fingerprint, again.manifest.fingerprint);
    remove(&bench.store, &bench.chosen(None).await).await.expect("it is removed");
    let left = list(&bench.store).await.expect("they are listed");
    assert_eq!(left.iter().map(|set| &set.fingerprint).collect::<Vec<_>>(), [new]);
    let contents = bench.store.contents().await.expect("they are counted");
    assert!(contents.keys().all(|content| content.starts_with(&new[..16])), "{contents:?}");
    // What was removed can come back.
    bench.pushed(1).await;
    let stored = bench.chosen(None).await;
    let (cached, _) = bench.pull(&stored, &Wanted::Whole).await.expect("it comes");
    assert_eq!(cached.shards.manifest.fingerprint, *old);

    // Where the cache has no room for another one, the set that nobody uses any more goes.
    let dir = cached.shards.dir.clone();
    drop(cached);
    let (other, cache) = (bench.chosen(Some(new)).await, bench.cache(2));
    let kept = cache.open(&bench.store, &other).await.expect("a manifest");
    let from = (&bench.store, &other);
    cache.pull(from, &kept, &Wanted::Stage(0), |_| ()).await.expect("it comes");
    assert!(!dir.is_dir(), "{} is still there", dir.display());
    kept.shards.verify_stage(0).expect("it is whole");
}

#[tokio::test]
async fn draft_models_lie_beside_the_model_that_they_are_for() {
    let bench = Bench::start().await;
    let target: ModelName = "target".parse().expect("a name");
    let drafts = ModelStore::of_drafts(&bench.bus, &target);
    let set = shard_set(&bench.folder.path().join("draft"), 3);
    push(&drafts, &set, |_| ()).await.expect("it is stored");
    let stored = list(&drafts).await.expect("they are listed");
    let cache = bench.cache(0);
    let cached =
        cache.open(&drafts, &stored[0]).await.expect("it has another name than the target");
    let from = (&drafts, &stored[0]);
    cache.pull(from, &cached, &Wanted::Whole, |_| ()).await.expect("it comes");
    assert_eq!(cached.shards.manifest, set.manifest);
    cached.shards.verify_stage(1).expect("it is whole");
    // It is nobody's to serve.
    let nothing = find_model(&bench.bus, None).await.expect_err("no model is stored");
    assert!(matches!(nothing, DeliveryError::NothingStored), "{nothing}");
}

#[tokio::test]
async fn what_does_not_fit_the_manifest_is_named() {
    let bench = Bench::start().await;
    let nothing = find_model(&bench.bus, None).await.expect_err("nothing is stored");
    assert!(matches!(nothing, DeliveryError::NothingStored), "{nothing}");
    // On this machine: nothing appears on the broker.
    let dir = bench.folder.path().join("spoilt");
    let spoilt = shard_set(&dir, 7);
    fs::write(dir.join("stage-1.bin"), vec![0; WEIGHTS]).expect("it is written");
    let error = push(&bench.store, &spoilt, |_| ()).await.expect_err("another hash");
    let expected = &spoilt.manifest.stages[1].bin.sha256;
    assert!(
        matches!(&error, DeliveryError::Shards(ShardSetError::Hash { path, expected: e, .. })
            if path.ends_with("stage-1.bin") && e == expected),
        "{error}"
    );
    let sets = list(&bench.store).await.expect("they are listed");
    assert!(
        sets.iter().all(|set| set.manifest.is_none() && !set.files.contains_key("stage-1.bin"))
    );
    let incomplete = choose(&model(), &sets, None).expect_err("it is not complete");
    assert!(matches!(incomplete, DeliveryError::NoSet { .. }), "{incomplete}");
    fs::write(dir.join("stage-1.bin"), vec![0; 5]).expect("it is written");
    let error = push(&bench.store, &spoilt, |_| ()).await.expect_err("another size");
    assert!(
        matches!(error, DeliveryError::Shards(ShardSetError::Size { found: 5, .. })),
        "{error}"
    );

    // On the broker: another file under the name of one of the manifest's.
    let set = bench.pushed(1).await;
    let mut stored = bench.chosen(None).await;
    let entry = set.manifest.stages[0].xml.clone();
    bench.put(&stored, &entry.name, &entry.sha256, b"graph 00").await;
    stored = bench.chosen(None).await;
    let error = bench.pull(&stored, &Wanted::Stage(0)).await.expect_err("another size");
    assert!(
        matches!(&error, DeliveryError::Differs { file, field: "size", .. } if *file == entry.name),
        "{error}"
    );
    bench.put(&stored, &entry.name, &hex(&Sha256::digest(b"graph ?")), b"graph ?").await;
    stored = bench.chosen(None).await;
    let error = bench.pull(&stored, &Wanted::Stage(0)).await.expect_err("another hash");
    assert!(
        matches!(&error, DeliveryError::Differs { field: "SHA-256", found, .. } if *found != entry.sha256),
        "{error}"
    );
    // One that claims the right hash and is not what it claims.
    bench.put(&stored, &entry.name, &entry.sha256, b"graph ?").await;
    stored = bench.chosen(None).await;
    let error = bench.pull(&stored, &Wanted::Stage(0)).await.expect_err("another content");
    assert!(
        matches!(&error, DeliveryError::Hash { file, expected, .. }
            if *file == entry.name && *expected == entry.sha256),
        "{error}"
    );
    bench.store.remove(&stored.files[&entry.name]).await.expect("it is removed");
    stored = bench.chosen(None).await;
    let error = bench.pull(&stored, &Wanted::Stage(0)).await.expect_err("it is not there");
    assert!(
        matches!(&error, DeliveryError::NotStored { file, .. } if *file == entry.name),
        "{error}"
    );
    // A push mends it.
    push(&bench.store, &set, |_| ()).await.expect("it is stored");
    stored = bench.chosen(None).await;
    bench.pull(&stored, &Wanted::Stage(0)).await.expect("it comes");

    // The manifest of another shard set.
    let other = shard_set(&bench.folder.path().join("other"), 9);
    let text = fs::read(other.dir.join(MANIFEST_FILE)).expect("it is there");
    bench.put(&stored, MANIFEST_FILE, &hex(&Sha256::digest(&text)), &text).await;
    stored = bench.chosen(None).await;
    let error = bench.pull(&stored, &Wanted::Stage(0)).await.expect_err("another set");
    assert!(
        matches!(&error, DeliveryError::Manifest { field: "fingerprint", found, .. }
            if *found == other.manifest.fingerprint),
        "{error}"
    );
    bench.put(&stored, MANIFEST_FILE, &hex(&Sha256::digest(b"{")), b"{").await;
    stored = bench.chosen(None).await;
    let error = bench.pull(&stored, &Wanted::Stage(0)).await.expect_err("no manifest");
    assert!(matches!(error, DeliveryError::Shards(ShardSetError::Parse { .. })), "{error}");
    bench.store.delete().await.expect("it is deleted");
    let error = list(&bench.store).await.expect_err("it is gone");
    assert!(matches!(error, DeliveryError::Store(StoreError::NoBucket { .. })), "{error}");
}
