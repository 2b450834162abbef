//! `/v1/chat/completions`: the answer.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Serialize;
use stagebus_schemas::messages::public::{FinishReason, TokenLogprobs};

use super::calls::{CallReader, Part};
use crate::generation::End;
use crate::openai::format::{Format, Head, Used, finish_reason};
use crate::openai::logprobs::ChatLogprobs;

/// The reason of answers that end with a call.
const TOOL_CALLS: &str = "tool_calls";

/// Characters of an answer's name that are part of the names of its calls: with these and two
/// numbers they stay below the 40 that some services take back.
const UNIQUE: usize = 24;

/// The form of answers to chats.
#[derive(Debug)]
pub(crate) struct ChatFormat {
    /// Whether log-probabilities were asked for.
    logprobs: bool,
    /// Whether calls may be in the text.
    may_call: bool,
    /// What is known of the choices of a stream, where they may call.
    readers: HashMap<u32, Reading>,
}

/// One choice, read as it comes.
#[derive(Debug, Default)]
struct Reading {
    reader: CallReader,
    calls: usize,
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: Option<&'a str>,
    choices: Vec<Choice<'a>>,
    usage: Used,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<Cow<'a, str>>,
    refusal: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

/// A call; in a chunk, what is new of one.
#[derive(Serialize)]
struct Call {
    /// Absent in whole answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// Absent in all chunks of a call but its first, as are kind and name.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Called,
}

#[derive(Serialize)]
struct Called {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: Option<&'a str>,
    choices: &'a [ChunkChoice<'a>],
    /// Absent unless asked for; null in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Used>>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

const ASSISTANT: &str = "assistant";

impl Delta<'_> {
    /// What parts of an answer tell; `n_calls` of its calls have begun before.
    fn of(parts: Vec<Part>, (head, index): (&Head, u32), n_calls: &mut usize) -> Self {
        let mut delta = Self::default();
        for part in parts {
            match part {
                Part::Text(text) => {
                    delta.content.get_or_insert_default().to_mut().push_str(&text);
                }
                Part::Call { name } => {
                    let unique = head.id.get(head.id.len().saturating_sub(UNIQUE)..);
                    let unique = unique.unwrap_or(&head.id);
                    delta.tool_calls.push(Call {
                        index: Some(*n_calls),
                        id: Some(format!("call_{unique}_{index}_{n_calls}")),
                        kind: Some("function"),
                        function: Called { name: Some(name), arguments: String::new() },
                    });
                    *n_calls += 1;
                }
                Part::Arguments(text) => match delta.tool_calls.last_mut() {
                    Some(call) => call.function.arguments.push_str(&text),
                    None => delta.tool_calls.push(Call {
                        index: Some(n_calls.saturating_sub(1)),
                        id: None,
                        kind: None,
                        function: Called { name: None, arguments: text },
                    }),
                },
            }
        }
        delta
    }

    fn is_empty(&self) -> bool {
        self.content.is_none() && self.tool_calls.is_empty()
    }
}

impl<'a> Message<'a> {
    fn of_text(text: &'a str) -> Self {
        let content = Some(Cow::Borrowed(text));
        Self { role: ASSISTANT, content, refusal: None, tool_calls: Vec::new() }
    }

    fn of_calls(parts: Vec<Part>, at: (&Head, u32)) -> Self {
        let Delta { content, mut tool_calls, .. } = Delta::of(parts, at, &mut 0);
        tool_calls.iter_mut().for_each(|call| call.index = None);
        // Without text and calls, the text is what is empty.
        let content = content.or_else(|| tool_calls.is_empty().then_some(Cow::Borrowed("")));
        let content = content.map(|text| Cow::Owned(text.into_owned()));
        Self { role: ASSISTANT, content, refusal: None, tool_calls }
    }
}

impl<'a> Chunk<'a> {
    fn new(head: &'a Head, choices: &'a [ChunkChoice<'a>]) -> Self {
        Self {
            id: &head.id,
            object: "chat.completion.chunk",
            created: head.created,
            model: &head.model,
            system_fingerprint: head.fingerprint.as_deref(),
            choices,
            usage: head.include_usage.then_some(None),
        }
    }
}

fn chunk(head: &Head, choice: ChunkChoice<'_>) -> serde_json::Result<String> {
    serde_json::to_string(&Chunk::new(head, &[choice]))
}

impl ChatFormat {
    /// The form for a request that asks for log-probabilities or does not.
    pub(crate) fn new(logprobs: bool) -> Self {
        Self { logprobs, may_call: false, readers: HashMap::new() }
    }

    /// The form for a request that has functions to call.
    pub(crate) fn with_calls(self) -> Self {
        Self { may_call: true, ..self }
    }
}

impl Format for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl-";

    fn begin(&self, head: &Head, index: u32) -> serde_json::Result<Option<String>> {
        let content = Some(Cow::Borrowed(""));
        let delta = Delta { role: Some(ASSISTANT), content, ..Delta::default() };
        chunk(head, ChunkChoice { index, delta, logprobs: None, finish_reason: None }).map(Some)
    }

    fn delta(
        &mut self,
        head: &Head,
        index: u32,
        text: &str,
        logprobs: &[TokenLogprobs],
    ) -> serde_json::Result<Option<String>> {
        let delta = if self.may_call {
            let Reading { reader, calls } = self.readers.entry(index).or_default();
            Delta::of(reader.push(text), (head, index), calls)
        } else {
            Delta { content: Some(Cow::Borrowed(text)), ..Delta::default() }
        };
        if delta.is_empty() && logprobs.is_empty() {
            return Ok(None);
        }
        let logprobs = self.logprobs.then(|| ChatLogprobs::new(logprobs));
        chunk(head, ChunkChoice { index, delta, logprobs, finish_reason: None }).map(Some)
    }

    fn end(&mut self, head: &Head, index: u32, reason: FinishReason) -> serde_json::Result<String> {
        let Reading { mut reader, mut calls } = self.readers.remove(&index).unwrap_or_default();
        let reason = reason_of(&reader, reason);
        let rest = reader.finish().into_iter().collect();
        let delta = Delta::of(rest, (head, index), &mut calls);
        chunk(head, ChunkChoice { index, delta, logprobs: None, finish_reason: Some(reason) })
    }

    fn usage(&self, head: &Head, used: Used) -> serde_json::Result<String> {
        serde_json::to_string(&Chunk { usage: Some(Some(used)), ..Chunk::new(head, &[]) })
    }

    fn whole(&self, head: &Head, choices: &[End], used: Used) -> serde_json::Result<String> {
        let choices = (0..).zip(choices).map(|(index, end)| {
            let (message, reason) = if self.may_call {
                let (reader, parts) = CallReader::whole(&end.text);
                (Message::of_calls(parts, (head, index)), reason_of(&reader, end.reason))
            } else {
                (Message::of_text(&end.text), finish_reason(end.reason))
            };
            let logprobs = self.logprobs.then(|| ChatLogprobs::new(&end.logprobs));
            Choice { index, message, logprobs, finish_reason: reason }
        });
        serde_json::to_string(&Completion {
            id: &head.id,
            object: "chat.completion",
            created: head.created,
            model: &head.model,
            system_fingerprint: head.fingerprint.as_deref(),
            choices: choices.collect(),
            usage: used,
        })
    }
}

/// OpenAI's word for the end of a choice that may have called.
fn reason_of(reader: &CallReader, reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop if reader.ends_with_call() => TOOL_CALLS,
        reason => finish_reason(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::format::tests::{end, head, usage};
    use serde_json::{Value, json};

    fn parsed(text: serde_json::Result<String>) -> Value {
        serde_json::from_str(&text.expect("JSON")).expect("JSON")
    }

    #[test]
    fn a_stream_has_a_role_then_text_then_a_reason_then_what_was_used() {
        let mut format = ChatFormat::new(false);
        let head = head(true);
        let common = json!({"id": "x-1", "object": "chat.completion.chunk", "created": 7,
            "model": "m", "system_fingerprint": "fp_0123456789ab", "usage": null});
        let expected = |choice: Value| {
            let mut chunk = common.clone();
            chunk["choices"] = json!([choice]);
            chunk
        };
        let begin = format.begin(&head, 1).map(Option::unwrap_or_default);
        let role = json!({"role": "assistant", "content": ""});
        assert_eq!(
            parsed(begin),
            expected(json!({"index": 1, "delta": role, "logprobs": null, "finish_reason": null}))
        );
        assert_eq!(
            parsed(format.delta(&head, 0, "a\n", &[]).map(Option::unwrap_or_default)),
            expected(json!({"index": 0, "delta": {"content": "a\n"}, "logprobs": null,
                "finish_reason": null}))
        );
        assert_eq!(
            parsed(format.end(&head, 0, FinishReason::Stop)),
            expected(json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"}))
        );
        let mut used = Used::default();
        used.add(&usage(), true);
        let last = parsed(format.usage(&head, used));
        assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(7)));
    }

    #[test]
    fn chunks_tell_no_usage_unless_asked() {
        let chunk = ChatFormat::new(false).delta(&head(false), 0, "a", &[]);
        let chunk = parsed(chunk.map(Option::unwrap_or_default));
        assert!(chunk.as_object().is_some_and(|chunk| !chunk.contains_key("usage")), "{chunk}");
    }

    #[test]
    fn a_whole_answer_has_all_choices() {
        let format = ChatFormat::new(true);
        let ends = [end("a", Vec::new()), end("b", Vec::new())];
        let whole = parsed(format.whole(&head(false), &ends, Used::default()));
        assert_eq!(whole["object"], "chat.completion");
        assert_eq!(
            whole["choices"][1],
            json!({"index": 1, "message": {"role": "assistant", "content": "b", "refusal": null},
                "logprobs": {"content": [], "refusal": null}, "finish_reason": "length"})
        );
    }

    const CALLS: &str = "Well.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
        <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

    #[test]
    fn calls_are_told_in_whole_answers() {
        let format = ChatFormat::new(false).with_calls();
        let stop = |text: &str| End { reason: FinishReason::Stop, ..end(text, Vec::new()) };
        let ends = [stop(CALLS), stop("No."), stop(""), end(&CALLS[5..51], Vec::new())];
        let whole = parsed(format.whole(&head(false), &ends, Used::default()));
        let call = |id: &str, name: &str, arguments: &str| {
            json!({"id": id, "type": "function",
                "function": {"name": name, "arguments": arguments}})
        };
        let (first, second) =
            (call("call_x-1_0_0", "f", "{\"a\": 1}"), call("call_x-1_0_1", "g", "{}"));
        let expected = [
            (
                json!({"role": "assistant", "content": "Well.", "refusal": null,
                "tool_calls": [first, second]}),
                "tool_calls",
            ),
            (json!({"role": "assistant", "content": "No.", "refusal": null}), "stop"),
            (json!({"role": "assistant", "content": "", "refusal": null}), "stop"),
            (
                json!({"role": "assistant", "content": null, "refusal": null,
                "tool_calls": [call("call_x-1_3_0", "f", "{\"a\": 1")]}),
                "length",
            ),
        ];
        for (choice, (message, reason)) in
            whole["choices"].as_array().expect("choices").iter().zip(expected)
        {
            assert_eq!((&choice["message"], &choice["finish_reason"]), (&message, &json!(reason)));
        }
    }

    #[test]
    fn calls_come_in_parts_in_a_stream() {
        let mut format = ChatFormat::new(false).with_calls();
        let head = head(false);
        let mut delta = |index, text: &str| {
            let chunk = format.delta(&head, index, text, &[]).expect("JSON")?;
            Some(parsed(Ok(chunk))["choices"][0]["delta"].clone())
        };
        assert_eq!(delta(0, "Well.<tool"), Some(json!({"content": "Well."})));
        assert_eq!(delta(1, "No<"), Some(json!({"content": "No"})));
        assert_eq!(delta(0, "_call>\n{\"name\": \"f\", \"arg"), None);
        let call = |id: &str, index: usize, name: &str, arguments: &str| {
            json!({"index": index, "id": id, "type": "function",
                "function": {"name": name, "arguments": arguments}})
        };
        let first = call("call_x-1_0_0", 0, "f", "{\"a\"");
        assert_eq!(delta(0, "uments\": {\"a\""), Some(json!({"tool_calls": [first]})));
        let more = json!({"index": 0, "function": {"arguments": ": 1"}});
        assert_eq!(delta(0, ": 1}"), Some(json!({"tool_calls": [more]})));
        let (last, next) = (
            json!({"index": 0, "function": {"arguments": "}"}}),
            call("call_x-1_0_1", 1, "g", "{"),
        );
        let text = "}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}";
        assert_eq!(delta(0, text), Some(json!({"tool_calls": [last, next]})));
        let last = json!({"index": 1, "function": {"arguments": "}"}});
        assert_eq!(delta(0, "}\n</tool_call>"), Some(json!({"tool_calls": [last]})));
        let mut end =
            |index, reason| parsed(format.end(&head, index, reason))["choices"][0].clone();
        let found = end(0, FinishReason::Stop);
        assert_eq!((&found["delta"], &found["finish_reason"]), (&json!({}), &json!("tool_calls")));
        let found = end(1, FinishReason::Length);
        assert_eq!(
            (&found["delta"], &found["finish_reason"]),
            (&json!({"content": "<"}), &json!("length"))
        );
    }
}
