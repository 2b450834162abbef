//! `/v1/completions`: the answer.

use std::collections::BTreeMap;

use serde::Serialize;
use stagebus_schemas::messages::public::{FinishReason, TokenLogprobs};

use crate::generation::End;
use crate::openai::format::{Format, Head, Used, finish_reason};
use crate::openai::logprobs::TextLogprobs;

/// The form of answers to completions.
#[derive(Debug, Clone)]
pub(crate) struct TextFormat {
    /// Most likely tokens asked for beside each chosen one, if log-probabilities were.
    logprobs: Option<u32>,
    /// Characters that each choice of a stream has had.
    offsets: BTreeMap<u32, usize>,
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: Option<&'a str>,
    choices: &'a [Choice<'a>],
    /// Absent from chunks unless asked for; null in all of them but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Used>>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<TextLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

impl<'a> Completion<'a> {
    fn chunk(head: &'a Head, choices: &'a [Choice<'a>]) -> Self {
        Self {
            id: &head.id,
            object: "text_completion",
            created: head.created,
            model: &head.model,
            system_fingerprint: head.fingerprint.as_deref(),
            choices,
            usage: head.include_usage.then_some(None),
        }
    }
}

impl TextFormat {
    pub(crate) const fn new(logprobs: Option<u32>) -> Self {
        Self { logprobs, offsets: BTreeMap::new() }
    }

    fn logprobs_of<'a>(
        &self,
        logprobs: &'a [TokenLogprobs],
        offset: &mut usize,
    ) -> Option<TextLogprobs<'a>> {
        self.logprobs.map(|n_top| TextLogprobs::new(logprobs, n_top > 0, offset))
    }
}

impl Format for TextFormat {
    const ID_PREFIX: &'static str = "cmpl-";

    fn begin(&self, _head: &Head, _index: u32) -> serde_json::Result<Option<String>> {
        Ok(None)
    }

    fn delta(
        &mut self,
        head: &Head,
        index: u32,
        text: &str,
        logprobs: &[TokenLogprobs],
    ) -> serde_json::Result<Option<String>> {
        let mut offset = self.offsets.get(&index).copied().unwrap_or(0);
        let logprobs = self.logprobs_of(logprobs, &mut offset);
        self.offsets.insert(index, offset);
        let choice = Choice { index: index as usize, text, logprobs, finish_reason: None };
        serde_json::to_string(&Completion::chunk(head, &[choice])).map(Some)
    }

    fn end(&mut self, head: &Head, index: u32, reason: FinishReason) -> serde_json::Result<String> {
        let finish_reason = Some(finish_reason(reason));
        let choice = Choice { index: index as usize, text: "", logprobs: None, finish_reason };
        serde_json::to_string(&Completion::chunk(head, &[choice]))
    }

    fn usage(&self, head: &Head, used: Used) -> serde_json::Result<String> {
        serde_json::to_string(&Completion {
            usage: Some(Some(used)),
            ..Completion::chunk(head, &[])
        })
    }

    fn whole(&self, head: &Head, choices: &[End], used: Used) -> serde_json::Result<String> {
        let choice = |(index, end)| {
            let End { text, logprobs, reason, .. }: &End = end;
            let logprobs = self.logprobs_of(logprobs, &mut 0);
            Choice { index, text, logprobs, finish_reason: Some(finish_reason(*reason)) }
        };
        let choices: Vec<_> = choices.iter().enumerate().map(choice).collect();
        serde_json::to_string(&Completion {
            usage: Some(Some(used)),
            ..Completion::chunk(head, &choices)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::format::tests::{end, head};
    use serde_json::{Value, json};
    use stagebus_schemas::messages::public::Logprob;

    fn parsed(text: serde_json::Result<String>) -> Value {
        serde_json::from_str(&text.expect("JSON")).expect("JSON")
    }

    fn token(text: &str) -> TokenLogprobs {
        let chosen = Logprob { token: 1, text: text.to_owned(), bytes: None, logprob: -1.0 };
        TokenLogprobs { chosen, top: Vec::new() }
    }

    #[test]
    fn offsets_of_a_stream_go_on_for_each_choice() {
        let mut format = TextFormat::new(Some(0));
        let head = head(false);
        let mut offset = |index, text: &str| {
            let chunk = format.delta(&head, index, text, &[token(text)]);
            let chunk = parsed(chunk.map(Option::unwrap_or_default));
            chunk["choices"][0]["logprobs"]["text_offset"][0].clone()
        };
        assert_eq!(
            [offset(0, "ab"), offset(1, "c"), offset(0, "d")],
            [json!(0), json!(0), json!(2)]
        );
    }

    #[test]
    fn a_whole_answer_has_text_reason_and_what_was_used() {
        let ends = [end("a", vec![token("a")])];
        let whole = parsed(TextFormat::new(None).whole(&head(false), &ends, Used::default()));
        assert_eq!(whole["object"], "text_completion");
        assert_eq!(whole["usage"]["total_tokens"], 0);
        let choice = json!({"index": 0, "text": "a", "logprobs": null, "finish_reason": "length"});
        assert_eq!(whole["choices"], json!([choice]));
    }
}
