//! One request on the public subjects: sent, read, and cancelled when nobody waits for it.

use std::sync::Arc;
use std::time::Duration;

use stagebus_bus::{EventStream, StreamError};
use stagebus_schemas::ids::{ModelName, RequestId};
use stagebus_schemas::messages::public::{
    Event, FinishReason, PromptRequest, StepTimes, Timings, TokenLogprobs, Usage,
};
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::trace::TraceContext;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};

use crate::api_error::ApiError;
use crate::gateway::Shared;

/// How long the message that ends a stream may take after the last event: it follows at once, and
/// nothing is lost without it.
const END_OF_STREAM: Duration = Duration::from_secs(1);

/// A request that the fleet has accepted. Dropped before its end, it is cancelled.
#[derive(Debug)]
pub(crate) struct Generation {
    events: EventStream,
    cancel: CancelGuard,
    deadline: Instant,
}

/// A part of an answer.
#[derive(Debug)]
pub(crate) enum Piece {
    /// New text, with the log-probabilities of its tokens if asked for.
    Delta {
        /// The text; empty while the tokens are ahead of it.
        text: String,
        /// One entry per token.
        logprobs: Vec<TokenLogprobs>,
        /// One entry per step whose tokens came, if asked for.
        steps: Vec<StepTimes>,
    },
    /// The request lives and has nothing new.
    Waiting,
    /// The end.
    End(Box<End>),
}

/// The end of an answer; the whole of it, if the request did not stream.
#[derive(Debug)]
pub(crate) struct End {
    /// Why.
    pub(crate) reason: FinishReason,
    /// What it used.
    pub(crate) usage: Usage,
    /// How long it took.
    pub(crate) timings: Timings,
    /// The whole text, if the request did not stream.
    pub(crate) text: String,
    /// One entry per token, if the request did not stream and asked for it.
    pub(crate) logprobs: Vec<TokenLogprobs>,
}

/// Cancels a request when it is dropped, unless the request has ended.
#[derive(Debug)]
struct CancelGuard {
    gateway: Shared,
    model: ModelName,
    request: Option<RequestId>,
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.gateway.cancel(self.model.clone(), request);
        }
    }
}

impl Generation {
    /// Sends a request, as a part of the client's trace if that has one, and waits until a
    /// coordinator has accepted it.
    ///
    /// # Errors
    /// Nobody serves the model, the request is refused, or the deadline has passed.
    pub(crate) async fn begin(
        gateway: &Shared,
        model: &ModelName,
        request: PromptRequest,
        trace: Option<TraceContext>,
        deadline: Instant,
    ) -> Result<Self, ApiError> {
        let id = request.request_id.clone().unwrap_or_else(RequestId::random);
        let request = PromptRequest { request_id: Some(id.clone()), ..request };
        let subject = Subjects::new(model).prompt();
        let idle = gateway.settings.request_timeout();
        let mut cancel =
            CancelGuard { gateway: Arc::clone(gateway), model: model.clone(), request: Some(id) };
        let events = match gateway.bus.prompt_in_trace(&subject, &request, idle, trace).await {
            Ok(events) => events,
            Err(error) => {
                cancel.request = None;
                return Err(cancel.broken(&error));
            }
        };
        let mut generation = Self { events, cancel, deadline };
        loop {
            match generation.event().await? {
                Some(Event::Accepted { .. }) => return Ok(generation),
                Some(Event::Status { .. }) => {}
                Some(Event::Token { .. } | Event::Done { .. } | Event::Error { .. }) | None => {
                    return Err(ApiError::internal("the answer began before it was accepted"));
                }
            }
        }
    }

    /// Waits for the next part; nothing after the end.
    ///
    /// # Errors
    /// The fleet failed, the way to it is gone, or the deadline has passed.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        if self.cancel.request.is_none() {
            // Whoever publishes the end of the stream should find somebody who listens.
            drop(timeout(END_OF_STREAM, self.events.next_raw()).await);
            return Ok(None);
        }
        let piece = match self.event().await? {
            Some(Event::Token { text, logprobs, steps, .. }) => {
                self.cancel.gateway.token_came();
                Piece::Delta { text, logprobs, steps }
            }
            Some(Event::Accepted { .. } | Event::Status { .. }) => Piece::Waiting,
            Some(Event::Done { finish_reason, usage, timings, text, logprobs, .. }) => {
                self.cancel.request = None;
                let metrics = &self.cancel.gateway.metrics;
                metrics.prompt_tokens.inc_by(usage.prompt_tokens.into());
                metrics.completion_tokens.inc_by(usage.completion_tokens.into());
                if usage.completion_tokens > 0 {
                    self.cancel.gateway.token_came();
                }
                if finish_reason == FinishReason::Cancelled {
                    let message = "the request was cancelled on the broker".to_owned();
                    let class = stagebus_schemas::error::ErrorClass::Cancelled;
                    return Err(ApiError::of_class(class, message, None));
                }
                let text = text.unwrap_or_default();
                let reason = finish_reason;
                Piece::End(Box::new(End { reason, usage, timings, text, logprobs }))
            }
            Some(Event::Error { .. }) | None => {
                return Err(ApiError::internal("the answer ended without a last event"));
            }
        };
        Ok(Some(piece))
    }

    /// Waits for the end of a request that does not stream.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub(crate) async fn finish(mut self) -> Result<End, ApiError> {
        let mut end = None;
        while let Some(piece) = self.next().await? {
            if let Piece::End(found) = piece {
                end = Some(*found);
            }
        }
        end.ok_or_else(|| ApiError::internal("the answer has no end"))
    }

    /// Waits for the next event; failures that are told by an event are errors.
    async fn event(&mut self) -> Result<Option<Event>, ApiError> {
        let Ok(event) = timeout_at(self.deadline, self.events.next()).await else {
            return Err(ApiError::deadline(self.cancel.gateway.settings.request_timeout()));
        };
        match event {
            Ok(Some(Event::Error { class, message, retry_after_ms })) => {
                self.cancel.request = None;
                debug!(?class, "the fleet refuses or fails");
                Err(ApiError::of_class(class, message, retry_after_ms))
            }
            Ok(event) => Ok(event),
            Err(error) => Err(self.cancel.broken(&error)),
        }
    }
}

impl CancelGuard {
    /// Tells of a stream that broke. Where nobody took the request there is nothing to cancel.
    fn broken(&mut self, error: &StreamError) -> ApiError {
        let model = &self.model;
        match error {
            StreamError::NoResponders { .. } => {
                self.request = None;
                if self.gateway.is_expected(model) {
                    let message = format!("no coordinator of model {model} is there at the moment");
                    return ApiError::unavailable("model_unavailable", message);
                }
                return ApiError::of_stream(error, model);
            }
            StreamError::Forbidden { .. } => self.request = None,
            _ => {}
        }
        warn!(%model, error = error as &dyn std::error::Error, "no answer, or a broken one");
        ApiError::of_stream(error, model)
    }
}
