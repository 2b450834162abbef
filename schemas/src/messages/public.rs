//! The public contract: a prompt request and the events that answer it.
//!
//! JSON or MessagePack, told apart by the `Content-Type` header, else by the first byte.

mod tools;
mod validate;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::ErrorClass;
use crate::ids::{RequestId, StageIndex};
use crate::messages::constraint;
use crate::messages::control::Priority;

pub use crate::messages::constraint::{Constraint, MAX_CONSTRAINT_BYTES};

pub use tools::{Function, FunctionCall, MAX_TOOLS, Tool, ToolCall, ToolKind};
pub use validate::{Limits, PromptInput, RequestError, ValidRequest};

/// One message of a chat.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or what the model's template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Calls that the assistant has made after the text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call whose result the message is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    /// A message of text.
    #[must_use]
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: content.into(), ..Self::default() }
    }
}

/// A request. Exactly one of `messages`, `prompt` and `tokens` is given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptRequest {
    /// Name for the request, unique per client; made up when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    /// A chat, rendered by the model's template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<Vec<ChatMessage>>,
    /// Functions that the model is told of beside `messages`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Tool>,
    /// Raw text, tokenised as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Token ids, used as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
    /// Most tokens to generate; the coordinator's default when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Sampling temperature; absent or 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Keeps the smallest set of most likely tokens that holds this probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Keeps the k most likely tokens; 0 keeps all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Keeps tokens at least this likely, relative to the most likely one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Seed of the sampling noise; `accepted` names the one that is taken when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Divides positive logits (multiplies negative ones) of tokens in prompt and output; 1 is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that were generated before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f32>,
    /// Subtracted once per time that a token was generated before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of single tokens, by token id; -100 rules a token out.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logit_bias: BTreeMap<u32, f32>,
    /// What the output must be; anything when absent.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "constraint::from_map")]
    pub constraint: Option<Constraint>,
    /// Texts that end the output; they are not part of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Log-probabilities of the chosen tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<bool>,
    /// Most likely tokens to report beside each chosen one; needs `logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<u32>,
    /// False: only `accepted` and `done` come, and `done` carries the whole text and tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    /// Tokens to draft per step, 0 for no speculation; the coordinator chooses when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_tokens: Option<u32>,
    /// Most verifies under way at the same time; the coordinator chooses when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_windows: Option<u32>,
    /// Most second guesses beside what is drafted, 0 for none; the coordinator chooses when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_alternatives: Option<u32>,
    /// `interactive` (the default) or `batch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// True: token events tell what the steps took whose tokens they carry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<bool>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The client cancelled.
    Cancelled,
}

/// What a request used.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, an end token included.
    pub completion_tokens: u32,
    /// Tokens of the prompt that every stage had cached.
    #[serde(default)]
    pub cached_tokens: u32,
    /// Tokens drafted.
    #[serde(default)]
    pub drafted_tokens: u32,
    /// Drafted tokens that the model chose too.
    #[serde(default)]
    pub accepted_tokens: u32,
    /// Steps that generated tokens.
    #[serde(default)]
    pub steps: u32,
    /// KV positions that rewinds left behind per position of the text, over the stage with the
    /// most; 0 where rewinding leaves nothing.
    #[serde(default)]
    pub bloat: f64,
}

/// How long a request took.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// From arrival to the first step, in milliseconds.
    pub queue_ms: f64,
    /// From arrival to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Tokens per second after the first token; 0 with fewer than two tokens.
    pub decode_tok_s: f64,
    /// From arrival to the end, in milliseconds.
    pub total_ms: f64,
    /// Mean inference time of a decode step on each stage, in milliseconds.
    pub stage_infer_ms: Vec<f64>,
    /// Mean of a decode step's round trip less the inference of all stages, in milliseconds.
    pub overhead_ms: f64,
}

/// How long one step of a request took that generated tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Tokens that it generated.
    pub tokens: u32,
    /// From sending it until its answer came, in milliseconds.
    pub round_trip_ms: f64,
    /// The part of that in which no stage had it: the hops, in milliseconds.
    pub hops_ms: f64,
    /// How long it waited for inference on each stage, in milliseconds.
    pub stage_queue_ms: Vec<f64>,
    /// Inference of its micro-batch on each stage, in milliseconds.
    pub stage_infer_ms: Vec<f64>,
}

/// A token with its log-probability under the model's own distribution, before any parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Logprob {
    /// The token.
    pub token: u32,
    /// Its text; a special token's name. Bytes that are no characters by themselves are replaced.
    pub text: String,
    /// Its bytes, where the text does not hold them: characters can be spread over tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Vec<u8>>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// What a request with `logprobs` hears of one generated token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token.
    #[serde(flatten)]
    pub chosen: Logprob,
    /// The most likely tokens in falling order, as many as asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<Logprob>,
}

/// What a request that has been accepted waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    /// Its prompt is being read.
    Prefilling,
    /// Its tokens are being generated.
    Generating,
    /// It lost its place; what it had is being rebuilt elsewhere. No token is lost or repeated.
    Recovering,
    /// As `recovering`, but a stage has no worker, or no room, at the moment.
    Waiting,
}

/// One event of the answer. The stream ends with `done` or `error`, then an empty message.
///
/// More kinds of events may come in later versions: a client skips those that it does not know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The request is valid and has a session.
    Accepted {
        /// Name of the request.
        request_id: RequestId,
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Seed of the noise, if the request samples: with it the request can be repeated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seed: Option<u64>,
    },
    /// How the request fares: sent when it loses its place, and after a second without another
    /// event, so that a client knows that somebody still works for it.
    Status {
        /// What it waits for.
        state: RequestState,
        /// The stage that it lost or waits for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<StageIndex>,
        /// What happened, for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
    },
    /// New text.
    Token {
        /// Number of the event, from 0 without gaps.
        i: u64,
        /// Text that became final: never half a character, never part of a stop string.
        text: String,
        /// Tokens since the last event; they may be ahead of the text.
        tokens: Vec<u32>,
        /// One entry per token, if the request asked for it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        logprobs: Vec<TokenLogprobs>,
        /// One entry per step whose tokens are among `tokens`, if the request asked for it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        steps: Vec<StepTimes>,
    },
    /// The end.
    Done {
        /// Why.
        finish_reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// How long it took.
        timings: Timings,
        /// The whole text, if the request did not stream.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// All tokens, if the request did not stream.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tokens: Option<Vec<u32>>,
        /// One entry per token, if the request did not stream and asked for it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        logprobs: Vec<TokenLogprobs>,
    },
    /// The end by a failure.
    Error {
        /// Kind of failure.
        class: ErrorClass,
        /// What failed and what to do.
        message: String,
        /// When a retry is sensible.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_after_ms: Option<u64>,
    },
}
