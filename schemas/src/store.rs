//! How the broker keeps shard sets: buckets of its object store, in the form that every NATS
//! client reads.
//!
//! ```text
//! STAGEBUS_MODEL_<model>                          bucket; its stream is OBJ_<bucket>
//! STAGEBUS_DRAFT_<model>                          the same for the model's draft models
//! STAGEBUS_PROBE_<model>                          the same for a cut that a planner lets nodes measure
//! $O.<bucket>.C.<content>                         parts of a file, one after the other
//! $O.<bucket>.M.<name of the object, base64url>   what the file is: an ObjectInfo as JSON
//! ```
//! The object of a file is named `<fingerprint>/<file>`, so several shard sets of one model lie side
//! by side. Its content is named after fingerprint and SHA-256, so whoever stores a file again finds
//! the parts that are there.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use serde::{Deserialize, Serialize};

use crate::ids::ModelName;

/// What the names of models' buckets begin with.
const BUCKET: &str = "STAGEBUS_MODEL_";

/// What the names of the buckets of their draft models begin with.
const DRAFT_BUCKET: &str = "STAGEBUS_DRAFT_";

/// What the names of the buckets of the cuts that nodes measure begin with.
const PROBE_BUCKET: &str = "STAGEBUS_PROBE_";

/// What the name of a bucket's stream begins with.
const STREAM: &str = "OBJ_";

/// What a digest begins with.
const DIGEST: &str = "SHA-256=";

/// Digits of a fingerprint in the name of a content.
const FINGERPRINT_DIGITS: usize = 16;

/// Digits of a file's SHA-256 in the name of a content.
const HASH_DIGITS: usize = 32;

/// Bytes of a SHA-256.
const HASH_BYTES: usize = 32;

/// The bucket of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    name: String,
}

impl Bucket {
    /// The bucket that holds a model's shard sets.
    #[must_use]
    pub fn of(model: &ModelName) -> Self {
        Self { name: format!("{BUCKET}{model}") }
    }

    /// The bucket that holds the shard sets of draft models for a model.
    #[must_use]
    pub fn of_drafts(model: &ModelName) -> Self {
        Self { name: format!("{DRAFT_BUCKET}{model}") }
    }

    /// The bucket that holds a cut of a model for nodes to measure, as long as a plan is made.
    #[must_use]
    pub fn of_probe(model: &ModelName) -> Self {
        Self { name: format!("{PROBE_BUCKET}{model}") }
    }

    /// The model whose shard sets a stream holds; nothing if it is no model's bucket.
    #[must_use]
    pub fn model_of_stream(stream: &str) -> Option<ModelName> {
        let model = stream.strip_prefix(STREAM)?.strip_prefix(BUCKET)?;
        ModelName::new(model).ok()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the stream behind it.
    #[must_use]
    pub fn stream(&self) -> String {
        format!("{STREAM}{}", self.name)
    }

    /// Subject of the parts of a content.
    #[must_use]
    pub fn parts(&self, content: &str) -> String {
        format!("$O.{}.C.{content}", self.name)
    }

    /// Subjects of the parts of all contents.
    #[must_use]
    pub fn all_parts(&self) -> String {
        format!("$O.{}.C.>", self.name)
    }

    /// The content whose parts are on a subject.
    #[must_use]
    pub fn content_of<'a>(&self, subject: &'a str) -> Option<&'a str> {
        subject.strip_prefix("$O.")?.strip_prefix(self.name.as_str())?.strip_prefix(".C.")
    }

    /// Subject of what an object is.
    #[must_use]
    pub fn info(&self, object: &str) -> String {
        format!("$O.{}.M.{}", self.name, URL_SAFE.encode(object))
    }

    /// Subjects of what all objects are.
    #[must_use]
    pub fn all_infos(&self) -> String {
        format!("$O.{}.M.>", self.name)
    }

    /// Everything in it.
    #[must_use]
    pub fn all(&self) -> String {
        format!("$O.{}.>", self.name)
    }
}

/// Name of the object that holds a file of a shard set.
#[must_use]
pub fn object_name(fingerprint: &str, file: &str) -> String {
    format!("{fingerprint}/{file}")
}

/// Fingerprint and file of an object; nothing if it is none of ours.
#[must_use]
pub fn parse_object_name(object: &str) -> Option<(&str, &str)> {
    object.split_once('/').filter(|(fingerprint, _)| is_hash(fingerprint))
}

/// Name of a file's content, from two hashes in hexadecimal.
#[must_use]
pub fn content_name(fingerprint: &str, sha256: &str) -> String {
    let digits = |hash: &str, n: usize| hash.chars().take(n).collect::<String>();
    format!("{}-{}", digits(fingerprint, FINGERPRINT_DIGITS), digits(sha256, HASH_DIGITS))
}

/// Whether a content belongs to the shard set with this fingerprint.
#[must_use]
pub fn is_content_of(content: &str, fingerprint: &str) -> bool {
    let whose = content.split('-').next().unwrap_or_default();
    whose.len() == FINGERPRINT_DIGITS && fingerprint.starts_with(whose)
}

/// What a bucket says of one object, field by field as the clients of NATS write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectInfo {
    /// Name of the object.
    pub name: String,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// How it is stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<ObjectOptions>,
    /// Name of the bucket.
    pub bucket: String,
    /// Name of the content.
    #[serde(rename = "nuid", default)]
    pub content: String,
    /// Size in bytes.
    #[serde(default)]
    pub size: u64,
    /// Number of parts.
    #[serde(rename = "chunks", default)]
    pub parts: u64,
    /// `SHA-256=` and the hash in base64url.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The object is gone; only its name is left.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deleted: bool,
}

/// How an object is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectOptions {
    /// Size of all parts but the last one.
    #[serde(rename = "max_chunk_size", default, skip_serializing_if = "Option::is_none")]
    pub part_bytes: Option<u64>,
}

impl ObjectInfo {
    /// The SHA-256 in lower-case hexadecimal; nothing if it has no valid one.
    #[must_use]
    pub fn sha256(&self) -> Option<String> {
        let digest = self.digest.as_ref()?.strip_prefix(DIGEST)?;
        let bytes = URL_SAFE.decode(digest).ok().filter(|bytes| bytes.len() == HASH_BYTES)?;
        Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// The digest of a SHA-256 in hexadecimal; nothing if it is none.
#[must_use]
pub fn digest(sha256: &str) -> Option<String> {
    let sha256 = Some(sha256).filter(|hash| is_hash(hash))?;
    let byte = |at: usize| u8::from_str_radix(&sha256[at..at + 2], 16).ok();
    let bytes: Option<Vec<u8>> = (0..sha256.len()).step_by(2).map(byte).collect();
    Some(format!("{DIGEST}{}", URL_SAFE.encode(bytes?)))
}

/// Whether a text is a SHA-256 in lower-case hexadecimal.
fn is_hash(text: &str) -> bool {
    text.len() == 2 * HASH_BYTES
        && text.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    #[test]
    fn names_of_buckets_objects_and_contents_lead_back() {
        let model: ModelName = "m-1".parse().expect("a name");
        let bucket = Bucket::of(&model);
        assert_eq!(bucket.stream(), "OBJ_STAGEBUS_MODEL_m-1");
        assert_eq!(Bucket::model_of_stream(&bucket.stream()), Some(model.clone()));
        let drafts = Bucket::of_drafts(&model).stream();
        assert_eq!(drafts, "OBJ_STAGEBUS_DRAFT_m-1");
        let probe = Bucket::of_probe(&model).stream();
        assert_eq!(probe, "OBJ_STAGEBUS_PROBE_m-1");
        for other in [
            drafts.as_str(),
            &probe,
            "STAGEBUS_MODEL_m-1",
            "OBJ_m-1",
            "OBJ_STAGEBUS_MODEL_",
            "KV_x",
        ] {
            assert_eq!(Bucket::model_of_stream(other), None, "{other}");
        }
        let content = content_name(HASH, HASH);
        assert_eq!(bucket.content_of(&bucket.parts(&content)), Some(content.as_str()));
        assert_eq!(bucket.content_of(&bucket.info("x")), None);
        assert!(is_content_of(&content, HASH));
        assert!(!is_content_of(&content, &HASH.replace("00", "ff")));
        assert!(!is_content_of("", HASH) && !is_content_of("0001", HASH));
        let object = object_name(HASH, "stage-0.bin");
        assert_eq!(parse_object_name(&object), Some((HASH, "stage-0.bin")));
        assert_eq!(parse_object_name("mine/stage-0.bin"), None);
    }

    #[test]
    fn an_info_is_what_other_clients_write() {
        // The digest as the client of another language wrote it for these bytes.
        let digest = digest(HASH).expect("a hash");
        assert_eq!(digest, "SHA-256=AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=");
        let text = format!(
            r#"{{"name":"a","description":"","headers":null,"options":{{"max_chunk_size":131072}},
            "bucket":"b","nuid":"n","size":5,"chunks":1,"mtime":"2026-01-01T00:00:00Z",
            "digest":"{digest}"}}"#
        );
        let info: ObjectInfo = serde_json::from_str(&text).expect("valid");
        assert_eq!(info.sha256().as_deref(), Some(HASH));
        assert_eq!((info.parts, info.content.as_str(), info.deleted), (1, "n", false));
        let again = serde_json::to_string(&info).expect("it can be written");
        assert_eq!(serde_json::from_str::<ObjectInfo>(&again).expect("valid"), info);
        for wrong in
            ["", "SHA-256=", "SHA-256=AAEC", "MD5=AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="]
        {
            let wrong = ObjectInfo { digest: Some(wrong.to_owned()), ..info.clone() };
            assert_eq!(wrong.sha256(), None, "{wrong:?}");
        }
        for wrong in ["", "00", &HASH.replace('a', "A"), &HASH.replace('a', "g")] {
            assert_eq!(super::digest(wrong), None, "{wrong}");
        }
    }
}
