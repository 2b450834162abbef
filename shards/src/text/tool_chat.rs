//! Chats with functions, for models whose template does not know of any.
//!
//! The form is that of Hermes, which Qwen 2.5 and many others were trained on: functions stand in
//! the system message, a call is JSON between two tags, and a result is a message of the user's.

use serde::Serialize;
use serde_json::{Value, json};

use super::chat_template::python_json;

/// What a call begins with.
pub const TOOL_CALL_OPEN: &str = "<tool_call>";

/// What a call ends with.
pub const TOOL_CALL_CLOSE: &str = "</tool_call>";

const BEFORE_TOOLS: &str = "# Tools\n\nYou may call one or more functions to assist with the user \
                            query.\n\nYou are provided with function signatures within \
                            <tools></tools> XML tags:\n<tools>";

const AFTER_TOOLS: &str = "\n</tools>\n\nFor each function call, return a json object with function \
                           name and arguments within <tool_call></tool_call> XML \
                           tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": \
                           <args-json-object>}\n</tool_call>";

/// Whether a message is a call or the result of one.
fn is_of_tools(message: &Value) -> bool {
    role(message) == "tool" || !calls(message).is_empty()
}

/// The messages in the form above; nothing if there is nothing to change.
///
/// # Errors
/// What cannot be written as JSON.
pub(super) fn plain<M: Serialize, T: Serialize>(
    messages: &[M],
    tools: &[T],
) -> serde_json::Result<Option<Vec<Value>>> {
    let messages = messages.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    if tools.is_empty() && !messages.iter().any(is_of_tools) {
        return Ok(None);
    }
    let mut plain: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut messages = messages.into_iter().peekable();
    if !tools.is_empty() {
        let told = instructions(tools)?;
        plain.push(match messages.next_if(|message| role(message) == "system") {
            Some(first) => of("system", format!("{}\n\n{told}", content(&first))),
            None => of("system", told),
        });
    }
    let mut follows_result = false;
    for message in messages {
        let is_result = role(&message) == "tool";
        let next = if is_result {
            of("user", format!("<tool_response>\n{}\n</tool_response>", content(&message)))
        } else if calls(&message).is_empty() {
            message
        } else {
            of(role(&message), with_calls(&message)?)
        };
        match plain.last_mut().filter(|_| is_result && follows_result) {
            Some(last) => *last = of("user", format!("{}\n{}", content(last), content(&next))),
            None => plain.push(next),
        }
        follows_result = is_result;
    }
    Ok(Some(plain))
}

fn instructions<T: Serialize>(tools: &[T]) -> serde_json::Result<String> {
    let mut text = BEFORE_TOOLS.to_owned();
    for tool in tools {
        text.push('\n');
        text.push_str(&python_json(tool)?);
    }
    text.push_str(AFTER_TOOLS);
    Ok(text)
}

/// The text of a message that calls functions.
fn with_calls(message: &Value) -> serde_json::Result<String> {
    let mut text = content(message).to_owned();
    for call in calls(message) {
        let function = &call["function"];
        let call = json!({ "name": function["name"], "arguments": function["arguments"] });
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&format!("{TOOL_CALL_OPEN}\n{}\n{TOOL_CALL_CLOSE}", python_json(&call)?));
    }
    Ok(text)
}

fn of(role: &str, content: String) -> Value {
    json!({ "role": role, "content": content })
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn calls(message: &Value) -> &[Value] {
    message["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: [&str; 0] = [];

    #[test]
    fn functions_stand_in_the_system_message() {
        let tools = [json!({"type": "function", "function": {"name": "a"}}), json!({"b": "<é>"})];
        let told = format!(
            "{BEFORE_TOOLS}\n{{\"type\": \"function\", \"function\": {{\"name\": \"a\"}}}}\n\
             {{\"b\": \"<é>\"}}{AFTER_TOOLS}"
        );
        let user = of("user", "hi".to_owned());
        let found = plain(std::slice::from_ref(&user), &tools).expect("JSON").expect("changed");
        assert_eq!(found, [of("system", told.clone()), user.clone()]);
        let messages = [of("system", "Be brief.".to_owned()), user.clone()];
        let found = plain(&messages, &tools).expect("JSON").expect("changed");
        assert_eq!(found, [of("system", format!("Be brief.\n\n{told}")), user]);
    }

    #[test]
    fn calls_and_results_become_text() {
        let call = |name: &str| {
            json!({"id": "1", "type": "function",
                "function": {"name": name, "arguments": {"n": [1, 2]}}})
        };
        let messages = [
            of("system", "s".to_owned()),
            json!({"role": "assistant", "content": "", "tool_calls": [call("f")]}),
            json!({"role": "tool", "content": "4", "tool_call_id": "1"}),
            json!({"role": "assistant", "content": "and", "tool_calls": [call("g"), call("h")]}),
            json!({"role": "tool", "content": "5"}),
            json!({"role": "tool", "content": "6"}),
            of("user", "so?".to_owned()),
        ];
        let text = |name: &str| {
            format!(
                "<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"n\": [1, 2]}}}}\n</tool_call>"
            )
        };
        let result = |n: u8| format!("<tool_response>\n{n}\n</tool_response>");
        let expected = [
            of("system", "s".to_owned()),
            of("assistant", text("f")),
            of("user", result(4)),
            of("assistant", format!("and\n{}\n{}", text("g"), text("h"))),
            of("user", format!("{}\n{}", result(5), result(6))),
            of("user", "so?".to_owned()),
        ];
        assert_eq!(plain(&messages, &TOOLS).expect("JSON").expect("changed"), expected);
    }

    #[test]
    fn a_chat_without_functions_stays_as_it_is() {
        let messages = [of("system", "s".to_owned()), of("user", "hi".to_owned())];
        assert_eq!(plain(&messages, &TOOLS).expect("JSON"), None);
    }
}
