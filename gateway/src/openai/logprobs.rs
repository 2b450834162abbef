//! Log-probabilities in OpenAI's two forms.

use std::collections::BTreeMap;

use serde::Serialize;
use stagebus_schemas::messages::public::{Logprob, TokenLogprobs};

/// What stands for a probability too small to have a logarithm, as with OpenAI: JSON has no
/// infinity.
const LEAST: f32 = -9999.0;

/// Those of a chat.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs<'a> {
    content: Vec<ChatEntry<'a>>,
    refusal: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct ChatEntry<'a> {
    #[serde(flatten)]
    chosen: Entry<'a>,
    top_logprobs: Vec<Entry<'a>>,
}

#[derive(Debug, Serialize)]
struct Entry<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
}

impl<'a> Entry<'a> {
    fn new(of: &'a Logprob) -> Self {
        let bytes = of.bytes.as_deref().unwrap_or(of.text.as_bytes());
        Self { token: &of.text, logprob: of.logprob.max(LEAST), bytes }
    }
}

impl<'a> ChatLogprobs<'a> {
    pub(super) fn new(logprobs: &'a [TokenLogprobs]) -> Self {
        let entry = |token: &'a TokenLogprobs| ChatEntry {
            chosen: Entry::new(&token.chosen),
            top_logprobs: token.top.iter().map(Entry::new).collect(),
        };
        Self { content: logprobs.iter().map(entry).collect(), refusal: None }
    }
}

/// Those of a completion.
#[derive(Debug, Serialize)]
pub(super) struct TextLogprobs<'a> {
    tokens: Vec<&'a str>,
    token_logprobs: Vec<f32>,
    top_logprobs: Option<Vec<BTreeMap<&'a str, f32>>>,
    text_offset: Vec<usize>,
}

impl<'a> TextLogprobs<'a> {
    /// Those of tokens that begin `offset` characters after the beginning of the answer, which
    /// moves on. `top` says whether the most likely tokens were asked for.
    pub(super) fn new(logprobs: &'a [TokenLogprobs], top: bool, offset: &mut usize) -> Self {
        let tops = |token: &'a TokenLogprobs| {
            token.top.iter().map(|of| (of.text.as_str(), of.logprob.max(LEAST))).collect()
        };
        let text_offset = logprobs.iter().map(|token| {
            let here = *offset;
            *offset += token.chosen.text.chars().count();
            here
        });
        Self {
            text_offset: text_offset.collect(),
            tokens: logprobs.iter().map(|token| token.chosen.text.as_str()).collect(),
            token_logprobs: logprobs.iter().map(|token| token.chosen.logprob.max(LEAST)).collect(),
            top_logprobs: top.then(|| logprobs.iter().map(tops).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn logprob(token: u32, text: &str, bytes: Option<&[u8]>, logprob: f32) -> Logprob {
        Logprob { token, text: text.to_owned(), bytes: bytes.map(<[u8]>::to_vec), logprob }
    }

    fn samples() -> Vec<TokenLogprobs> {
        let first = logprob(1, "né", None, -0.5);
        let part = logprob(2, "\u{fffd}", Some(&[0xf0, 0x9f]), f32::NEG_INFINITY);
        vec![
            TokenLogprobs { chosen: first.clone(), top: vec![first, part.clone()] },
            TokenLogprobs { chosen: part, top: Vec::new() },
        ]
    }

    #[test]
    fn those_of_a_chat_have_bytes_and_no_infinity() {
        let samples = samples();
        let found = serde_json::to_value(ChatLogprobs::new(&samples)).expect("JSON");
        let first = json!({"token": "né", "logprob": -0.5, "bytes": [110, 195, 169]});
        let part = json!({"token": "\u{fffd}", "logprob": -9999.0, "bytes": [240, 159]});
        let with_top = |of: &serde_json::Value, top: serde_json::Value| {
            let mut of = of.clone();
            of["top_logprobs"] = top;
            of
        };
        let content = [with_top(&first, json!([first, part])), with_top(&part, json!([]))];
        assert_eq!(found, json!({"content": content, "refusal": null}));
    }

    #[test]
    fn those_of_a_completion_have_offsets_that_go_on() {
        let (samples, mut offset) = (samples(), 3);
        let found = serde_json::to_value(TextLogprobs::new(&samples, true, &mut offset));
        let expected = json!({
            "tokens": ["né", "\u{fffd}"], "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [{"né": -0.5, "\u{fffd}": -9999.0}, {}], "text_offset": [3, 5],
        });
        assert_eq!(found.expect("JSON"), expected);
        assert_eq!(offset, 6);
        let found = serde_json::to_value(TextLogprobs::new(&samples, false, &mut offset));
        assert!(found.expect("JSON")["top_logprobs"].is_null());
    }
}
