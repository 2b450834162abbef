//! Shard sets in the broker's object store: one bucket per model, one for its draft models, and while
//! a plan is made one for the cut that nodes measure.
//!
//! ```text
//! pusher ── parts, then what they are ──▶ OBJ_STAGEBUS_MODEL_<model> ── parts from N on ──▶ puller
//! ```
//! Files are stored in parts, many of them under way at the same time, and an object appears when all
//! of its parts are there. Parts are read with plain requests for stored messages ("direct get"), no
//! consumer: whoever reads has nothing on the broker that could get lost, and needs no right but
//! to read. Both sides go on where they were when the connection or the broker comes back.

mod error;
mod get;
mod put;

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{
    Config, DiscardPolicy, Info as StreamInfo, RetentionPolicy, StorageType,
};
use bytes::Bytes;
use serde_json::{Value, json};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::store::{Bucket, ObjectInfo, ObjectOptions, digest};

pub use error::StoreError;
pub use get::{ObjectReader, Part};
pub use put::ObjectWriter;

use crate::connection::Bus;
use crate::error::{PublishError, RequestError};
use crate::jetstream::{Api, ApiError};
use get::Messages;

/// Size of all parts of a file but the last one. Small enough for every broker's largest message,
/// and for other traffic on a slow link; large enough that the parts of a large file are few.
pub const PART_BYTES: usize = 256 << 10;

/// Room for the headers of a part in the broker's largest message.
const HEADER_BYTES: usize = 1024;

/// Header that makes a message replace all earlier ones on its subject.
const ROLLUP: &str = "Nats-Rollup";

/// Header with the name that a stored message got from its sender.
const MESSAGE_ID: &str = "Nats-Msg-Id";

/// Header with the sequence of a stored message.
const SEQUENCE: &str = "Nats-Sequence";

/// How long the answer with one stored message may take.
const LAST_TIMEOUT: Duration = Duration::from_secs(10);

/// A bucket of a model, through one connection.
#[derive(Debug, Clone)]
pub struct ModelStore {
    bus: Bus,
    api: Api,
    model: ModelName,
    bucket: Bucket,
}

/// A file to store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewObject {
    /// Name of the object.
    pub name: String,
    /// Name of its content.
    pub content: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
    /// For people who list the bucket with other tools.
    pub description: String,
}

/// A file that is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Name of the object.
    pub name: String,
    /// Name of its content.
    pub content: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Size of all parts but the last one.
    pub part_bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
    /// Rises with every object that is stored.
    pub sequence: u64,
}

/// The last part of a content.
#[derive(Debug)]
struct LastPart {
    /// Its place; nothing if nobody of ours has stored it.
    index: Option<u64>,
    sequence: u64,
}

impl Bus {
    /// Lists the models that have a bucket, in the order of their names.
    ///
    /// # Errors
    /// [`StoreError::NoJetStream`], [`StoreError::NoAnswer`], [`StoreError::Forbidden`],
    /// [`StoreError::Refused`].
    pub async fn stored_models(&self) -> Result<Vec<ModelName>, StoreError> {
        let api = Api::new(self);
        let (mut models, mut offset) = (Vec::new(), 0);
        loop {
            let asked = json!({ "offset": offset });
            let page: Value = api.request("STREAM.NAMES", &asked).await?;
            let names = page["streams"].as_array().map_or(&[][..], Vec::as_slice);
            let names = names.iter().filter_map(Value::as_str);
            models.extend(names.clone().filter_map(Bucket::model_of_stream));
            let n_names = names.count() as u64;
            offset += n_names;
            if n_names == 0 || offset >= page["total"].as_u64().unwrap_or(0) {
                models.sort();
                return Ok(models);
            }
        }
    }
}

impl ModelStore {
    /// The bucket of a model; nothing is asked or made.
    #[must_use]
    pub fn new(bus: &Bus, model: &ModelName) -> Self {
        Self::of(bus, model, Bucket::of(model))
    }

    /// The bucket of a model's draft models; nothing is asked or made.
    #[must_use]
    pub fn of_drafts(bus: &Bus, model: &ModelName) -> Self {
        Self::of(bus, model, Bucket::of_drafts(model))
    }

    /// The bucket of the cut of a model that nodes measure; nothing is asked or made.
    #[must_use]
    pub fn of_probe(bus: &Bus, model: &ModelName) -> Self {
        Self::of(bus, model, Bucket::of_probe(model))
    }

    fn of(bus: &Bus, model: &ModelName, bucket: Bucket) -> Self {
        Self { bus: bus.clone(), api: Api::new(bus), model: model.clone(), bucket }
    }

    /// Whether it holds draft models.
    #[must_use]
    pub fn is_of_drafts(&self) -> bool {
        self.bucket == Bucket::of_drafts(&self.model)
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &ModelName {
        &self.model
    }

    /// Makes the bucket, or checks the one that is there.
    ///
    /// # Errors
    /// [`StoreError::NoJetStream`], [`StoreError::NoAnswer`], [`StoreError::Forbidden`],
    /// [`StoreError::Mismatch`], [`StoreError::Refused`], [`StoreError::Publish`] with a broker
    /// whose largest message is too small.
    pub async fn create(&self) -> Result<(), StoreError> {
        let (bytes, limit) = (PART_BYTES + HEADER_BYTES, self.bus.max_payload());
        if bytes > limit {
            return Err(PublishError::PayloadTooLarge { bytes, limit }.into());
        }
        let stream = self.bucket.stream();
        let found = match self.request::<StreamInfo>("INFO", &json!({})).await {
            Ok(info) => info.config,
            Err(StoreError::NoBucket { .. }) => {
                // Somebody else may be as fast: making the same stream again changes nothing.
                return self.request::<StreamInfo>("CREATE", &self.config()).await.map(drop);
            }
            Err(error) => return Err(error),
        };
        let wanted = self.config();
        let mut subjects = found.subjects;
        subjects.sort();
        check(&stream, "subjects", &subjects, &wanted.subjects)?;
        check(&stream, "allow_direct", &found.allow_direct, &wanted.allow_direct)?;
        check(&stream, "allow_rollup_hdrs", &found.allow_rollup, &wanted.allow_rollup)
    }

    fn config(&self) -> Config {
        Config {
            name: self.bucket.stream(),
            subjects: vec![self.bucket.all_parts(), self.bucket.all_infos()],
            description: Some(format!("shard sets of stagebus, for {}", self.model)),
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            discard: DiscardPolicy::New,
            max_bytes: -1,
            max_messages: -1,
            max_messages_per_subject: -1,
            max_consumers: -1,
            allow_rollup: true,
            allow_direct: true,
            num_replicas: 1,
            ..Config::default()
        }
    }

    /// Lists what is stored in full, in the order in which it came.
    ///
    /// # Errors
    /// [`StoreError::NoBucket`], [`StoreError::Info`], [`StoreError::Object`], and what keeps a
    /// question from an answer.
    pub async fn objects(&self) -> Result<Vec<StoredObject>, StoreError> {
        self.request::<Value>("INFO", &json!({})).await?;
        let mut infos = Messages::new(self, self.bucket.all_infos(), 0);
        let mut objects = Vec::new();
        while let Some(message) = infos.next("the list").await? {
            let info: ObjectInfo = serde_json::from_slice(&message.payload)
                .map_err(|source| StoreError::Info { subject: message.subject, source })?;
            if !info.deleted {
                objects.push(stored(info, message.sequence)?);
            }
        }
        Ok(objects)
    }

    /// The last part of a content; nothing if it has none.
    async fn last_part(&self, content: &str) -> Result<Option<LastPart>, StoreError> {
        let subject = self.questions();
        let asked = json!({ "last_by_subj": self.bucket.parts(content) });
        let asked = Bytes::from(asked.to_string());
        let answer = self.bus.request_bytes(&subject, None, asked, LAST_TIMEOUT).await;
        let answer = answer.map_err(|error| match error {
            RequestError::Forbidden { violation, .. } => violation.into(),
            RequestError::Publish(error) => error.into(),
            // One that comes back does not listen here at first.
            RequestError::NoResponders { subject }
            | RequestError::Timeout { subject, .. }
            | RequestError::Decode { subject, .. } => {
                StoreError::NoAnswer { subject, timeout: LAST_TIMEOUT }
            }
        })?;
        match answer.status {
            Some(get::NO_MESSAGE) => return Ok(None),
            Some(status) => {
                return Err(StoreError::Status { subject, status, description: String::new() });
            }
            None => {}
        }
        let sequence = answer.header(SEQUENCE).and_then(|text| text.parse().ok());
        let sequence = sequence.ok_or_else(|| get::no_sequence(&subject))?;
        Ok(Some(LastPart { index: answer.header(MESSAGE_ID).and_then(get::index_in), sequence }))
    }

    /// Where stored messages are asked for.
    fn questions(&self) -> String {
        format!("$JS.API.DIRECT.GET.{}", self.bucket.stream())
    }

    /// Counts the parts of every content, those of objects that are not complete too.
    ///
    /// # Errors
    /// [`StoreError::NoBucket`], and what keeps a question from an answer.
    pub async fn contents(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        let (mut counted, mut offset) = (BTreeMap::new(), 0);
        let subjects = self.bucket.all_parts();
        loop {
            let asked = json!({ "subjects_filter": subjects, "offset": offset });
            let page: Value = self.request("INFO", &asked).await?;
            let Some(found) = page["state"]["subjects"].as_object() else { return Ok(counted) };
            offset += found.len() as u64;
            counted.extend(found.iter().filter_map(|(subject, n)| {
                let content = self.bucket.content_of(subject)?;
                Some((content.to_owned(), n.as_u64()?))
            }));
            if found.is_empty() || offset >= page["total"].as_u64().unwrap_or(0) {
                return Ok(counted);
            }
        }
    }

    /// Begins to store a file, or goes on where an earlier attempt ended. Parts that do not fit the
    /// file's size are removed first.
    ///
    /// # Errors
    /// As [`ModelStore::contents`].
    pub async fn writer(&self, object: NewObject) -> Result<ObjectWriter, StoreError> {
        ObjectWriter::open(self, object).await
    }

    /// Says that all parts of a file are there: the object appears, or replaces the one of its name.
    async fn announce(&self, object: &NewObject) -> Result<StoredObject, StoreError> {
        let no_hash = || StoreError::Object { object: object.name.clone(), field: "digest" };
        let info = ObjectInfo {
            name: object.name.clone(),
            description: Some(object.description.clone()),
            options: Some(ObjectOptions { part_bytes: Some(PART_BYTES as u64) }),
            bucket: self.bucket.name().to_owned(),
            content: object.content.clone(),
            size: object.bytes,
            parts: n_parts(object.bytes),
            digest: Some(digest(&object.sha256).ok_or_else(no_hash)?),
            deleted: false,
        };
        let subject = self.bucket.info(&object.name);
        let payload = serde_json::to_vec(&info)
            .map_err(|source| StoreError::Info { subject: subject.clone(), source })?;
        let message = PublishMessage::build().payload(payload.into()).header(ROLLUP, "sub");
        let ack = self.api.publish(&subject, message).await;
        let ack = ack.map_err(|error| self.concerning(&object.name, error))?;
        stored(info, ack.sequence)
    }

    /// Reads a file from one of its parts on; `after` is the sequence of the part before it, 0 for
    /// the first one.
    #[must_use]
    pub fn reader(&self, object: &StoredObject, part: u64, after: u64) -> ObjectReader {
        ObjectReader::new(self, object.clone(), part, after)
    }

    /// Removes an object and its content.
    ///
    /// # Errors
    /// [`StoreError::NoBucket`], [`StoreError::Forbidden`], and what keeps a question from an answer.
    pub async fn remove(&self, object: &StoredObject) -> Result<(), StoreError> {
        // Nobody begins to read what is about to go.
        self.purge(&self.bucket.info(&object.name)).await?;
        self.remove_content(&object.content).await
    }

    /// Removes the parts of a content.
    ///
    /// # Errors
    /// As [`ModelStore::remove`].
    pub async fn remove_content(&self, content: &str) -> Result<(), StoreError> {
        self.purge(&self.bucket.parts(content)).await
    }

    async fn purge(&self, subject: &str) -> Result<(), StoreError> {
        self.request::<Value>("PURGE", &json!({ "filter": subject })).await.map(drop)
    }

    /// Removes the bucket with everything in it.
    ///
    /// # Errors
    /// As [`ModelStore::remove`].
    pub async fn delete(&self) -> Result<(), StoreError> {
        self.request::<Value>("DELETE", &json!({})).await.map(drop)
    }

    /// Asks JetStream something about the stream behind the bucket.
    async fn request<T: serde::de::DeserializeOwned>(
        &self,
        verb: &str,
        asked: &impl serde::Serialize,
    ) -> Result<T, StoreError> {
        let subject = format!("STREAM.{verb}.{}", self.bucket.stream());
        let answer = self.api.request(&subject, asked).await;
        answer.map_err(|error| self.concerning(self.bucket.name(), error))
    }

    /// Says what JetStream's refusal means for the bucket, where `object` should be stored or read.
    fn concerning(&self, object: &str, error: ApiError) -> StoreError {
        match error {
            ApiError::NoStream { .. } => StoreError::NoBucket { model: self.model.clone() },
            ApiError::Refused { code, source, .. } if error::is_full(code) => {
                StoreError::Full { object: object.to_owned(), source }
            }
            other => other.into(),
        }
    }
}

/// Parts of a file of this size.
fn n_parts(bytes: u64) -> u64 {
    bytes.div_ceil(PART_BYTES as u64)
}

/// Checks what a bucket says of an object.
fn stored(info: ObjectInfo, sequence: u64) -> Result<StoredObject, StoreError> {
    let lacks = |field| StoreError::Object { object: info.name.clone(), field };
    let sha256 = info.sha256().ok_or_else(|| lacks("digest"))?;
    let part_bytes = info.options.as_ref().and_then(|options| options.part_bytes);
    let part_bytes =
        part_bytes.filter(|&bytes| bytes > 0).ok_or_else(|| lacks("max_chunk_size"))?;
    if info.content.is_empty() {
        return Err(lacks("nuid"));
    }
    if info.parts != info.size.div_ceil(part_bytes) {
        return Err(lacks("number of chunks"));
    }
    let ObjectInfo { name, content, size, .. } = info;
    Ok(StoredObject { name, content, bytes: size, part_bytes, sha256, sequence })
}

fn check<T: std::fmt::Debug + PartialEq>(
    stream: &str,
    field: &'static str,
    found: &T,
    expected: &T,
) -> Result<(), StoreError> {
    if found == expected {
        return Ok(());
    }
    Err(StoreError::Mismatch {
        stream: stream.to_owned(),
        field,
        found: format!("{found:?}"),
        expected: format!("{expected:?}"),
    })
}
