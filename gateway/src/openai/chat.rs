//! `/v1/chat/completions`: the request.

mod calls;
mod format;
mod grammar;
mod message;
mod tools;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use stagebus_schemas::messages::public::PromptRequest;

use super::order::{
    Asked, DEFAULT_TEMPERATURE, Input, Order, Seed, Stop, StreamOptions, one_of, refuse,
};
use crate::api_error::ApiError;
use crate::gateway::Gateway;

pub(crate) use format::ChatFormat;
use grammar::ResponseFormat;
pub(crate) use message::{Message, to_chat};
use tools::{Calls, ToolChoice, ToolEntry};

/// A request. Fields after `seed` and `stream_options` that change the answer are refused; those
/// that start with an underscore change nothing that is sent, and are passed over.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatRequest {
    model: String,
    messages: Vec<Message>,
    n: Option<u32>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<u32, f32>>,
    stop: Option<Stop>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    seed: Option<Seed>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,

    response_format: Option<ResponseFormat>,
    tools: Option<Vec<ToolEntry>>,
    tool_choice: Option<ToolChoice>,
    parallel_tool_calls: Option<bool>,

    modalities: Option<Vec<String>>,
    functions: Option<IgnoredAny>,
    function_call: Option<IgnoredAny>,
    audio: Option<IgnoredAny>,
    reasoning_effort: Option<IgnoredAny>,
    verbosity: Option<IgnoredAny>,
    web_search_options: Option<IgnoredAny>,
    moderation: Option<IgnoredAny>,

    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(rename = "prediction")]
    _prediction: Option<IgnoredAny>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<IgnoredAny>,
    #[serde(rename = "prompt_cache_options")]
    _prompt_cache_options: Option<IgnoredAny>,
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: Option<IgnoredAny>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<IgnoredAny>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<IgnoredAny>,
    #[serde(rename = "store")]
    _store: Option<IgnoredAny>,
    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
}

impl ChatRequest {
    /// Checks the request and makes what goes to the fleet, and the form of the answer.
    ///
    /// # Errors
    /// What is not supported, or out of its range.
    pub(crate) fn order(self, gateway: &Gateway) -> Result<(Order, ChatFormat), ApiError> {
        self.refuse_unsupported()?;
        let calls = Calls::new(self.tools, self.tool_choice, self.parallel_tool_calls)?;
        let constraint = grammar::constraint(self.response_format, calls.as_ref())?;
        let format = ChatFormat::new(self.logprobs == Some(true));
        let format = if calls.is_some() { format.with_calls() } else { format };
        let max_tokens = one_of(
            ("max_tokens", self.max_tokens),
            ("max_completion_tokens", self.max_completion_tokens),
        )?;
        let parameters = PromptRequest {
            max_tokens,
            temperature: Some(self.temperature.unwrap_or(DEFAULT_TEMPERATURE)),
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed.map(Seed::bits),
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.unwrap_or_default(),
            constraint,
            stop: self.stop.map(Stop::into_texts).unwrap_or_default(),
            logprobs: self.logprobs,
            top_logprobs: self.top_logprobs,
            ..PromptRequest::default()
        };
        let asked = Asked {
            model: self.model,
            inputs: vec![Input::Messages(
                to_chat(self.messages)?,
                calls.map(|calls| calls.tools).unwrap_or_default(),
            )],
            n: self.n,
            parameters,
            stream: self.stream,
            stream_options: self.stream_options,
        };
        Ok((Order::new(gateway, asked)?, format))
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        refuse(&[
            ("audio", self.audio.is_some()),
            ("reasoning_effort", self.reasoning_effort.is_some()),
            ("verbosity", self.verbosity.is_some()),
            ("web_search_options", self.web_search_options.is_some()),
            ("moderation", self.moderation.is_some()),
        ])?;
        let older = [
            ("functions", self.functions.is_some(), "tools"),
            ("function_call", self.function_call.is_some(), "tool_choice"),
        ];
        if let Some((name, _, newer)) = older.iter().find(|(_, is_given, _)| *is_given) {
            let message =
                format!("{name} is OpenAI's older form and not supported here, use {newer}");
            return Err(ApiError::unsupported(name, message));
        }
        if let Some(kind) = self.modalities.iter().flatten().find(|kind| *kind != "text") {
            let message = format!("modality {kind:?} is not supported here, answers are text");
            return Err(ApiError::unsupported("modalities", message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
