//! Checks of a prompt request that need neither the tokenizer nor the model.

use crate::error::{ErrorClass, ErrorReply};
use crate::ids::RequestId;
use crate::messages::control::Priority;
use crate::messages::public::{ChatMessage, PromptRequest};

/// Highest temperature: beyond it every token is about as likely as any other.
const MAX_TEMPERATURE: f32 = 10.0;

/// Longest role of a chat message, in bytes: above any that a template knows.
const MAX_ROLE_BYTES: usize = 64;

/// What a deployment accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Tokens that the model attends to, prompt and output together.
    pub context_len: u32,
    /// Number of token ids of the model.
    pub vocab_size: u32,
    /// Most stop strings; each is looked for after every token.
    pub max_stops: usize,
    /// Longest stop string, in bytes: that much output may be held back from the stream.
    pub max_stop_bytes: usize,
    /// Most messages of a chat.
    pub max_messages: usize,
}

impl Limits {
    /// Makes the limits of a model, with the defaults for the rest.
    #[must_use]
    pub const fn new(context_len: u32, vocab_size: u32) -> Self {
        Self { context_len, vocab_size, max_stops: 16, max_stop_bytes: 256, max_messages: 4096 }
    }

    /// Checks that a prompt leaves room for at least one token; also for rendered and tokenised
    /// prompts.
    ///
    /// # Errors
    /// [`RequestError::Context`].
    pub const fn check_prompt_len(&self, n_tokens: usize) -> Result<(), RequestError> {
        if n_tokens >= self.context_len as usize {
            let context_len = self.context_len;
            return Err(RequestError::Context { found: n_tokens, context_len });
        }
        Ok(())
    }
}

/// Where the tokens of the prompt come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    /// A chat, rendered by the model's template.
    Messages(Vec<ChatMessage>),
    /// Raw text, tokenised as it is.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// A request that passed the checks; decoding is greedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidRequest {
    /// Name for the request, if the client gave one.
    pub request_id: Option<RequestId>,
    /// The prompt.
    pub input: PromptInput,
    /// Most tokens to generate, if the client said so.
    pub max_tokens: Option<u32>,
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Whether token events are wanted.
    pub stream: bool,
    /// Tokens to draft per step, if the client said so.
    pub draft_tokens: Option<u32>,
    /// Who goes first.
    pub priority: Priority,
}

/// Why a request is refused. No text of the prompt is in it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The prompt is given twice or not at all.
    #[error("the request has {found} of messages, prompt and tokens, expected exactly one")]
    Input {
        /// How many are given.
        found: usize,
    },
    /// A field that needs content has none.
    #[error("{field} is empty")]
    Empty {
        /// Name of the field.
        field: &'static str,
    },
    /// A list or text is too long.
    #[error("{field} has {found} {unit}, at most {limit} are accepted")]
    TooLong {
        /// Name of the field.
        field: &'static str,
        /// Length found.
        found: usize,
        /// Longest accepted.
        limit: usize,
        /// What is counted.
        unit: &'static str,
    },
    /// A number is out of its range, or is none.
    #[error("{field} is {found}, expected {expected}")]
    Range {
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: f64,
        /// What is accepted.
        expected: &'static str,
    },
    /// A token id that the model does not have.
    #[error("tokens[{index}] is {found}, the model has ids below {vocab_size}")]
    TokenId {
        /// Position in `tokens`.
        index: usize,
        /// The id.
        found: u32,
        /// Number of ids.
        vocab_size: u32,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {found} tokens, the context of {context_len} leaves no room for output"
    )]
    Context {
        /// Tokens of the prompt.
        found: usize,
        /// Tokens of the context.
        context_len: u32,
    },
    /// Something that this build cannot do yet; refused rather than ignored.
    #[error("{field} asks for {what}, which this build does not support yet; {instead}")]
    Unsupported {
        /// Name of the field.
        field: &'static str,
        /// What it asks for.
        what: &'static str,
        /// What works.
        instead: &'static str,
    },
}

impl From<RequestError> for ErrorReply {
    fn from(error: RequestError) -> Self {
        Self::new(ErrorClass::InvalidRequest, error.to_string())
    }
}

impl PromptRequest {
    /// Checks the request, and that it can be honoured as it stands.
    ///
    /// `temperature` above 0 with `top_k` other than 1 asks for sampling, which is refused;
    /// without it decoding is greedy and the other sampling fields change nothing.
    ///
    /// # Errors
    /// [`RequestError`], for the first rule that is broken.
    pub fn validate(self, limits: &Limits) -> Result<ValidRequest, RequestError> {
        check_sampling(&self)?;
        check_stops(&self.stop, limits)?;
        if self.max_tokens == Some(0) {
            return Err(range("max_tokens", 0.0, "at least 1"));
        }
        let given = [self.messages.is_some(), self.prompt.is_some(), self.tokens.is_some()];
        let found = given.into_iter().filter(|given| *given).count();
        let input = match (self.messages, self.prompt, self.tokens) {
            (Some(messages), None, None) => check_messages(messages, limits)?,
            (None, Some(text), None) if text.is_empty() => {
                return Err(RequestError::Empty { field: "prompt" });
            }
            (None, Some(text), None) => PromptInput::Text(text),
            (None, None, Some(tokens)) => check_tokens(tokens, limits)?,
            _ => return Err(RequestError::Input { found }),
        };
        Ok(ValidRequest {
            request_id: self.request_id,
            input,
            max_tokens: self.max_tokens,
            stop: self.stop,
            stream: self.stream.unwrap_or(true),
            draft_tokens: self.draft_tokens,
            priority: self.priority.unwrap_or_default(),
        })
    }
}

fn check_sampling(request: &PromptRequest) -> Result<(), RequestError> {
    check_number("temperature", request.temperature, MAX_TEMPERATURE, "a number from 0 to 10")?;
    check_number("top_p", request.top_p, 1.0, "a number from 0 to 1")?;
    check_number("min_p", request.min_p, 1.0, "a number from 0 to 1")?;
    let is_greedy =
        request.temperature.is_none_or(|value| value <= 0.0) || request.top_k == Some(1);
    if !is_greedy {
        return Err(RequestError::Unsupported {
            field: "temperature",
            what: "sampling",
            instead: "leave it out or send 0 for greedy decoding",
        });
    }
    if request.logprobs == Some(true) {
        return Err(RequestError::Unsupported {
            field: "logprobs",
            what: "log-probabilities",
            instead: "leave it out",
        });
    }
    Ok(())
}

fn check_number(
    field: &'static str,
    value: Option<f32>,
    max: f32,
    expected: &'static str,
) -> Result<(), RequestError> {
    match value {
        // A NaN is in no range.
        Some(value) if !(0.0..=max).contains(&value) => Err(range(field, value.into(), expected)),
        _ => Ok(()),
    }
}

const fn range(field: &'static str, found: f64, expected: &'static str) -> RequestError {
    RequestError::Range { field, found, expected }
}

fn check_stops(stops: &[String], limits: &Limits) -> Result<(), RequestError> {
    check_length("stop", stops.len(), limits.max_stops, "texts")?;
    for stop in stops {
        if stop.is_empty() {
            return Err(RequestError::Empty { field: "a text of stop" });
        }
        check_length("a text of stop", stop.len(), limits.max_stop_bytes, "bytes")?;
    }
    Ok(())
}

fn check_messages(
    messages: Vec<ChatMessage>,
    limits: &Limits,
) -> Result<PromptInput, RequestError> {
    if messages.is_empty() {
        return Err(RequestError::Empty { field: "messages" });
    }
    check_length("messages", messages.len(), limits.max_messages, "entries")?;
    for message in &messages {
        if message.role.is_empty() {
            return Err(RequestError::Empty { field: "a role of messages" });
        }
        check_length("a role of messages", message.role.len(), MAX_ROLE_BYTES, "bytes")?;
    }
    Ok(PromptInput::Messages(messages))
}

fn check_tokens(tokens: Vec<u32>, limits: &Limits) -> Result<PromptInput, RequestError> {
    let vocab_size = limits.vocab_size;
    if tokens.is_empty() {
        return Err(RequestError::Empty { field: "tokens" });
    }
    if let Some((index, found)) = tokens.iter().enumerate().find(|(_, id)| **id >= vocab_size) {
        return Err(RequestError::TokenId { index, found: *found, vocab_size });
    }
    limits.check_prompt_len(tokens.len())?;
    Ok(PromptInput::Tokens(tokens))
}

const fn check_length(
    field: &'static str,
    found: usize,
    limit: usize,
    unit: &'static str,
) -> Result<(), RequestError> {
    if found > limit {
        return Err(RequestError::TooLong { field, found, limit, unit });
    }
    Ok(())
}
