//! What the headers of a public message say of it.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

use super::{ANSWER_HEADER, EnvelopeError, Packing, SPEC_VERSION};
use crate::codec::ContentType;

/// Beginning of the headers that hold attributes.
const PREFIX: &str = "ce-";

/// Beginning of the content types of structured CloudEvents.
const CLOUD_EVENTS: &str = "application/cloudevents";

/// Longest part of a value that an error repeats, in characters.
const MAX_FOUND: usize = 64;

/// Content types of data that are understood.
const DATA_TYPES: &str = "application/json or application/msgpack";

/// The headers of a public message that say what it is. Names are compared without case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublicHeaders<'a> {
    content_type: Option<Cow<'a, str>>,
    answer: Option<Cow<'a, str>>,
    /// Present if there is a header with an attribute.
    attributes: Option<Found<'a>>,
}

/// Attributes as they came; extensions and those without a meaning here are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Found<'a> {
    pub(super) specversion: Option<Cow<'a, str>>,
    pub(super) id: Option<Cow<'a, str>>,
    pub(super) source: Option<Cow<'a, str>>,
    pub(super) kind: Option<Cow<'a, str>>,
    pub(super) datacontenttype: Option<Cow<'a, str>>,
}

impl<'a> PublicHeaders<'a> {
    /// Reads names and values.
    pub fn read(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut read = Self::default();
        for (name, value) in headers {
            let value = Some(Cow::Borrowed(value));
            if name.eq_ignore_ascii_case("Content-Type") {
                read.content_type = value;
            } else if name.eq_ignore_ascii_case(ANSWER_HEADER) {
                read.answer = value;
            } else if let Some(attribute) = attribute_of(name) {
                let attributes = read.attributes.get_or_insert_default();
                if let Some(place) = attributes.place(attribute) {
                    *place = value;
                }
            }
        }
        read
    }

    /// The same, independent of the message.
    #[must_use]
    pub fn into_owned(self) -> PublicHeaders<'static> {
        PublicHeaders {
            content_type: self.content_type.map(owned),
            answer: self.answer.map(owned),
            attributes: self.attributes.map(Found::into_owned),
        }
    }

    /// How the message is packed.
    #[must_use]
    pub fn packing(&self) -> Packing {
        match &self.content_type {
            Some(text) if is_cloud_event(text) => Packing::Structured,
            _ if self.attributes.is_some() => Packing::Binary,
            _ => Packing::Plain,
        }
    }

    /// How the answer is to be packed: as the message itself, unless a header says otherwise.
    ///
    /// # Errors
    /// [`EnvelopeError::Answer`].
    pub fn answer(&self) -> Result<Packing, EnvelopeError> {
        match self.answer.as_deref() {
            None => Ok(self.packing()),
            Some("plain") => Ok(Packing::Plain),
            Some("structured") => Ok(Packing::Structured),
            Some("binary") => Ok(Packing::Binary),
            Some(other) => Err(EnvelopeError::Answer { found: beginning(other) }),
        }
    }

    /// Encoding of the message's data.
    #[must_use]
    pub fn content(&self, payload: &[u8]) -> ContentType {
        let declared = match self.packing() {
            Packing::Structured => Some(ContentType::Json),
            Packing::Binary => self.attributes.as_ref().and_then(Found::content),
            Packing::Plain => None,
        };
        declared.unwrap_or_else(|| ContentType::detect(self.content_type.as_deref(), payload))
    }

    /// The attributes of a binary message, decoded.
    pub(super) fn attributes(&self) -> Result<Found<'_>, EnvelopeError> {
        self.attributes.as_ref().map_or_else(|| Ok(Found::default()), Found::decoded)
    }

    /// Refuses a structured message in another format than JSON, or several in one.
    pub(super) fn check_format(&self) -> Result<(), EnvelopeError> {
        let text = self.content_type.as_deref().unwrap_or_default();
        match media_type(text).as_str() {
            CLOUD_EVENTS | super::STRUCTURED => Ok(()),
            _ => Err(EnvelopeError::Format { found: beginning(text) }),
        }
    }
}

impl Found<'_> {
    fn into_owned(self) -> Found<'static> {
        Found {
            specversion: self.specversion.map(owned),
            id: self.id.map(owned),
            source: self.source.map(owned),
            kind: self.kind.map(owned),
            datacontenttype: self.datacontenttype.map(owned),
        }
    }

    /// The headers' values as texts.
    fn decoded(&self) -> Result<Found<'_>, EnvelopeError> {
        Ok(Found {
            specversion: decoded("specversion", self.specversion.as_deref())?,
            id: decoded("id", self.id.as_deref())?,
            source: decoded("source", self.source.as_deref())?,
            kind: decoded("type", self.kind.as_deref())?,
            datacontenttype: decoded("datacontenttype", self.datacontenttype.as_deref())?,
        })
    }

    fn content(&self) -> Option<ContentType> {
        data_type(&decoded("datacontenttype", self.datacontenttype.as_deref()).ok()??)
    }

    /// Checks the attributes, and that the message is of one type if only that is expected.
    /// Returns the declared encoding of the data.
    pub(super) fn check(
        &self,
        kind: Option<&'static str>,
    ) -> Result<Option<ContentType>, EnvelopeError> {
        for (attribute, value) in [
            ("specversion", &self.specversion),
            ("id", &self.id),
            ("source", &self.source),
            ("type", &self.kind),
        ] {
            if value.as_deref().is_none_or(str::is_empty) {
                return Err(EnvelopeError::Missing { attribute });
            }
        }
        let differs = |attribute, found: &str, expected| {
            Err(EnvelopeError::Attribute { attribute, found: beginning(found), expected })
        };
        for (attribute, value, expected) in
            [("specversion", &self.specversion, Some(SPEC_VERSION)), ("type", &self.kind, kind)]
        {
            if let (Some(found), Some(expected)) = (value.as_deref(), expected)
                && found != expected
            {
                return differs(attribute, found, expected);
            }
        }
        match self.datacontenttype.as_deref() {
            None => Ok(None),
            Some(found) => match data_type(found) {
                Some(content) => Ok(Some(content)),
                None => differs("datacontenttype", found, DATA_TYPES),
            },
        }
    }
}

impl<'a> Found<'a> {
    /// Where the attribute of that name belongs, if it has a meaning here.
    fn place(&mut self, name: &str) -> Option<&mut Option<Cow<'a, str>>> {
        let places = [
            ("specversion", &mut self.specversion),
            ("id", &mut self.id),
            ("source", &mut self.source),
            ("type", &mut self.kind),
            ("datacontenttype", &mut self.datacontenttype),
        ];
        let mut places = places.into_iter();
        places.find(|(known, _)| name.eq_ignore_ascii_case(known)).map(|(_, place)| place)
    }
}

/// The attribute whose value a header holds.
fn attribute_of(header: &str) -> Option<&str> {
    let prefix = header.get(..PREFIX.len())?;
    prefix.eq_ignore_ascii_case(PREFIX).then(|| &header[PREFIX.len()..])
}

/// A header's value as text: quotes of older senders and one round of percent-encoding removed.
fn decoded<'a>(
    attribute: &'static str,
    value: Option<&'a str>,
) -> Result<Option<Cow<'a, str>>, EnvelopeError> {
    let Some(value) = value else { return Ok(None) };
    let unquoted = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let failed = |source| EnvelopeError::Header { attribute, source };
    match unquoted.filter(|text| text.contains('\\')) {
        None => {
            percent_decode_str(unquoted.unwrap_or(value)).decode_utf8().map(Some).map_err(failed)
        }
        Some(escaped) => {
            let text = unescaped(escaped);
            let text = percent_decode_str(&text).decode_utf8().map_err(failed)?;
            Ok(Some(Cow::Owned(text.into_owned())))
        }
    }
}

/// Removes the backslash before each escaped character.
fn unescaped(text: &str) -> String {
    let mut chars = text.chars();
    std::iter::from_fn(|| match chars.next()? {
        '\\' => chars.next(),
        plain => Some(plain),
    })
    .collect()
}

/// Whether a content type is that of a structured CloudEvent, in whatever format.
fn is_cloud_event(content_type: &str) -> bool {
    let text = content_type.trim_start();
    text.get(..CLOUD_EVENTS.len()).is_some_and(|text| text.eq_ignore_ascii_case(CLOUD_EVENTS))
}

/// A media type without its parameters.
fn media_type(text: &str) -> String {
    text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// The encoding that a content type of data names.
fn data_type(text: &str) -> Option<ContentType> {
    match media_type(text).as_str() {
        "application/json" | "text/json" => Some(ContentType::Json),
        "application/msgpack" | "application/x-msgpack" | "application/vnd.msgpack" => {
            Some(ContentType::MessagePack)
        }
        other => other.ends_with("+json").then_some(ContentType::Json),
    }
}

/// What an error repeats of a value.
fn beginning(text: &str) -> String {
    text.chars().take(MAX_FOUND).collect()
}

fn owned(text: Cow<'_, str>) -> Cow<'static, str> {
    Cow::Owned(text.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &str) -> Option<String> {
        decoded("id", Some(value)).ok().flatten().map(Cow::into_owned)
    }

    #[test]
    fn values_are_unquoted_and_decoded_once() {
        for (value, expected) in [
            ("plain", "plain"),
            ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro \u{20ac} \u{1f600}"),
            ("%e2%82%ac", "\u{20ac}"),
            ("%2520", "%20"),
            ("%", "%"),
            (r#""a \"b\" \\ %41""#, r#"a "b" \ A"#),
            ("\"a b\"", "a b"),
            ("\"\"", ""),
            ("\"", "\""),
        ] {
            assert_eq!(text(value).as_deref(), Some(expected), "{value}");
        }
        // An overlong form of a space.
        assert_eq!(text("%C0%A0"), None);
    }

    #[test]
    fn the_packing_is_told_by_the_headers_alone() {
        const STRUCTURED: Packing = Packing::Structured;
        for (headers, packing) in [
            (&[][..], Packing::Plain),
            (&[("Content-Type", "application/json")][..], Packing::Plain),
            (&[("content-type", "Application/CloudEvents+json; charset=utf-8")][..], STRUCTURED),
            (&[("content-type", "application/cloudevents-batch+json")][..], STRUCTURED),
            (&[("CE-Id", "1")][..], Packing::Binary),
            (&[("ce-anything", "1")][..], Packing::Binary),
            (&[("ce-id", "1"), ("Content-Type", "application/cloudevents")][..], STRUCTURED),
            (&[("ce", "1"), ("cement", "2")][..], Packing::Plain),
        ] {
            let found = PublicHeaders::read(headers.iter().copied()).packing();
            assert_eq!(found, packing, "{headers:?}");
        }
    }
}
