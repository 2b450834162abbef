//! Functions that a model may call, in the form that chat templates know.
//!
//! A prompt shows them to the model, and that is all: what comes out is text. `constraint` can see to
//! it that the text is a call.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Most functions of a request, as in other services.
pub const MAX_TOOLS: usize = 128;

/// Something that the model may call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tool {
    /// What it is.
    #[serde(rename = "type")]
    pub kind: ToolKind,
    /// The function.
    pub function: Function,
}

/// What can be called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolKind {
    /// A function.
    #[default]
    Function,
}

/// A function, as the model is told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// What it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON schema of its arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Value>,
}

/// A call that the model has made, in a message of the assistant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// Name of the call, to which the message with its result refers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What was called.
    #[serde(rename = "type", default)]
    pub kind: ToolKind,
    /// The function and what it was called with.
    pub function: FunctionCall,
}

/// A function and what it was called with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// Its arguments: JSON, not the text of it.
    pub arguments: Value,
}
