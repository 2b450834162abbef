//! The functions of a request, and which of them an answer may or must call.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use stagebus_schemas::messages::public::{Function, MAX_TOOLS, Tool, ToolKind};

use crate::api_error::ApiError;

/// Longest name of a function, as OpenAI documents it.
const MAX_NAME_BYTES: usize = 64;

/// A tool, as OpenAI's clients write it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ToolEntry {
    #[serde(rename = "type")]
    kind: ToolKind,
    function: FunctionEntry,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionEntry {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    /// The schema of the arguments holds in any case.
    #[serde(rename = "strict")]
    _strict: Option<IgnoredAny>,
}

/// Whether functions are to be called, and which.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected \"none\", \"auto\", \"required\", or {\"type\": \"function\", \
                 \"function\": {\"name\": \"…\"}}"
)]
pub(super) enum ToolChoice {
    Mode(Mode),
    Named(Named),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    None,
    Auto,
    Required,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    #[serde(rename = "type")]
    _kind: ToolKind,
    function: Name,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
}

/// What an answer may call.
#[derive(Debug, PartialEq)]
pub(super) struct Calls {
    /// The functions that the model is told of.
    pub(super) tools: Vec<Tool>,
    /// The only one that may be called.
    only: Option<usize>,
    /// Whether the answer is calls and nothing else.
    pub(super) required: bool,
    /// Whether several calls may come one after the other.
    pub(super) several: bool,
}

impl Calls {
    /// Checks functions and choice; nothing if none may be called.
    ///
    /// # Errors
    /// Functions that are none, a choice that cannot be made.
    pub(super) fn new(
        entries: Option<Vec<ToolEntry>>,
        choice: Option<ToolChoice>,
        parallel: Option<bool>,
    ) -> Result<Option<Self>, ApiError> {
        let tools = tools(entries.unwrap_or_default())?;
        let mode = match &choice {
            Some(ToolChoice::Mode(mode)) => *mode,
            Some(ToolChoice::Named(_)) => Mode::Required,
            None => Mode::Auto,
        };
        if tools.is_empty() && mode == Mode::Required {
            return Err(invalid("tool_choice", "tool_choice wants a call, but tools has none"));
        }
        let only = match &choice {
            Some(ToolChoice::Named(Named { function, .. })) => {
                let at = tools.iter().position(|tool| tool.function.name == function.name);
                Some(at.ok_or_else(|| {
                    let message = format!("tool_choice names {:?}, tools does not", function.name);
                    invalid("tool_choice", message)
                })?)
            }
            _ => None,
        };
        let may_call = !tools.is_empty() && mode != Mode::None;
        Ok(may_call.then(|| Self {
            tools,
            only,
            required: mode == Mode::Required,
            several: parallel.unwrap_or(true),
        }))
    }

    /// The functions that may be called.
    pub(super) fn callable(&self) -> impl Iterator<Item = &Function> {
        let tools = match self.only {
            Some(only) => &self.tools[only..=only],
            None => &self.tools,
        };
        tools.iter().map(|tool| &tool.function)
    }
}

fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param.into()), message)
}

fn tools(entries: Vec<ToolEntry>) -> Result<Vec<Tool>, ApiError> {
    if entries.len() > MAX_TOOLS {
        let message = format!("tools has {} entries, at most {MAX_TOOLS} are taken", entries.len());
        return Err(invalid("tools", message));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(entries.len());
    for (i, ToolEntry { kind, function }) in entries.into_iter().enumerate() {
        let at = |field: &str| format!("tools[{i}].function.{field}");
        let FunctionEntry { name, description, parameters, .. } = function;
        let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.bytes().all(is_of_name) {
            let message = format!(
                "{name:?} is no name of a function: expected 1 to {MAX_NAME_BYTES} of a-z, A-Z, \
                 0-9, - and _"
            );
            return Err(invalid(at("name"), message));
        }
        if tools.iter().any(|tool| tool.function.name == name) {
            return Err(invalid(at("name"), format!("two functions are called {name:?}")));
        }
        if let Some(parameters) = &parameters {
            check_parameters(parameters, &at("parameters"))?;
        }
        tools.push(Tool { kind, function: Function { name, description, parameters } });
    }
    Ok(tools)
}

/// Arguments are an object; what else the schema says is for the grammar's compiler to judge.
fn check_parameters(parameters: &Value, param: &str) -> Result<(), ApiError> {
    let Some(schema) = parameters.as_object() else {
        return Err(invalid(param, format!("{param} is no JSON schema, expected an object")));
    };
    match schema.get("type") {
        Some(kind) if kind != "object" => {
            let message = format!("{param} has type {kind}, but arguments are of type object");
            Err(invalid(param, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn calls(tools: Value, choice: Value) -> Result<Option<Calls>, String> {
        let read = |error: serde_json::Error| error.to_string();
        let tools = serde_json::from_value(tools).map_err(read)?;
        let choice = serde_json::from_value(choice).map_err(read)?;
        Calls::new(tools, choice, None).map_err(|error| error.to_json())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "description": "d",
            "parameters": {"type": "object"}, "strict": true}})
    }

    #[test]
    fn the_choice_says_what_may_be_called() {
        let tools = json!([tool("a"), tool("b")]);
        let may = |choice: Value| {
            let calls = calls(tools.clone(), choice).expect("valid")?;
            let names: Vec<_> = calls.callable().map(|function| function.name.clone()).collect();
            assert_eq!((calls.tools.len(), calls.several), (2, true), "the model is told of all");
            Some((names.join(" "), calls.required))
        };
        assert_eq!(may(json!(null)), Some(("a b".to_owned(), false)));
        assert_eq!(may(json!("auto")), Some(("a b".to_owned(), false)));
        assert_eq!(may(json!("required")), Some(("a b".to_owned(), true)));
        assert_eq!(may(json!("none")), None);
        let named = json!({"type": "function", "function": {"name": "b"}});
        assert_eq!(may(named), Some(("b".to_owned(), true)));
        for nothing in [json!(null), json!([])] {
            for choice in [json!(null), json!("none"), json!("auto")] {
                assert_eq!(calls(nothing.clone(), choice), Ok(None));
            }
        }
    }

    #[test]
    fn what_is_no_function_is_refused_with_its_place() {
        let of = |function: Value| json!([{"type": "function", "function": function}]);
        let many: Vec<Value> = (0..129).map(|i| tool(&format!("f{i}"))).collect();
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (tools, choice, part) in [
            (of(json!({"name": ""})), json!(null), "tools[0].function.name"),
            (of(json!({"name": "a b"})), json!(null), "tools[0].function.name"),
            (of(json!({"name": "\u{e9}"})), json!(null), "tools[0].function.name"),
            (of(json!({"name": "a".repeat(65)})), json!(null), "tools[0].function.name"),
            (json!([tool("a"), tool("a")]), json!(null), "tools[1].function.name"),
            (of(json!({"name": "a", "parameters": []})), json!(null), "parameters"),
            (of(json!({"name": "a", "parameters": {"type": "string"}})), json!(null), "string"),
            (of(json!({"name": "a", "arguments": {}})), json!(null), "arguments"),
            (json!([{"type": "custom", "custom": {"name": "a"}}]), json!(null), "custom"),
            (json!([{"type": "function"}]), json!(null), "function"),
            (json!(many), json!(null), "129"),
            (json!(null), json!("required"), "tool_choice"),
            (json!([]), named("a"), "tool_choice"),
            (json!([tool("a")]), named("c"), "tool_choice"),
            (json!([tool("a")]), json!("any"), "required"),
            (json!([tool("a")]), json!({"type": "allowed_tools"}), "required"),
        ] {
            let error = calls(tools.clone(), choice).expect_err(&tools.to_string());
            assert!(error.contains(part), "{tools}: {error}");
        }
    }
}
