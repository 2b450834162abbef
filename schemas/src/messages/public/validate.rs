//! Checks of a prompt request that need neither the tokenizer nor the model.

use std::sync::Arc;

use crate::error::{ErrorClass, ErrorReply};
use crate::ids::RequestId;
use crate::messages::constraint::{Constraint, MAX_CONSTRAINT_BYTES};
use crate::messages::control::Priority;
use crate::messages::public::{ChatMessage, MAX_TOOLS, PromptRequest, Tool};
use crate::messages::sampling::{FORBIDDEN, MAX_LOGIT_BIAS, Sampling};

/// Highest temperature: beyond it every token is about as likely as any other.
const MAX_TEMPERATURE: f32 = 10.0;

/// Highest repetition penalty: beyond it no token of the text comes again anyway.
const MAX_REPETITION_PENALTY: f32 = 10.0;

/// Largest presence and frequency penalty, either way, as in other services.
const MAX_PENALTY: f32 = 2.0;

/// Largest bias, either way, as in other services.
const MAX_BIAS: f32 = 100.0;

/// Most tokens reported beside a chosen one, as in other services.
const MAX_TOP_LOGPROBS: u32 = 20;

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
    Messages {
        /// What was said.
        messages: Vec<ChatMessage>,
        /// Functions that the model is told of.
        tools: Vec<Tool>,
    },
    /// Raw text, tokenised as it is.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// A request that passed the checks.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidRequest {
    /// Name for the request, if the client gave one.
    pub request_id: Option<RequestId>,
    /// The prompt.
    pub input: PromptInput,
    /// Most tokens to generate, if the client said so.
    pub max_tokens: Option<u32>,
    /// How tokens are chosen; without a seed in the request, a random one.
    pub sampling: Sampling,
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Whether token events are wanted.
    pub stream: bool,
    /// Tokens to draft per step, if the client said so.
    pub draft_tokens: Option<u32>,
    /// Most verifies under way at the same time, if the client said so.
    pub draft_windows: Option<u32>,
    /// Most second guesses beside what is drafted, if the client said so.
    pub draft_alternatives: Option<u32>,
    /// Who goes first.
    pub priority: Priority,
    /// Whether token events tell what their steps took.
    pub timings: bool,
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
    /// A biased token id that the model does not have.
    #[error("logit_bias names token {found}, the model has ids below {vocab_size}")]
    BiasToken {
        /// The id.
        found: u32,
        /// Number of ids.
        vocab_size: u32,
    },
    /// No token is left to generate.
    #[error("logit_bias forbids every one of the model's {vocab_size} tokens")]
    AllForbidden {
        /// Number of ids.
        vocab_size: u32,
    },
    /// A field that only means something with another one.
    #[error("{field} is given without {needs}")]
    Needs {
        /// The field.
        field: &'static str,
        /// What it needs.
        needs: &'static str,
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
    /// # Errors
    /// [`RequestError`], for the first rule that is broken.
    pub fn validate(self, limits: &Limits) -> Result<ValidRequest, RequestError> {
        let sampling = sampling(&self, limits)?;
        check_stops(&self.stop, limits)?;
        for (field, value) in
            [("max_tokens", self.max_tokens), ("draft_windows", self.draft_windows)]
        {
            if value == Some(0) {
                return Err(range(field, 0.0, "at least 1"));
            }
        }
        let given = [self.messages.is_some(), self.prompt.is_some(), self.tokens.is_some()];
        let found = given.into_iter().filter(|given| *given).count();
        if !self.tools.is_empty() && self.messages.is_none() {
            return Err(RequestError::Needs { field: "tools", needs: "messages" });
        }
        let input = match (self.messages, self.prompt, self.tokens) {
            (Some(messages), None, None) => {
                check_messages(&messages, limits)?;
                check_tools(&self.tools)?;
                PromptInput::Messages { messages, tools: self.tools }
            }
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
            sampling,
            stop: self.stop,
            stream: self.stream.unwrap_or(true),
            draft_tokens: self.draft_tokens,
            draft_windows: self.draft_windows,
            draft_alternatives: self.draft_alternatives,
            priority: self.priority.unwrap_or_default(),
            timings: self.timings.unwrap_or(false),
        })
    }
}

/// Checks the fields of sampling and puts their defaults in.
fn sampling(request: &PromptRequest, limits: &Limits) -> Result<Sampling, RequestError> {
    let sampling = Sampling {
        temperature: number(
            "temperature",
            request.temperature.unwrap_or(0.0),
            |value| (0.0..=MAX_TEMPERATURE).contains(&value),
            "a number from 0 to 10",
        )?,
        top_p: number(
            "top_p",
            request.top_p.unwrap_or(1.0),
            |value| value > 0.0 && value <= 1.0,
            "a number above 0, at most 1",
        )?,
        top_k: request.top_k.unwrap_or(0),
        min_p: number(
            "min_p",
            request.min_p.unwrap_or(0.0),
            |value| (0.0..=1.0).contains(&value),
            "a number from 0 to 1",
        )?,
        repetition_penalty: number(
            "repetition_penalty",
            request.repetition_penalty.unwrap_or(1.0),
            |value| value > 0.0 && value <= MAX_REPETITION_PENALTY,
            "a number above 0, at most 10",
        )?,
        presence_penalty: penalty("presence_penalty", request.presence_penalty)?,
        frequency_penalty: penalty("frequency_penalty", request.frequency_penalty)?,
        logit_bias: logit_bias(request, limits.vocab_size)?,
        seed: request.seed.unwrap_or(0),
        top_logprobs: top_logprobs(request)?,
        constraint: constraint(request)?,
    };
    if request.seed.is_none() && !sampling.is_greedy() {
        return Ok(Sampling { seed: random_seed(), ..sampling });
    }
    Ok(sampling)
}

/// A seed that every JSON reader gets back as it is: below 2^53.
fn random_seed() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0 >> 11
}

fn penalty(field: &'static str, value: Option<f32>) -> Result<f32, RequestError> {
    let fits = |value| (-MAX_PENALTY..=MAX_PENALTY).contains(&value);
    number(field, value.unwrap_or(0.0), fits, "a number from -2 to 2")
}

fn logit_bias(request: &PromptRequest, vocab_size: u32) -> Result<Vec<(u32, f32)>, RequestError> {
    let bias = &request.logit_bias;
    for (token, value) in bias {
        if *token >= vocab_size {
            return Err(RequestError::BiasToken { found: *token, vocab_size });
        }
        let fits = |value| (-MAX_BIAS..=MAX_BIAS).contains(&value);
        number("a bias of logit_bias", *value, fits, "a number from -100 to 100")?;
    }
    // A map, so no token counts twice.
    let n_forbidden = bias.values().filter(|value| **value <= FORBIDDEN).count();
    if n_forbidden == vocab_size as usize {
        return Err(RequestError::AllForbidden { vocab_size });
    }
    check_length("logit_bias", bias.len(), MAX_LOGIT_BIAS, "tokens")?;
    Ok(bias.iter().map(|(token, value)| (*token, *value)).collect())
}

/// Checks what needs no grammar; whether it can be honoured shows when it is compiled.
fn constraint(request: &PromptRequest) -> Result<Option<Arc<Constraint>>, RequestError> {
    let Some(constraint) = &request.constraint else { return Ok(None) };
    if let Some(field) = constraint.empty_field() {
        return Err(RequestError::Empty { field });
    }
    check_length("constraint", constraint.to_json().len(), MAX_CONSTRAINT_BYTES, "bytes")?;
    Ok(Some(Arc::new(constraint.clone())))
}

fn top_logprobs(request: &PromptRequest) -> Result<Option<u32>, RequestError> {
    let wanted = request.logprobs.unwrap_or(false);
    let n_top = request.top_logprobs.unwrap_or(0);
    if n_top > MAX_TOP_LOGPROBS {
        return Err(range("top_logprobs", n_top.into(), "0 to 20"));
    }
    if n_top > 0 && !wanted {
        return Err(RequestError::Needs { field: "top_logprobs", needs: "logprobs: true" });
    }
    Ok(wanted.then_some(n_top))
}

/// Checks a number; a NaN is in no range.
fn number(
    field: &'static str,
    value: f32,
    fits: impl Fn(f32) -> bool,
    expected: &'static str,
) -> Result<f32, RequestError> {
    if fits(value) { Ok(value) } else { Err(range(field, value.into(), expected)) }
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

fn check_messages(messages: &[ChatMessage], limits: &Limits) -> Result<(), RequestError> {
    if messages.is_empty() {
        return Err(RequestError::Empty { field: "messages" });
    }
    check_length("messages", messages.len(), limits.max_messages, "entries")?;
    for message in messages {
        if message.role.is_empty() {
            return Err(RequestError::Empty { field: "a role of messages" });
        }
        check_length("a role of messages", message.role.len(), MAX_ROLE_BYTES, "bytes")?;
    }
    Ok(())
}

fn check_tools(tools: &[Tool]) -> Result<(), RequestError> {
    check_length("tools", tools.len(), MAX_TOOLS, "entries")?;
    if tools.iter().any(|tool| tool.function.name.is_empty()) {
        return Err(RequestError::Empty { field: "a name of tools" });
    }
    Ok(())
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
