//! What the answers of chats and completions have in common.

use serde::Serialize;
use stagebus_schemas::messages::public::{FinishReason, TokenLogprobs, Usage};

use crate::generation::End;

/// Digits of the shard set's fingerprint that are shown.
const SHOWN_FINGERPRINT: usize = 12;

/// The beginning of every answer and chunk.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    /// Name of the answer.
    pub(crate) id: String,
    /// When it was begun, in seconds since 1970.
    pub(crate) created: u64,
    /// The model.
    pub(crate) model: String,
    /// What changes with the model's weights, if it is known.
    pub(crate) fingerprint: Option<String>,
    /// Whether every chunk has a field for what was used.
    pub(crate) include_usage: bool,
}

/// The form of one route's answers, as JSON.
pub(crate) trait Format: Send + 'static {
    /// What the names of answers start with.
    const ID_PREFIX: &'static str;

    /// The chunk before the text of a choice, if there is one.
    ///
    /// # Errors
    /// It cannot be represented.
    fn begin(&self, head: &Head, index: u32) -> serde_json::Result<Option<String>>;

    /// A chunk with what is new; nothing where more must come before it can be told.
    ///
    /// # Errors
    /// As above.
    fn delta(
        &mut self,
        head: &Head,
        index: u32,
        text: &str,
        logprobs: &[TokenLogprobs],
    ) -> serde_json::Result<Option<String>>;

    /// The chunk that ends a choice.
    ///
    /// # Errors
    /// As above.
    fn end(&mut self, head: &Head, index: u32, reason: FinishReason) -> serde_json::Result<String>;

    /// The chunk that tells what was used.
    ///
    /// # Errors
    /// As above.
    fn usage(&self, head: &Head, used: Used) -> serde_json::Result<String>;

    /// The answer of a request that does not stream.
    ///
    /// # Errors
    /// As above.
    fn whole(&self, head: &Head, choices: &[End], used: Used) -> serde_json::Result<String>;
}

/// What all choices used together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Used {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

impl Used {
    /// Adds a choice; a prompt counts with the first of its choices only.
    pub(crate) fn add(&mut self, usage: &Usage, counts_prompt: bool) {
        if counts_prompt {
            self.prompt_tokens += u64::from(usage.prompt_tokens);
            self.prompt_tokens_details.cached_tokens += u64::from(usage.cached_tokens);
        }
        self.completion_tokens += u64::from(usage.completion_tokens);
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// OpenAI's word for the end of a choice.
pub(crate) const fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        // Such an answer is an error before it gets here.
        FinishReason::Cancelled => "cancelled",
    }
}

/// The part of a shard set's fingerprint that is shown.
pub(crate) fn shown_fingerprint(fingerprint: &str) -> String {
    format!("fp_{}", fingerprint.get(..SHOWN_FINGERPRINT).unwrap_or(fingerprint))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use stagebus_schemas::messages::public::Timings;

    pub(crate) fn head(include_usage: bool) -> Head {
        Head {
            id: "x-1".to_owned(),
            created: 7,
            model: "m".to_owned(),
            fingerprint: Some(shown_fingerprint("0123456789abcdef")),
            include_usage,
        }
    }

    pub(crate) fn end(text: &str, logprobs: Vec<TokenLogprobs>) -> End {
        End {
            reason: FinishReason::Length,
            usage: usage(),
            timings: Timings::default(),
            text: text.to_owned(),
            logprobs,
        }
    }

    pub(crate) fn usage() -> Usage {
        Usage { prompt_tokens: 5, completion_tokens: 2, cached_tokens: 3, ..Usage::default() }
    }

    #[test]
    fn a_prompt_counts_once_and_every_completion_counts() {
        let mut used = Used::default();
        used.add(&usage(), true);
        used.add(&usage(), false);
        let found = serde_json::to_value(used).expect("JSON");
        let expected = serde_json::json!({"prompt_tokens": 5, "completion_tokens": 4,
            "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}});
        assert_eq!(found, expected);
    }

    #[test]
    fn a_short_fingerprint_is_shown_whole() {
        assert_eq!(shown_fingerprint("ab"), "fp_ab");
        assert_eq!(shown_fingerprint("0123456789abcdef"), "fp_0123456789ab");
    }
}
