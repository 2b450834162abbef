//! What an answer must be: the format that was asked for, and the calls that may be made.
//!
//! A call is written as the model's prompt shows it: `<tool_call>`, a line with name and arguments as
//! JSON, `</tool_call>`. All but the arguments is fixed to the last space, so that the end of the
//! arguments can be told from any text within them, and so are the spaces of their JSON.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use stagebus_schemas::messages::public::{Constraint, Function, MAX_CONSTRAINT_BYTES};
use stagebus_shards::text::{TOOL_CALL_CLOSE, TOOL_CALL_OPEN};

use super::tools::Calls;
use crate::api_error::ApiError;

/// The form that the text of an answer must have.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ResponseFormat {
    Text {},
    JsonObject {},
    JsonSchema { json_schema: NamedSchema },
}

/// A JSON schema. It holds in any case, whatever `strict` says; names and descriptions are for
/// models that are told of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NamedSchema {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "description")]
    _description: Option<IgnoredAny>,
    schema: Value,
    #[serde(rename = "strict")]
    _strict: Option<IgnoredAny>,
}

/// The text between the opening tag of a call and the name of its function.
pub(super) const BEFORE_NAME: &str = "\n{\"name\": \"";

/// The text between the name and the arguments.
pub(super) const BEFORE_ARGUMENTS: &str = "\", \"arguments\": ";

/// The text between the arguments and the closing tag.
pub(super) const AFTER_ARGUMENTS: &str = "}\n";

/// The text between two calls.
pub(super) const BETWEEN_CALLS: &str = "\n";

/// What an answer must be; anything if nothing is asked for.
///
/// # Errors
/// A schema that is none, or more than a constraint may be.
pub(super) fn constraint(
    format: Option<ResponseFormat>,
    calls: Option<&Calls>,
) -> Result<Option<Constraint>, ApiError> {
    let (format, param) = match format {
        None | Some(ResponseFormat::Text {}) => (None, "tools"),
        Some(ResponseFormat::JsonObject {}) => (Some(Constraint::JsonObject {}), "response_format"),
        Some(ResponseFormat::JsonSchema { json_schema: NamedSchema { schema, .. } }) => {
            if !schema.is_object() {
                let param = "response_format.json_schema.schema";
                let message = format!("{param} is no JSON schema, expected an object");
                return Err(ApiError::invalid(Some(param.to_owned()), message));
            }
            (Some(Constraint::JsonSchema { schema }), "response_format")
        }
    };
    let constraint = match calls {
        Some(calls) => Some(Constraint::Lark { grammar: grammar(calls, format.as_ref()) }),
        None => format,
    };
    let n_bytes = constraint.as_ref().map_or(0, |constraint| constraint.to_json().len());
    if n_bytes > MAX_CONSTRAINT_BYTES {
        let message = format!(
            "response_format and tools are a grammar of {n_bytes} bytes, at most \
             {MAX_CONSTRAINT_BYTES} are taken"
        );
        return Err(ApiError::invalid(Some(param.to_owned()), message));
    }
    Ok(constraint)
}

/// The grammar of calls, or of calls and what may come instead.
fn grammar(calls: &Calls, format: Option<&Constraint>) -> String {
    let more = if calls.several { "more*" } else { "" };
    let mut lark = match (calls.required, format) {
        (true, _) => format!("start: call {more}\n"),
        (false, Some(format)) => {
            let schema = match format {
                Constraint::JsonSchema { schema } => schema.clone(),
                _ => json!({"type": "object"}),
            };
            format!("start: %json {} | call {more}\n", with_fixed_spaces(schema))
        }
        // Text may come first: where the tag comes, it ends and a call begins.
        (false, None) => format!(
            "start: TEXT | until_call body {more}\n\
             TEXT: /(.|\\n)*/ & ~/(.|\\n)*{TOOL_CALL_OPEN}(.|\\n)*/\n\
             until_call[lazy]: /(.|\\n)*/ {}\n",
            literal(TOOL_CALL_OPEN)
        ),
    };
    if calls.required || format.is_some() {
        lark.push_str(&format!("call: {} body\n", literal(TOOL_CALL_OPEN)));
    }
    if calls.several {
        let between = literal(&format!("{BETWEEN_CALLS}{TOOL_CALL_OPEN}"));
        lark.push_str(&format!("more: {between} body\n"));
    }
    let functions: Vec<String> = calls.callable().map(function).collect();
    lark.push_str(&format!("body: {}\n", functions.join(" | ")));
    lark
}

/// A call of one function, behind the opening tag.
fn function(function: &Function) -> String {
    let before = literal(&format!("{BEFORE_NAME}{}{BEFORE_ARGUMENTS}", function.name));
    let after = literal(&format!("{AFTER_ARGUMENTS}{TOOL_CALL_CLOSE}"));
    let schema = match &function.parameters {
        Some(Value::Object(schema)) => {
            let mut schema = schema.clone();
            let says_type = ["type", "$ref", "allOf", "anyOf", "oneOf", "const", "enum"];
            if !says_type.iter().any(|keyword| schema.contains_key(*keyword)) {
                schema.insert("type".to_owned(), "object".into());
            }
            Value::Object(schema)
        }
        // As OpenAI documents it, a function without parameters has none.
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    };
    format!("{before} %json {} {after}", with_fixed_spaces(schema))
}

/// Lets JSON have the spaces that models know from Python, and no others.
fn with_fixed_spaces(mut schema: Value) -> Value {
    schema["x-guidance"] = json!({
        "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false,
    });
    schema
}

/// A text as a grammar has it: the same as in JSON.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(choice: Value, parallel: Option<bool>) -> Calls {
        let tools = json!([
            {"type": "function", "function": {"name": "now"}},
            {"type": "function", "function": {"name": "add",
                "parameters": {"properties": {"a": {"type": "integer"}}}}},
        ]);
        let tools = serde_json::from_value(tools).expect("tools");
        let choice = serde_json::from_value(choice).expect("a choice");
        Calls::new(tools, choice, parallel).expect("valid").expect("calls")
    }

    fn lark(format: Value, calls: &Calls) -> String {
        let format = serde_json::from_value(format).expect("a format");
        match constraint(format, Some(calls)).expect("valid") {
            Some(Constraint::Lark { grammar }) => grammar,
            other => unreachable!("{other:?}"),
        }
    }

    const SPACES: &str =
        r#""x-guidance":{"item_separator":", ","key_separator":": ","whitespace_flexible":false}"#;

    #[test]
    fn a_named_function_is_the_whole_answer() {
        let named = json!({"type": "function", "function": {"name": "add"}});
        let found = lark(json!(null), &calls(named, Some(false)));
        let expected = format!(
            "start: call \ncall: \"<tool_call>\" body\nbody: \"\\n{{\\\"name\\\": \\\"add\\\", \
             \\\"arguments\\\": \" %json {{\"properties\":{{\"a\":{{\"type\":\"integer\"}}}},\
             \"type\":\"object\",{SPACES}}} \"}}\\n</tool_call>\"\n"
        );
        assert_eq!(found, expected);
    }

    #[test]
    fn what_may_come_instead_of_calls_stands_first() {
        let auto = calls(json!("auto"), None);
        let text = lark(json!(null), &auto);
        assert!(text.starts_with("start: TEXT | until_call body more*\nTEXT: "), "{text}");
        assert!(text.contains("\nmore: \"\\n<tool_call>\" body\nbody: \"\\n{"), "{text}");
        assert!(!text.contains("call: \"<tool_call>\""), "{text}");
        let object = lark(json!({"type": "json_object"}), &auto);
        let start = format!("start: %json {{\"type\":\"object\",{SPACES}}} | call more*\ncall: ");
        assert!(object.starts_with(&start), "{object}");
        let required = calls(json!("required"), None);
        let found = lark(json!({"type": "json_object"}), &required);
        assert!(found.starts_with("start: call more*\ncall: "), "{found}");
    }

    #[test]
    fn a_format_without_calls_is_a_constraint_of_its_own() {
        let of = |format: Value| {
            let format = serde_json::from_value(format).map_err(|error| error.to_string())?;
            constraint(format, None).map_err(|error| error.to_json())
        };
        assert_eq!(of(json!(null)), Ok(None));
        assert_eq!(of(json!({"type": "text"})), Ok(None));
        assert_eq!(of(json!({"type": "json_object"})), Ok(Some(Constraint::JsonObject {})));
        let schema = json!({"type": "array"});
        let named = |schema: &Value| {
            json!({"type": "json_schema",
                "json_schema": {"name": "n", "strict": false, "schema": schema}})
        };
        assert_eq!(of(named(&schema)), Ok(Some(Constraint::JsonSchema { schema })));
        let long = json!({"description": "x".repeat(MAX_CONSTRAINT_BYTES)});
        for (wrong, part) in [
            (named(&json!(7)), "response_format.json_schema.schema"),
            (named(&long), "at most 131072"),
            (json!({"type": "json_schema"}), "json_schema"),
            (json!({"type": "json_schema", "json_schema": {"name": "n"}}), "schema"),
            (json!({"type": "grammar"}), "grammar"),
            (json!({"type": "text", "schema": {}}), "schema"),
            (json!("json_object"), "json_object"),
        ] {
            let error = of(wrong.clone()).expect_err(&wrong.to_string());
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }
}
