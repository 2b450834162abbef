//! The messages of a chat, as OpenAI's clients write them.

use serde::Deserialize;
use serde::de::IgnoredAny;
use stagebus_schemas::messages::public::ChatMessage;

use crate::api_error::ApiError;

/// One message.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    role: Role,
    content: Option<Content>,
    refusal: Option<String>,
    tool_calls: Option<Vec<IgnoredAny>>,
    tool_call_id: Option<IgnoredAny>,
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
/// No message, one without text, or one that belongs to tools.
pub(crate) fn to_chat(messages: Vec<Message>) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(Some("messages".to_owned()), "messages is empty"));
    }
    messages.into_iter().enumerate().map(|(i, message)| message.into_chat(i)).collect()
}

impl Message {
    fn into_chat(self, i: usize) -> Result<ChatMessage, ApiError> {
        let at = |field: &str| format!("messages[{i}].{field}");
        let role = match self.role {
            // OpenAI's newer name for the same.
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool | Role::Function => {
                let message = "messages of tools are not supported here";
                return Err(ApiError::unsupported(&at("role"), message));
            }
        };
        let of_tools = [
            ("tool_calls", self.tool_calls.is_some_and(|calls| !calls.is_empty())),
            ("tool_call_id", self.tool_call_id.is_some()),
            ("function_call", self.function_call.is_some()),
            ("audio", self.audio.is_some()),
        ];
        if let Some((field, _)) = of_tools.iter().find(|(_, is_given)| *is_given) {
            let message = format!("{field} of a message is not supported here");
            return Err(ApiError::unsupported(&at(field), message));
        }
        let content = self.content.map(Content::into_text).or(self.refusal).ok_or_else(|| {
            ApiError::invalid(Some(at("content")), format!("message {i} has no content"))
        })?;
        Ok(ChatMessage { role: role.to_owned(), content })
    }
}
