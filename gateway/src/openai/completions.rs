//! `/v1/completions`: the request.

mod format;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use stagebus_schemas::messages::public::PromptRequest;

use super::order::{Asked, DEFAULT_TEMPERATURE, Input, Order, Seed, Stop, StreamOptions, refuse};
use crate::api_error::ApiError;
use crate::gateway::Gateway;

pub(crate) use format::TextFormat;

/// Tokens where a request names no number, as OpenAI documents it.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A request. Those fields that start with an underscore change nothing that is sent, and are
/// passed over.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionRequest {
    model: String,
    prompt: Prompt,
    n: Option<u32>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<u32, f32>>,
    stop: Option<Stop>,
    logprobs: Option<u32>,
    seed: Option<Seed>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,

    best_of: Option<u32>,
    echo: Option<bool>,
    suffix: Option<String>,

    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
}

/// One prompt or several, as texts or as token ids.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of token ids, or a list of such lists"
)]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    fn into_inputs(self) -> Vec<Input> {
        match self {
            Self::Text(text) => vec![Input::Text(text)],
            Self::Texts(texts) => texts.into_iter().map(Input::Text).collect(),
            Self::Tokens(tokens) => vec![Input::Tokens(tokens)],
            Self::TokenLists(lists) => lists.into_iter().map(Input::Tokens).collect(),
        }
    }
}

fn is_empty(input: &Input) -> bool {
    match input {
        Input::Text(text) => text.is_empty(),
        Input::Tokens(tokens) => tokens.is_empty(),
        Input::Messages(messages, _) => messages.is_empty(),
    }
}

impl CompletionRequest {
    /// Whether log-probabilities are asked for, and how many beside the chosen ones.
    pub(crate) const fn format(&self) -> TextFormat {
        TextFormat::new(self.logprobs)
    }

    /// Checks the request and makes what goes to the fleet.
    ///
    /// # Errors
    /// What is not supported, or out of its range.
    pub(crate) fn order(self, gateway: &Gateway) -> Result<Order, ApiError> {
        refuse(&[
            ("best_of", self.best_of.is_some_and(|n| n != self.n.unwrap_or(1))),
            ("echo", self.echo == Some(true)),
            ("suffix", self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
        ])?;
        let inputs = self.prompt.into_inputs();
        if inputs.is_empty() || inputs.iter().any(is_empty) {
            return Err(ApiError::invalid(Some("prompt".to_owned()), "a prompt is empty"));
        }
        let parameters = PromptRequest {
            max_tokens: Some(self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
            temperature: Some(self.temperature.unwrap_or(DEFAULT_TEMPERATURE)),
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed.map(Seed::bits),
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.unwrap_or_default(),
            stop: self.stop.map(Stop::into_texts).unwrap_or_default(),
            logprobs: self.logprobs.map(|_| true),
            top_logprobs: self.logprobs,
            ..PromptRequest::default()
        };
        let asked = Asked {
            model: self.model,
            inputs,
            n: self.n,
            parameters,
            stream: self.stream,
            stream_options: self.stream_options,
        };
        Order::new(gateway, asked)
    }
}

#[cfg(test)]
mod tests;
