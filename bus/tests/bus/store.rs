//! Shard sets in the object store of a real broker.

use bytes::Bytes;
use stagebus_bus::{
    Bus, ModelStore, NewObject, ObjectReader, PART_BYTES, Part, StoreError, StoredObject,
};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::store::Bucket;

use crate::broker::Broker;
use crate::{PATIENCE, connect};

/// A broker that keeps things in its own folder.
const CONFIG: &str = "jetstream { store_dir: \"{}/store\" }";

/// Any hash: the bus carries it and does not compute it.
const SHA256: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

fn model() -> ModelName {
    ModelName::new("m1").expect("a name")
}

fn store(bus: &Bus) -> ModelStore {
    ModelStore::new(bus, &model())
}

async fn created(bus: &Bus) -> ModelStore {
    let store = store(bus);
    store.create().await.expect("JetStream is there");
    store
}

fn object(name: &str, bytes: usize) -> NewObject {
    NewObject {
        name: name.to_owned(),
        content: format!("content-{name}"),
        bytes: bytes as u64,
        sha256: SHA256.to_owned(),
        description: String::new(),
    }
}

/// The bytes of a part: no two parts are equal.
fn part(index: usize, bytes: usize) -> Bytes {
    vec![u8::try_from(index % 251).expect("small"); bytes].into()
}

/// Sizes of the parts of a file.
fn sizes(bytes: usize) -> Vec<usize> {
    (0..bytes).step_by(PART_BYTES).map(|at| PART_BYTES.min(bytes - at)).collect()
}

async fn put(store: &ModelStore, object: NewObject) -> StoredObject {
    let sizes = sizes(usize::try_from(object.bytes).expect("small"));
    let mut writer = store.writer(object).await.expect("it begins");
    let begun = usize::try_from(writer.position()).expect("few");
    for (index, size) in sizes.into_iter().enumerate().skip(begun) {
        writer.write(part(index, size)).await.expect("it is sent");
    }
    writer.finish().await.expect("it is stored")
}

async fn next(reader: &mut ObjectReader) -> Option<Part> {
    let next = tokio::time::timeout(PATIENCE, reader.next()).await.expect("it comes or ends");
    next.expect("it can be read")
}

async fn rest(reader: &mut ObjectReader, from: usize, sizes: &[usize]) {
    for (index, &bytes) in sizes.iter().enumerate().skip(from) {
        let found = next(reader).await.expect("a part comes");
        assert_eq!(found.index, index as u64);
        assert!(found.bytes == part(index, bytes), "part {index} has other bytes");
    }
    assert_eq!(next(reader).await, None);
}

#[tokio::test]
async fn files_come_back_part_by_part_from_wherever_one_was() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = created(&bus).await;
    store.create().await.expect("it is ours");
    // More than one batch, an odd end, a whole number of parts, a small file, an empty one.
    let all = [40 * PART_BYTES + 5, 2 * PART_BYTES, 7, 0];
    for (i, &bytes) in all.iter().enumerate() {
        let stored = put(&store, object(&format!("f{i}"), bytes)).await;
        let sizes = sizes(bytes);
        let mut reader = store.reader(&stored, 0, 0);
        rest(&mut reader, 0, &sizes).await;
        assert_eq!(reader.n_fetched(), sizes.len() as u64);
        if let Some(middle) = sizes.len().checked_sub(1).filter(|&at| at > 0) {
            let mut reader = store.reader(&stored, 0, 0);
            let mut after = 0;
            for _ in 0..middle {
                after = next(&mut reader).await.expect("a part comes").sequence;
            }
            let mut reader = store.reader(&stored, middle as u64, after);
            rest(&mut reader, middle, &sizes).await;
            assert_eq!(reader.n_fetched(), 1);
        }
    }
    let objects = store.objects().await.expect("they are listed");
    let found: Vec<_> = objects.iter().map(|object| (object.name.as_str(), object.bytes)).collect();
    let expected = all.map(|bytes| bytes as u64);
    assert_eq!(found, ["f0", "f1", "f2", "f3"].into_iter().zip(expected).collect::<Vec<_>>());
    assert!(objects.iter().all(|object| object.sha256 == SHA256), "{objects:?}");
    assert_eq!(bus.stored_models().await.expect("they are listed"), [model()]);
}

#[tokio::test]
async fn a_push_that_ended_goes_on_and_only_whole_files_appear() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = created(&bus).await;
    let bytes = 3 * PART_BYTES;
    let mut writer = store.writer(object("a", bytes)).await.expect("it begins");
    for index in 0..2 {
        writer.write(part(index, PART_BYTES)).await.expect("it is sent");
    }
    let early = writer.finish().await.expect_err("a part is missing");
    assert!(matches!(early, StoreError::Parts { expected: 3, found: 2, .. }), "{early}");
    assert_eq!(store.objects().await.expect("they are listed"), []);
    let contents = store.contents().await.expect("they are counted");
    assert_eq!(contents.into_iter().collect::<Vec<_>>(), [("content-a".to_owned(), 2)]);

    let writer = store.writer(object("a", bytes)).await.expect("it goes on");
    assert_eq!((writer.position(), writer.n_stored()), (2, 2));
    drop(writer);
    let stored = put(&store, object("a", bytes)).await;
    rest(&mut store.reader(&stored, 0, 0), 0, &sizes(bytes)).await;

    // Parts of a longer file of the same name do not count for it.
    let writer = store.writer(object("a", PART_BYTES)).await.expect("it begins anew");
    assert_eq!(writer.position(), 0);

    store.remove(&stored).await.expect("it is removed");
    assert_eq!(store.objects().await.expect("they are listed"), []);
    // What was removed a moment ago can be stored again.
    let again = put(&store, object("a", bytes)).await;
    rest(&mut store.reader(&again, 0, 0), 0, &sizes(bytes)).await;
    let mut gone = store.reader(&again, 1, again.sequence);
    let missing = gone.next().await.expect_err("nothing follows");
    assert!(
        matches!(missing, StoreError::MissingPart { expected: 1, found: None, .. }),
        "{missing}"
    );
    store.delete().await.expect("it is deleted");
    let nothing = store.objects().await.expect_err("it is gone");
    assert!(matches!(nothing, StoreError::NoBucket { .. }), "{nothing}");
    assert_eq!(bus.stored_models().await.expect("they are listed"), []);
}

#[tokio::test]
async fn both_ways_survive_the_broker() {
    let mut broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = created(&bus).await;
    let (n, bytes) = (60, 60 * PART_BYTES);
    let mut writer = store.writer(object("a", bytes)).await.expect("it begins");
    for index in 0..n {
        if index == 20 || index == 45 {
            broker.kill();
            broker.restart();
        }
        writer.write(part(index, PART_BYTES)).await.expect("it is sent");
    }
    let stored = writer.finish().await.expect("it is stored");
    let contents = store.contents().await.expect("they are counted");
    assert_eq!(contents.get("content-a"), Some(&60), "a part was stored twice");

    let mut reader = store.reader(&stored, 0, 0);
    for index in 0..n {
        if index % 25 == 3 {
            broker.kill();
            broker.restart();
        }
        let found = next(&mut reader).await.expect("a part comes");
        assert_eq!(found.index, index as u64);
        assert!(found.bytes == part(index, PART_BYTES), "part {index} has other bytes");
    }
    assert_eq!(next(&mut reader).await, None);
    assert_eq!(reader.n_fetched(), 60, "a part was fetched twice");
}

#[tokio::test]
async fn two_that_store_the_same_file_store_it_once() {
    let broker = Broker::start_with(CONFIG, &[]);
    let (one, two) = (connect(&broker).await, connect(&broker).await);
    let (one, two) = (created(&one).await, created(&two).await);
    let bytes = 30 * PART_BYTES;
    let (first, second) =
        tokio::join!(put(&one, object("a", bytes)), put(&two, object("a", bytes)));
    assert_eq!(first.content, second.content);
    let contents = one.contents().await.expect("they are counted");
    assert_eq!(contents.get("content-a"), Some(&30), "a part was stored twice");
    let mut reader = one.reader(&first, 0, 0);
    rest(&mut reader, 0, &sizes(bytes)).await;
}

#[tokio::test]
async fn what_is_not_ours_is_told_by_name() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let bucket = Bucket::of(&model());
    // A stream of the bucket's name that somebody made for something else.
    let create = serde_json::json!({ "name": bucket.stream(), "subjects": ["other"] });
    let ask = async |verb: &str, body: String| {
        let subject = format!("$JS.API.STREAM.{verb}.{}", bucket.stream());
        bus.request_bytes(&subject, None, body.into(), PATIENCE).await.expect("it answers")
    };
    ask("CREATE", create.to_string()).await;
    let refused = store(&bus).create().await.expect_err("not ours");
    assert!(matches!(refused, StoreError::Mismatch { field: "subjects", .. }), "{refused}");
    ask("DELETE", String::new()).await;

    let store = created(&bus).await;
    // An object of another program, without a digest; then something that is no object at all.
    let info = format!("{{\"name\":\"x\",\"bucket\":\"{}\",\"nuid\":\"n\"}}", bucket.name());
    for (text, is_object) in [(info.as_str(), true), ("{", false)] {
        let subject = bucket.info("x");
        let put = bus.request_bytes(&subject, None, text.to_owned().into(), PATIENCE);
        put.await.expect("it is stored");
        let found = store.objects().await.expect_err("not valid");
        assert!(
            match &found {
                StoreError::Object { object, field } =>
                    is_object && (object, *field) == (&"x".to_owned(), "digest"),
                StoreError::Info { subject, .. } => !is_object && *subject == bucket.info("x"),
                _ => false,
            },
            "{found}"
        );
        ask("PURGE", String::new()).await;
    }
    // Parts that nobody of ours stored.
    let stored = put(&store, object("a", 2 * PART_BYTES)).await;
    let last = store.reader(&stored, 0, 0).next().await.expect("it is there").expect("a part");
    let subject = bucket.parts("content-a");
    let foreign = bus.request_bytes(&subject, None, part(0, 3), PATIENCE);
    foreign.await.expect("it is stored");
    let mut reader = store.reader(&stored, 2, last.sequence + 1);
    assert_eq!(next(&mut reader).await, None, "what follows the last part is not read");
    let longer = StoredObject { bytes: 3 * PART_BYTES as u64, ..stored };
    let mut reader = store.reader(&longer, 2, last.sequence + 1);
    let strange = reader.next().await.expect_err("not one of ours");
    assert!(
        matches!(strange, StoreError::MissingPart { expected: 2, found: None, .. }),
        "{strange}"
    );
}

#[tokio::test]
async fn without_jetstream_a_bucket_or_room_the_error_says_so() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    for found in [
        store(&bus).create().await.expect_err("no JetStream"),
        store(&bus).objects().await.expect_err("no JetStream"),
        bus.stored_models().await.expect_err("no JetStream"),
    ] {
        assert!(matches!(found, StoreError::NoJetStream), "{found}");
    }
    let config = "jetstream { store_dir: \"{}/store\", max_file_store: 1048576 }";
    let broker = Broker::start_with(config, &[]);
    let bus = connect(&broker).await;
    for found in [
        store(&bus).objects().await.expect_err("nothing is stored"),
        store(&bus).contents().await.expect_err("nothing is stored"),
    ] {
        assert!(
            matches!(&found, StoreError::NoBucket { model: named } if *named == model()),
            "{found}"
        );
    }
    let store = created(&bus).await;
    let mut writer = store.writer(object("a", 20 * PART_BYTES)).await.expect("it begins");
    let mut outcome = Ok(());
    for index in 0..20 {
        outcome = writer.write(part(index, PART_BYTES)).await;
        if outcome.is_err() {
            break;
        }
    }
    let full = match outcome {
        Ok(()) => writer.finish().await.map(drop),
        refused => refused,
    };
    let full = full.expect_err("no room");
    assert!(matches!(&full, StoreError::Full { object, .. } if object == "a"), "{full}");
}
