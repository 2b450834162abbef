//! The messages of a chat, as OpenAI's clients write them.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use stagebus_schemas::messages::public::{ChatMessage, FunctionCall, ToolCall, ToolKind};

use crate::api_error::ApiError;

/// One message.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    role: Role,
    content: Option<Content>,
    refusal: Option<String>,
    tool_calls: Option<Vec<CallEntry>>,
    tool_call_id: Option<String>,
    function_call: Option<IgnoredAny>,
    audio: Option<IgnoredAny>,
    /// Web pages that OpenAI's search found, in a message that is sent back.
    #[serde(rename = "annotations")]
    _annotations: Option<IgnoredAny>,
    /// Who of several people speaks: chat templates have no place for it.
    #[serde(rename = "name")]
    _name: Option<IgnoredAny>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    Function,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text or a list of parts of type text; images, audio and files are not \
                 supported here"
)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum Part {
    Text { text: String },
    Refusal { refusal: String },
}

/// A call of a function that the assistant has made before.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CallEntry {
    id: String,
    #[serde(rename = "type", default)]
    kind: ToolKind,
    function: CalledFunction,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CalledFunction {
    name: String,
    /// The text of a JSON object.
    arguments: String,
}

impl CalledFunction {
    /// Reads the arguments, which some clients leave empty where there are none.
    fn arguments(&self) -> serde_json::Result<Map<String, Value>> {
        match self.arguments.trim() {
            "" => Ok(Map::new()),
            text => serde_json::from_str(text),
        }
    }
}

impl Content {
    /// The text; parts are lines of their own.
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts = parts.into_iter().map(|part| match part {
                    Part::Text { text } => text,
                    Part::Refusal { refusal } => refusal,
                });
                texts.collect::<Vec<_>>().join("\n")
            }
        }
    }
}

/// Turns messages into those that chat templates know.
///
/// # Errors
/// No message, one without text, calls and results where they cannot be.
pub(crate) fn to_chat(messages: Vec<Message>) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(Some("messages".to_owned()), "messages is empty"));
    }
    messages.into_iter().enumerate().map(|(i, message)| message.into_chat(i)).collect()
}

impl Message {
    fn into_chat(self, i: usize) -> Result<ChatMessage, ApiError> {
        let at = |field: &str| format!("messages[{i}].{field}");
        let invalid =
            |field: &str, message: String| Err(ApiError::invalid(Some(at(field)), message));
        let role = match self.role {
            // OpenAI's newer name for the same.
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
            Role::Function => {
                let message =
                    "role function is OpenAI's older form and not supported here, use tool";
                return Err(ApiError::unsupported(&at("role"), message));
            }
        };
        let unsupported =
            [("function_call", self.function_call.is_some()), ("audio", self.audio.is_some())];
        if let Some((field, _)) = unsupported.iter().find(|(_, is_given)| *is_given) {
            let message = format!("{field} of a message is not supported here");
            return Err(ApiError::unsupported(&at(field), message));
        }
        let calls = self.tool_calls.unwrap_or_default();
        if !calls.is_empty() && self.role != Role::Assistant {
            return invalid("tool_calls", format!("message {i} calls functions as {role}"));
        }
        if self.tool_call_id.is_some() != (self.role == Role::Tool) {
            let message = "tool_call_id names the call whose result a message of role tool is";
            return invalid("tool_call_id", message.to_owned());
        }
        let content = self.content.map(Content::into_text).or(self.refusal);
        let content = match content {
            Some(content) => content,
            None if !calls.is_empty() => String::new(),
            None => return invalid("content", format!("message {i} has no content")),
        };
        let mut tool_calls = Vec::with_capacity(calls.len());
        for (j, CallEntry { id, kind, function }) in calls.into_iter().enumerate() {
            let Ok(arguments) = function.arguments() else {
                let field = format!("tool_calls[{j}].function.arguments");
                return invalid(&field, format!("{field} is no text of a JSON object"));
            };
            let arguments = Value::Object(arguments);
            let function = FunctionCall { name: function.name, arguments };
            tool_calls.push(ToolCall { id: Some(id), kind, function });
        }
        let tool_call_id = self.tool_call_id;
        Ok(ChatMessage { role: role.to_owned(), content, tool_calls, tool_call_id })
    }
}
