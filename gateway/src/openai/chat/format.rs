//! `/v1/chat/completions`: the answer.

use serde::Serialize;
use stagebus_schemas::messages::public::{FinishReason, TokenLogprobs};

use crate::generation::End;
use crate::openai::format::{Format, Head, Used, finish_reason};
use crate::openai::logprobs::ChatLogprobs;

/// The form of answers to chats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChatFormat {
    /// Whether log-probabilities were asked for.
    pub(crate) logprobs: bool,
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
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
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
    content: Option<&'a str>,
}

const ASSISTANT: &str = "assistant";

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

impl Format for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl-";

    fn begin(&self, head: &Head, index: u32) -> serde_json::Result<Option<String>> {
        let delta = Delta { role: Some(ASSISTANT), content: Some("") };
        chunk(head, ChunkChoice { index, delta, logprobs: None, finish_reason: None }).map(Some)
    }

    fn delta(
        &mut self,
        head: &Head,
        index: u32,
        text: &str,
        logprobs: &[TokenLogprobs],
    ) -> serde_json::Result<String> {
        let delta = Delta { role: None, content: Some(text) };
        let logprobs = self.logprobs.then(|| ChatLogprobs::new(logprobs));
        chunk(head, ChunkChoice { index, delta, logprobs, finish_reason: None })
    }

    fn end(&self, head: &Head, index: u32, reason: FinishReason) -> serde_json::Result<String> {
        let (delta, finish_reason) = (Delta::default(), Some(finish_reason(reason)));
        chunk(head, ChunkChoice { index, delta, logprobs: None, finish_reason })
    }

    fn usage(&self, head: &Head, used: Used) -> serde_json::Result<String> {
        serde_json::to_string(&Chunk { usage: Some(Some(used)), ..Chunk::new(head, &[]) })
    }

    fn whole(&self, head: &Head, choices: &[End], used: Used) -> serde_json::Result<String> {
        let choices = choices.iter().enumerate().map(|(index, end)| Choice {
            index,
            message: Message { role: ASSISTANT, content: &end.text, refusal: None },
            logprobs: self.logprobs.then(|| ChatLogprobs::new(&end.logprobs)),
            finish_reason: finish_reason(end.reason),
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
        let mut format = ChatFormat { logprobs: false };
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
            parsed(format.delta(&head, 0, "a\n", &[])),
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
        let chunk = parsed(ChatFormat { logprobs: false }.delta(&head(false), 0, "a", &[]));
        assert!(chunk.as_object().is_some_and(|chunk| !chunk.contains_key("usage")), "{chunk}");
    }

    #[test]
    fn a_whole_answer_has_all_choices() {
        let format = ChatFormat { logprobs: true };
        let ends = [end("a", Vec::new()), end("b", Vec::new())];
        let whole = parsed(format.whole(&head(false), &ends, Used::default()));
        assert_eq!(whole["object"], "chat.completion");
        assert_eq!(
            whole["choices"][1],
            json!({"index": 1, "message": {"role": "assistant", "content": "b", "refusal": null},
                "logprobs": {"content": [], "refusal": null}, "finish_reason": "length"})
        );
    }
}
