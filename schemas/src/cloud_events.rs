//! CloudEvents 1.0 on the public subjects, by their NATS protocol binding.
//!
//! A public message is *plain* (the request or the event itself), *structured* (a JSON envelope
//! that has it in `data`) or *binary* (itself, with the envelope's attributes in headers `ce-…`).
//! The attributes of a request are checked, and named in errors, before its data is read.
//!
//! **Source**: CloudEvents 1.0.2 with its JSON event format; NATS protocol binding 1.0.3, which
//! adds the binary mode to the structured one of 1.0.2.

mod headers;
mod read;

use bytes::Bytes;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde::Serialize;

use crate::codec::{self, CodecError, ContentType};
use crate::ids::{CoordinatorId, RequestId};
use crate::messages::public::Event;
use crate::subjects::Subjects;

pub use headers::PublicHeaders;
pub use read::{decode_event, decode_request};

/// Header by which a request says how its answer is packed: `plain`, `structured` or `binary`.
pub const ANSWER_HEADER: &str = "Stagebus-Answer";

/// `Content-Type` of a structured CloudEvent.
pub const STRUCTURED: &str = "application/cloudevents+json";

/// Attribute `type` of a request.
pub const PROMPT_TYPE: &str = "io.stagebus.prompt.v1";

/// Attribute `specversion`.
const SPEC_VERSION: &str = "1.0";

/// Characters of an attribute that a header cannot hold, beside those outside ASCII.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// How a public message is packed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Packing {
    /// The request or the event itself.
    #[default]
    Plain,
    /// A CloudEvent in structured mode: a JSON object with the message in `data`.
    Structured,
    /// A CloudEvent in binary mode: the message, with the attributes in headers.
    Binary,
}

/// Why a message is not a CloudEvent that is understood. No text of a prompt is in it.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// An attribute that must be there is absent or empty.
    #[error("the CloudEvent has no {attribute}")]
    Missing {
        /// The attribute.
        attribute: &'static str,
    },
    /// An attribute has another value than is understood.
    #[error("the CloudEvent's {attribute} is {found:?}, expected {expected}")]
    Attribute {
        /// The attribute.
        attribute: &'static str,
        /// The beginning of its value.
        found: String,
        /// What is understood.
        expected: &'static str,
    },
    /// A header is not the percent-encoded form of a text.
    #[error("header ce-{attribute} is not percent-encoded UTF-8")]
    Header {
        /// The attribute.
        attribute: &'static str,
        /// Why.
        #[source]
        source: std::str::Utf8Error,
    },
    /// The envelope is not JSON, or a field has another type than it must.
    #[error("the CloudEvent cannot be read at {path}: {source}")]
    Json {
        /// The field, `.` for the whole.
        path: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The data is there in both of its forms.
    #[error("the CloudEvent has both data and data_base64, expected one of them")]
    DataTwice,
    /// `data_base64` cannot be decoded.
    #[error("the CloudEvent's data_base64 is not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// A structured CloudEvent in another format than JSON.
    #[error("Content-Type is {found:?}, expected {STRUCTURED}")]
    Format {
        /// The beginning of the header.
        found: String,
    },
    /// The header that chooses the packing of the answer has another value than is understood.
    #[error("{ANSWER_HEADER} is {found:?}, expected plain, structured or binary")]
    Answer {
        /// The beginning of the header.
        found: String,
    },
}

/// A public message that is to be sent: its payload and the headers that say what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicMessage {
    /// Value of `Content-Type`.
    pub content_type: &'static str,
    /// Names and values of the headers with attributes.
    pub attributes: Vec<(&'static str, String)>,
    /// The bytes.
    pub payload: Bytes,
}

impl PublicMessage {
    /// A message without an envelope.
    #[must_use]
    pub const fn plain(content: ContentType, payload: Bytes) -> Self {
        Self { content_type: content.header(), attributes: Vec::new(), payload }
    }

    /// Bytes that the headers with attributes take of the broker's largest message.
    #[must_use]
    pub fn attribute_bytes(&self) -> usize {
        // A colon, a space and the end of the line stand with each.
        self.attributes.iter().map(|(name, value)| name.len() + value.len() + 4).sum()
    }
}

/// The attributes of a CloudEvent that is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes<'a> {
    /// Names the event: no other event of the same source has it.
    pub id: &'a str,
    /// Who says it, as a URI-reference.
    pub source: &'a str,
    /// What it is: [`PROMPT_TYPE`], or the type of an event.
    pub kind: &'static str,
    /// What it is about, if that has a name.
    pub subject: Option<&'a str>,
}

/// Where an event of an answer comes from. Sent again, it has the same id.
#[derive(Debug, Clone, Copy)]
pub struct EventOrigin<'a> {
    /// Subjects of the model.
    pub subjects: &'a Subjects,
    /// Who answers.
    pub coordinator: &'a CoordinatorId,
    /// Name of the request; absent if the request could not be read.
    pub request: Option<&'a RequestId>,
    /// Number of the answer among those of the coordinator: clients may use a name again. Absent
    /// for a job, whose name stands for one answer.
    pub answer: Option<u64>,
    /// Number of the event in the answer.
    pub index: u64,
}

impl EventOrigin<'_> {
    /// Attribute `id`: the parts that there are, separated by dots.
    fn id(&self) -> String {
        let request = self.request.map(RequestId::to_string);
        let parts = [request, self.answer.map(|n| n.to_string()), Some(self.index.to_string())];
        parts.into_iter().flatten().collect::<Vec<_>>().join(".")
    }
}

/// Packs an event of an answer. A structured one is JSON, whatever `content` is.
///
/// # Errors
/// [`CodecError::Json`] or [`CodecError::Encode`].
pub fn encode_event(
    event: &Event,
    content: ContentType,
    packing: Packing,
    origin: &EventOrigin<'_>,
) -> Result<PublicMessage, CodecError> {
    if packing == Packing::Plain {
        return Ok(PublicMessage::plain(content, codec::encode_public(content, event)?.into()));
    }
    let attributes = Attributes {
        id: &origin.id(),
        source: &origin.subjects.source(origin.coordinator),
        kind: type_of(event),
        subject: origin.request.map(RequestId::as_str),
    };
    encode(event, content, packing, &attributes)
}

/// Packs a request or an event under attributes, which a plain message leaves out.
///
/// # Errors
/// [`CodecError::Json`] or [`CodecError::Encode`].
pub fn encode<T: Serialize>(
    data: &T,
    content: ContentType,
    packing: Packing,
    attributes: &Attributes<'_>,
) -> Result<PublicMessage, CodecError> {
    match packing {
        Packing::Plain => {
            Ok(PublicMessage::plain(content, codec::encode_public(content, data)?.into()))
        }
        Packing::Structured => {
            let payload = codec::encode_public(ContentType::Json, &structured(data, attributes))?;
            let attributes = Vec::new();
            Ok(PublicMessage { content_type: STRUCTURED, attributes, payload: payload.into() })
        }
        Packing::Binary => {
            let payload = codec::encode_public(content, data)?.into();
            let attributes = headers_of(attributes, content);
            Ok(PublicMessage { content_type: content.header(), attributes, payload })
        }
    }
}

/// Attribute `type` of an event.
const fn type_of(event: &Event) -> &'static str {
    match event {
        Event::Accepted { .. } => "io.stagebus.accepted.v1",
        Event::Status { .. } => "io.stagebus.status.v1",
        Event::Token { .. } => "io.stagebus.token.v1",
        Event::Done { .. } => "io.stagebus.done.v1",
        Event::Error { .. } => "io.stagebus.error.v1",
    }
}

/// The JSON event format.
#[derive(Serialize)]
struct Structured<'a, T> {
    specversion: &'static str,
    id: &'a str,
    source: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<&'a str>,
    datacontenttype: &'static str,
    data: &'a T,
}

fn structured<'a, T>(data: &'a T, attributes: &Attributes<'a>) -> Structured<'a, T> {
    let Attributes { id, source, kind, subject } = *attributes;
    let datacontenttype = ContentType::Json.header();
    Structured { specversion: SPEC_VERSION, id, source, kind, subject, datacontenttype, data }
}

fn headers_of(attributes: &Attributes<'_>, content: ContentType) -> Vec<(&'static str, String)> {
    let all = [
        ("ce-specversion", Some(SPEC_VERSION)),
        ("ce-id", Some(attributes.id)),
        ("ce-source", Some(attributes.source)),
        ("ce-type", Some(attributes.kind)),
        ("ce-subject", attributes.subject),
        ("ce-datacontenttype", Some(content.header())),
    ];
    let present = all.into_iter().filter_map(|(name, value)| Some((name, value?)));
    present.map(|(name, value)| (name, utf8_percent_encode(value, ESCAPED).to_string())).collect()
}
