//! `/tokenize` and `/detokenize`, with the tokenizers of local shard sets.
//!
//! No public subject turns text into tokens: tokenizers are at home in coordinators. So the gateway
//! needs the folder of the shard set (its manifest and text files, no weights), and compares its
//! fingerprint with what the fleet announces.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::http::{Request, Response};
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use stagebus_schemas::ids::ModelName;
use stagebus_shards::ShardSet;
use stagebus_shards::text::TextModel;

use crate::api_error::ApiError;
use crate::body::read_json;
use crate::error::GatewayError;
use crate::gateway::{Gateway, Shared};
use crate::openai::chat::{Message, to_chat};

/// The tokenizers, by model.
#[derive(Debug, Clone, Default)]
pub(crate) struct Texts {
    models: BTreeMap<ModelName, Arc<LocalText>>,
}

/// One of them.
#[derive(Debug)]
struct LocalText {
    text: TextModel,
    fingerprint: String,
    context_len: usize,
}

impl Texts {
    /// Loads the tokenizers of some shard sets and compares their files with the manifests.
    ///
    /// # Errors
    /// A folder that is no shard set, or whose text files are damaged.
    pub(crate) async fn load(folders: Vec<PathBuf>) -> Result<Self, GatewayError> {
        let load = move || folders.into_iter().map(load_one).collect::<Result<_, _>>();
        let models = tokio::task::spawn_blocking(load).await.map_err(GatewayError::Load)??;
        Ok(Self { models })
    }
}

fn load_one(folder: PathBuf) -> Result<(ModelName, Arc<LocalText>), GatewayError> {
    let set = ShardSet::open(&folder)?;
    set.verify_text()?;
    let name = ModelName::new(set.manifest.model.as_str())
        .map_err(|source| GatewayError::ModelName { folder: folder.clone(), source })?;
    let text = TextModel::load(&folder).map_err(|source| GatewayError::Text { folder, source })?;
    let (fingerprint, context_len) = (set.manifest.fingerprint, set.manifest.dims.context_length);
    Ok((name, Arc::new(LocalText { text, fingerprint, context_len })))
}

/// A request to turn text into tokens; exactly one of `prompt` and `messages` is given.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenizeRequest {
    model: String,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    add_special_tokens: Option<bool>,
}

#[derive(Serialize)]
struct TokenizeAnswer {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

/// A request to turn tokens into text.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DetokenizeRequest {
    model: String,
    tokens: Vec<u32>,
}

#[derive(Serialize)]
struct DetokenizeAnswer {
    prompt: String,
}

/// `POST /tokenize`.
pub(crate) async fn tokenize(
    State(gateway): State<Shared>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let request: TokenizeRequest = read_json(&gateway.settings, request).await?;
    let local = gateway.text_of(&request.model)?;
    let place = gateway.take_place(1)?;
    let max_model_len = local.context_len;
    let tokens = beside(move || {
        let _place = place;
        let encoded = match (request.prompt, request.messages) {
            (Some(prompt), None) => {
                local.text.encode(&prompt, request.add_special_tokens.unwrap_or(true))
            }
            (None, Some(messages)) => local.text.encode_chat(&to_chat(messages)?),
            _ => {
                let message = "exactly one of prompt and messages is given";
                return Err(ApiError::invalid(Some("prompt".to_owned()), message));
            }
        };
        encoded.map_err(|error| ApiError::invalid(None, error.to_string()))
    })
    .await?;
    json(&TokenizeAnswer { count: tokens.len(), max_model_len, tokens })
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(
    State(gateway): State<Shared>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let request: DetokenizeRequest = read_json(&gateway.settings, request).await?;
    let local = gateway.text_of(&request.model)?;
    let place = gateway.take_place(1)?;
    let vocab_size = local.text.vocab_size();
    let wrong = request.tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size);
    if let Some((i, id)) = wrong {
        let message = format!("token {id} is none of the model's, which are below {vocab_size}");
        return Err(ApiError::invalid(Some(format!("tokens[{i}]")), message));
    }
    let prompt = beside(move || {
        let _place = place;
        Ok(local.text.decode(&request.tokens))
    })
    .await?;
    json(&DetokenizeAnswer { prompt })
}

impl Gateway {
    /// The tokenizer of a model, if it is the one that the fleet uses.
    fn text_of(&self, model: &str) -> Result<Arc<LocalText>, ApiError> {
        let name = self.allowed_model(model)?;
        let served = self.model(&name);
        let Some(local) = self.texts.models.get(&name) else {
            if served.is_none() {
                return Err(ApiError::no_model(model));
            }
            let message = format!(
                "the tokenizer of model {name} is in the fleet's coordinators only; name the \
                 folder of its shard set in gateway.shards"
            );
            return Err(ApiError::not_here("tokenizer_unavailable", message));
        };
        if served.is_some_and(|served| served.fingerprint != local.fingerprint) {
            let message = format!(
                "the fleet serves another shard set of model {name} than the one in gateway.shards"
            );
            return Err(ApiError::not_here("shards_differ", message));
        }
        Ok(Arc::clone(local))
    }
}

/// Works beside the tasks that serve others.
async fn beside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_panicked| ApiError::internal("the tokenizer failed"))?
}

fn json(answer: &impl Serialize) -> Result<Response<Body>, ApiError> {
    let body = serde_json::to_string(answer).map_err(|error| {
        ApiError::internal(format!("the answer cannot be represented: {error}"))
    })?;
    let content = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((content, body).into_response())
}
