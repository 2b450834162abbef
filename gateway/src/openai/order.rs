//! What chats and completions share: parameters, their checks, and the requests that they become.

use serde::Deserialize;
use serde::de::IgnoredAny;
use stagebus_schemas::ids::{ModelName, RequestId};
use stagebus_schemas::messages::public::{ChatMessage, Limits, PromptRequest, Tool};

use crate::api_error::ApiError;
use crate::gateway::Gateway;

/// Temperature where a request names none, as OpenAI documents it.
pub(crate) const DEFAULT_TEMPERATURE: f32 = 1.0;

/// Most texts of `stop`, as OpenAI documents it.
const MAX_STOPS: usize = 4;

/// What is checked here, so that the parameter at fault is named and nothing is sent in vain. The
/// coordinator knows context and vocabulary, and has the last word.
const LIMITS: Limits = Limits { max_stops: MAX_STOPS, ..Limits::new(u32::MAX, u32::MAX) };

/// One text or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum Stop {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// The key of the noise. OpenAI's is signed.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "expected a whole number of 64 bits")]
pub(crate) enum Seed {
    /// From 0.
    Unsigned(u64),
    /// Below 0.
    Signed(i64),
}

/// How a stream is wanted.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// A last chunk tells what was used.
    include_usage: Option<bool>,
    /// Chunks of their own tell what the fleet's steps took; not of OpenAI's API.
    include_timings: Option<bool>,
    /// Padding against eavesdroppers is OpenAI's own.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<IgnoredAny>,
}

/// Where the tokens of a prompt come from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    /// A chat, and the functions that the model is told of.
    Messages(Vec<ChatMessage>, Vec<Tool>),
    /// Text as it is.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<u32>),
}

/// What a request asks for, not checked yet.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Name of the model.
    pub(crate) model: String,
    /// The prompts.
    pub(crate) inputs: Vec<Input>,
    /// Answers to each of them.
    pub(crate) n: Option<u32>,
    /// Everything else; without a prompt.
    pub(crate) parameters: PromptRequest,
    /// Whether chunks are wanted.
    pub(crate) stream: Option<bool>,
    /// How.
    pub(crate) stream_options: Option<StreamOptions>,
}

/// What goes to the fleet.
#[derive(Debug)]
pub(crate) struct Order {
    /// The model.
    pub(crate) model: ModelName,
    /// The requests: `n` for the first prompt, `n` for the second, and so on.
    pub(crate) requests: Vec<PromptRequest>,
    /// Requests for each prompt.
    pub(crate) n: u32,
    /// Whether chunks are wanted.
    pub(crate) stream: bool,
    /// Whether a last chunk tells what was used.
    pub(crate) include_usage: bool,
}

impl Stop {
    /// The texts.
    pub(crate) fn into_texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

impl Seed {
    /// The same bits as the bus takes them.
    pub(crate) const fn bits(self) -> u64 {
        match self {
            Self::Unsigned(seed) => seed,
            Self::Signed(seed) => seed.cast_unsigned(),
        }
    }
}

/// Refuses fields that ask for what is not done here.
///
/// # Errors
/// The first one that is given.
pub(crate) fn refuse(fields: &[(&str, bool)]) -> Result<(), ApiError> {
    match fields.iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => {
            Err(ApiError::unsupported(name, format!("{name} is not supported here")))
        }
        None => Ok(()),
    }
}

/// The one of two names of the same number that is given.
///
/// # Errors
/// Both are.
pub(crate) fn one_of(
    (old, first): (&str, Option<u32>),
    (new, second): (&str, Option<u32>),
) -> Result<Option<u32>, ApiError> {
    if first.is_some() && second.is_some() {
        let message = format!("{old} and {new} are the same, give one of them");
        return Err(ApiError::invalid(Some(old.to_owned()), message));
    }
    Ok(first.or(second))
}

impl Order {
    /// Checks what was asked and makes the requests. With a seed, the answers to one prompt have
    /// this seed and those that follow it.
    ///
    /// # Errors
    /// A model that cannot be asked, parameters out of their range, more answers than are given.
    pub(crate) fn new(gateway: &Gateway, asked: Asked) -> Result<Self, ApiError> {
        let Asked { model, inputs, n, parameters, stream, stream_options } = asked;
        let model = gateway.allowed_model(&model)?;
        let probe = PromptRequest { tokens: Some(vec![0]), ..parameters.clone() };
        probe.validate(&LIMITS)?;
        let n = n.unwrap_or(1);
        let most = gateway.settings.max_choices;
        if n == 0 {
            return Err(ApiError::invalid(Some("n".to_owned()), "n is 0, expected at least 1"));
        }
        let n_prompts = u32::try_from(inputs.len()).unwrap_or(u32::MAX);
        if n.saturating_mul(n_prompts) > most {
            let message =
                format!("{n} answers to {n_prompts} prompts, at most {most} are given at once");
            return Err(ApiError::invalid(Some("n".to_owned()), message));
        }
        let stream = stream.unwrap_or(false);
        if stream_options.is_some() && !stream {
            let message = "stream_options is given without stream: true";
            return Err(ApiError::invalid(Some("stream_options".to_owned()), message));
        }
        let timings = stream_options.and_then(|options| options.include_timings);
        let mut requests = Vec::with_capacity(inputs.len());
        for input in inputs {
            for i in 0..n {
                let seed = parameters.seed.map(|seed| seed.wrapping_add(i.into()));
                let common = PromptRequest {
                    request_id: Some(RequestId::random()),
                    seed,
                    stream: Some(stream),
                    timings,
                    ..parameters.clone()
                };
                requests.push(input.clone().of(common));
            }
        }
        let include_usage = stream_options.and_then(|options| options.include_usage);
        Ok(Self { model, requests, n, stream, include_usage: include_usage.unwrap_or(false) })
    }
}

impl Input {
    fn of(self, request: PromptRequest) -> PromptRequest {
        match self {
            Self::Messages(messages, tools) => {
                PromptRequest { messages: Some(messages), tools, ..request }
            }
            Self::Text(prompt) => PromptRequest { prompt: Some(prompt), ..request },
            Self::Tokens(tokens) => PromptRequest { tokens: Some(tokens), ..request },
        }
    }
}
