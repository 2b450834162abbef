//! What was said so far, and what it took.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use stagebus_schemas::messages::public::{ChatMessage, PromptRequest};

use crate::ask::answer::Complete;
use crate::ask::prompt::message;

/// Milliseconds of a second.
const MS: f64 = 1e3;

/// A conversation.
#[derive(Debug, Default)]
pub struct Conversation {
    system: Option<String>,
    /// The turns of user and model, in pairs.
    messages: Vec<ChatMessage>,
    stats: Stats,
}

/// What the answers of a conversation took.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Answers, cancelled ones included.
    pub answers: u64,
    /// Tokens of all prompts; each prompt holds the conversation before it.
    pub prompt_tokens: u64,
    /// Of these, tokens that every stage had cached.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Tokens drafted.
    pub drafted_tokens: u64,
    /// Drafted tokens that the model chose too.
    pub accepted_tokens: u64,
    /// The last answer.
    pub last: Option<LastAnswer>,
}

/// What one answer took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LastAnswer {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, tokens that every stage had cached.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Tokens per second after the first one.
    pub tok_s: f64,
    /// Time to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Time from the request to its end, in milliseconds.
    pub total_ms: f64,
    /// Part of the drafted tokens that the model chose too, 0 to 1; absent without drafted tokens.
    pub acceptance: Option<f64>,
}

/// Why a conversation was not saved.
#[derive(Debug, thiserror::Error)]
#[error("cannot save the conversation to {}; a new file is made, none is replaced", path.display())]
pub struct SaveError {
    /// The file.
    path: PathBuf,
    /// The system's reason.
    #[source]
    source: io::Error,
}

impl Conversation {
    /// Starts one.
    #[must_use]
    pub fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// The request for the next answer, with everything that was said before.
    #[must_use]
    pub fn request(&self, options: PromptRequest, said: &str) -> PromptRequest {
        let messages = self.all().chain([message("user", said.to_owned())]).collect();
        PromptRequest { messages: Some(messages), ..options }
    }

    /// Takes in a turn. One that was cancelled before any text leaves no trace in what was said.
    pub fn answered(&mut self, said: &str, answer: &Complete) {
        self.stats.take(answer);
        if !answer.text.is_empty() {
            self.messages.push(message("user", said.to_owned()));
            self.messages.push(message("assistant", answer.text.clone()));
        }
    }

    /// Forgets what was said; the system message stays.
    pub fn reset(&mut self) {
        self.messages.clear();
    }

    /// Replaces the system message.
    pub fn set_system(&mut self, system: Option<String>) {
        self.system = system;
    }

    /// What the answers took.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Writes what was said to a new file, in the form of `messages` of a request.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save(&self, path: &Path) -> Result<(), SaveError> {
        let write = || {
            let text = serde_json::to_string_pretty(&self.all().collect::<Vec<_>>())?;
            let mut file = File::create_new(path)?;
            file.write_all(text.as_bytes())?;
            file.write_all(b"\n")
        };
        write().map_err(|source| SaveError { path: path.to_owned(), source })
    }

    fn all(&self) -> impl Iterator<Item = ChatMessage> {
        let system = self.system.iter().map(|text| message("system", text.clone()));
        system.chain(self.messages.iter().cloned())
    }
}

impl Stats {
    fn take(&mut self, answer: &Complete) {
        let usage = &answer.usage;
        self.answers += 1;
        self.prompt_tokens += u64::from(usage.prompt_tokens);
        self.cached_tokens += u64::from(usage.cached_tokens);
        self.completion_tokens += u64::from(usage.completion_tokens);
        self.drafted_tokens += u64::from(usage.drafted_tokens);
        self.accepted_tokens += u64::from(usage.accepted_tokens);
        self.last = Some(LastAnswer {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            tok_s: answer.tok_s,
            ttft_ms: answer.ttft_ms,
            total_ms: answer.timings.total_ms,
            acceptance: acceptance(usage.drafted_tokens.into(), usage.accepted_tokens.into()),
        });
    }

    /// For people, two lines.
    #[must_use]
    pub fn describe(&self) -> String {
        let Some(last) = &self.last else { return "no answer yet\n".to_owned() };
        let drafts = |acceptance: Option<f64>| match acceptance {
            Some(part) => format!(", {:.0} % of drafted tokens accepted", part * 100.0),
            None => String::new(),
        };
        format!(
            "last answer:  {} prompt tokens ({} cached), {} generated at {:.1} tokens/s, first after \
             {:.0} ms, all after {:.1} s{}\n\
             conversation: {} answers, {} prompt tokens ({} cached), {} generated{}\n",
            last.prompt_tokens,
            last.cached_tokens,
            last.completion_tokens,
            last.tok_s,
            last.ttft_ms,
            last.total_ms / MS,
            drafts(last.acceptance),
            self.answers,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            drafts(acceptance(self.drafted_tokens, self.accepted_tokens)),
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share that is shown")]
fn acceptance(drafted: u64, accepted: u64) -> Option<f64> {
    (drafted > 0).then(|| accepted as f64 / drafted as f64)
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::ids::RequestId;
    use stagebus_schemas::messages::public::{FinishReason, Timings, Usage};

    use super::*;

    fn complete(text: &str, drafted_tokens: u32) -> Complete {
        Complete {
            text: text.to_owned(),
            tokens: vec![1, 2],
            tok_s: 20.0,
            ttft_ms: 50.0,
            stages: 2,
            finish_reason: FinishReason::Stop,
            usage: Usage {
                prompt_tokens: 10,
                cached_tokens: 4,
                completion_tokens: 2,
                drafted_tokens,
                accepted_tokens: drafted_tokens / 2,
                ..Usage::default()
            },
            timings: Timings { total_ms: 150.0, ..Timings::default() },
            request_id: RequestId::new("r").expect("an id"),
            seed: None,
            logprobs: Vec::new(),
        }
    }

    fn said(conversation: &Conversation, next: &str) -> Vec<(String, String)> {
        let request = conversation.request(PromptRequest::default(), next);
        let messages = request.messages.expect("messages");
        messages.into_iter().map(|message| (message.role, message.content)).collect()
    }

    fn pairs(texts: &[(&str, &str)]) -> Vec<(String, String)> {
        texts.iter().map(|(role, text)| ((*role).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_request_holds_what_was_said_before() {
        let mut conversation = Conversation::new(Some("Be brief.".to_owned()));
        conversation.answered("Hi", &complete("Hello.", 0));
        conversation.answered("Never answered", &complete("", 0));
        let expected = pairs(&[
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Hello."),
            ("user", "And?"),
        ]);
        assert_eq!(said(&conversation, "And?"), expected);
        conversation.set_system(None);
        assert_eq!(said(&conversation, "And?"), expected[1..]);
        conversation.set_system(Some("Be kind.".to_owned()));
        conversation.reset();
        assert_eq!(said(&conversation, "x"), pairs(&[("system", "Be kind."), ("user", "x")]));
        assert_eq!(conversation.stats().answers, 2, "the count goes on");
    }

    #[test]
    fn stats_add_up_and_show_the_last_answer() {
        let mut conversation = Conversation::default();
        assert_eq!(conversation.stats().describe(), "no answer yet\n");
        conversation.answered("a", &complete("b", 0));
        assert_eq!(conversation.stats().last.as_ref().and_then(|last| last.acceptance), None);
        conversation.answered("c", &complete("d", 8));
        let stats = conversation.stats();
        assert_eq!((stats.prompt_tokens, stats.completion_tokens), (20, 4));
        let text = stats.describe();
        assert!(text.contains("20.0 tokens/s") && text.contains("50 % of drafted"), "{text}");
    }

    #[test]
    fn a_file_holds_messages_and_is_never_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("chat.json");
        let mut conversation = Conversation::default();
        conversation.answered("Hi", &complete("Hello.", 0));
        conversation.save(&path).expect("a new file");
        let text = std::fs::read(&path).expect("the file");
        let found: Vec<ChatMessage> = serde_json::from_slice(&text).expect("messages");
        let expected = ["Hi", "Hello."];
        assert!(found.iter().map(|message| message.content.as_str()).eq(expected));
        let error = conversation.save(&path).expect_err("it exists");
        assert_eq!(error.source.kind(), io::ErrorKind::AlreadyExists);
        assert!(error.to_string().contains("chat.json"), "{error}");
    }
}
