//! What the output of a request must be: the public field, and its form between the processes.
//!
//! Public messages carry it as a map. Internally it is one text, the JSON of that map: schemas may
//! nest deeper than internal messages do, and the order of their properties counts.

use std::fmt;
use std::sync::Arc;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Longest constraint, in bytes of its JSON text: room for the largest schemas that other services
/// take, and little beside a request.
pub const MAX_CONSTRAINT_BYTES: usize = 128 << 10;

/// What the output must be, from its first character to its last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject {},
    /// A JSON value that fits a JSON schema.
    JsonSchema {
        /// The schema; properties come in its order.
        schema: Value,
    },
    /// A text that a regular expression matches as a whole.
    Regex {
        /// The expression, in the syntax of Rust's `regex`.
        pattern: String,
    },
    /// One of several texts.
    Choice {
        /// The texts.
        options: Vec<String>,
    },
    /// A text of a grammar.
    Lark {
        /// The grammar, in llguidance's variant of Lark's syntax; its start is `start`.
        grammar: String,
    },
}

impl Constraint {
    /// Its JSON text, which says all of it.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Texts, and maps whose keys are texts: they can always be represented.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The field that is empty and must not be, if there is one.
    pub(super) fn empty_field(&self) -> Option<&'static str> {
        match self {
            Self::JsonObject {} | Self::JsonSchema { .. } => None,
            Self::Regex { pattern } => pattern.is_empty().then_some("constraint.pattern"),
            Self::Choice { options } => {
                let is_empty = options.is_empty() || options.iter().any(String::is_empty);
                is_empty.then_some("constraint.options, or one of them,")
            }
            Self::Lark { grammar } => grammar.is_empty().then_some("constraint.grammar"),
        }
    }
}

/// Reads the public form: a map with names, and not a list of the fields in order.
pub(super) fn from_map<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Constraint>, D::Error> {
    let map = Option::<serde_json::Map<String, Value>>::deserialize(deserializer)?;
    map.map(|map| serde_json::from_value(Value::Object(map)))
        .transpose()
        .map_err(serde::de::Error::custom)
}

/// Writes a constraint as one text.
pub(super) fn serialize<S: Serializer>(
    constraint: &Option<Arc<Constraint>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match constraint {
        Some(constraint) => serializer.serialize_str(&constraint.to_json()),
        None => serializer.serialize_none(),
    }
}

/// Reads a constraint from one text, whose length is checked first.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Arc<Constraint>>, D::Error> {
    deserializer.deserialize_str(JsonText).map(Some)
}

struct JsonText;

impl Visitor<'_> for JsonText {
    type Value = Arc<Constraint>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the JSON text of a constraint, at most {MAX_CONSTRAINT_BYTES} bytes")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        if text.len() > MAX_CONSTRAINT_BYTES {
            return Err(E::invalid_length(text.len(), &self));
        }
        serde_json::from_str(text).map(Arc::new).map_err(E::custom)
    }
}
