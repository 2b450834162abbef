//! From the bytes of a public message, in an envelope or without one, to what it says.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::headers::{Found, PublicHeaders};
use super::{EnvelopeError, PROMPT_TYPE, Packing};
use crate::codec::{self, CodecError, ContentType};
use crate::messages::public::{Event, PromptRequest};

/// Reads a request.
///
/// # Errors
/// [`CodecError::CloudEvent`] for its envelope or its headers; as [`codec::decode_public`].
pub fn decode_request(
    headers: &PublicHeaders<'_>,
    payload: &[u8],
) -> Result<PromptRequest, CodecError> {
    headers.answer()?;
    decode(headers, payload, Some(PROMPT_TYPE))
}

/// Reads an event of an answer; its own field tells what it is.
///
/// # Errors
/// As [`decode_request`].
pub fn decode_event(headers: &PublicHeaders<'_>, payload: &[u8]) -> Result<Event, CodecError> {
    decode(headers, payload, None)
}

fn decode<T: DeserializeOwned>(
    headers: &PublicHeaders<'_>,
    payload: &[u8],
    kind: Option<&'static str>,
) -> Result<T, CodecError> {
    match headers.packing() {
        Packing::Plain => codec::decode_public(headers.content(payload), payload),
        Packing::Binary => {
            let declared = headers.attributes()?.check(kind)?;
            let content = declared.unwrap_or_else(|| headers.content(payload));
            codec::decode_public(content, payload)
        }
        Packing::Structured => {
            headers.check_format()?;
            structured(payload, kind)
        }
    }
}

/// The attributes of the JSON event format, and which form of the data is there.
#[derive(Deserialize)]
struct Envelope {
    specversion: Option<String>,
    id: Option<String>,
    source: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    datacontenttype: Option<String>,
    data: Option<IgnoredAny>,
    data_base64: Option<String>,
}

/// The data alone.
#[derive(Deserialize)]
#[serde(bound = "T: DeserializeOwned")]
struct Data<T> {
    data: Option<Named<T>>,
}

fn structured<T: DeserializeOwned>(
    payload: &[u8],
    kind: Option<&'static str>,
) -> Result<T, CodecError> {
    codec::check_size(payload.len())?;
    codec::check_named(ContentType::Json, payload)?;
    let Envelope { specversion, id, source, kind: found, datacontenttype, data, data_base64 } =
        from_json(payload)?;
    let owned = |text: Option<String>| text.map(Cow::Owned);
    let attributes = Found {
        specversion: owned(specversion),
        id: owned(id),
        source: owned(source),
        kind: owned(found),
        datacontenttype: owned(datacontenttype),
    };
    let content = attributes.check(kind)?.unwrap_or(ContentType::Json);
    let missing = EnvelopeError::Missing { attribute: "data" };
    match (data, data_base64) {
        (Some(_), Some(_)) => Err(EnvelopeError::DataTwice.into()),
        (None, None) => Err(missing.into()),
        (None, Some(text)) => {
            let bytes = STANDARD.decode(text).map_err(EnvelopeError::Base64)?;
            codec::decode_public(content, &bytes)
        }
        (Some(_), None) if content == ContentType::MessagePack => Err(EnvelopeError::Attribute {
            attribute: "datacontenttype",
            found: content.header().to_owned(),
            expected: "application/json beside data; other encodings stand in data_base64",
        }
        .into()),
        (Some(_), None) => {
            let Data { data } = from_json::<Data<T>>(payload)?;
            Ok(data.ok_or(missing)?.0)
        }
    }
}

fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, EnvelopeError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        EnvelopeError::Json { path, source: error.into_inner() }
    })?;
    json.end().map_err(|source| EnvelopeError::Json { path: ".".to_owned(), source })?;
    Ok(value)
}

/// A value that is a map of named fields: of a list the decoders would take the entries for the
/// fields in order.
struct Named<T>(T);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Named<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapOnly<T>(PhantomData<T>);
        impl<'de, T: DeserializeOwned> Visitor<'de> for MapOnly<T> {
            type Value = Named<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of named fields")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Named<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Named)
            }
        }
        deserializer.deserialize_map(MapOnly(PhantomData))
    }
}
