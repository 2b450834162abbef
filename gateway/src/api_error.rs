//! Errors as HTTP clients see them: a status, and a body in the form of OpenAI's.
//!
//! Their messages may repeat what a client sent, so they go to that client and into no log.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use serde::Serialize;
use stagebus_bus::{PublishError, StreamError, SubscribeError};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::public::RequestError;

/// When to come back where nothing better is known.
const SOON: Duration = Duration::from_secs(1);

/// Why a request has no answer, or a broken one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
}

/// The body.
#[derive(Serialize)]
struct Envelope<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Self { status, kind, code, param: None, message: message.into(), retry_after: None }
    }

    /// The request cannot be answered as it stands.
    pub(crate) fn invalid(param: Option<String>, message: impl Into<String>) -> Self {
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_value", message) }
    }

    /// A field asks for something that is not done here.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        let param = Some(param.to_owned());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message) }
    }

    /// No key was shown, or none of ours.
    pub(crate) fn unauthorized() -> Self {
        let message = "a valid API key is needed: send the header `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// A name that is not this machine's, where only this machine may ask.
    pub(crate) fn misdirected() -> Self {
        let message = "without API keys only requests to localhost are answered; the header Host \
                       names another machine";
        Self::new(StatusCode::FORBIDDEN, "wrong_host", message)
    }

    /// There is nothing at this path.
    pub(crate) fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "unknown_url", "there is nothing at this path")
    }

    /// There is something at this path, for another method.
    pub(crate) fn wrong_method() -> Self {
        let message = "this path takes another method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// Nobody serves the model.
    pub(crate) fn no_model(model: &str) -> Self {
        let shown: String = model.chars().take(64).collect();
        let message =
            format!("model {shown:?} is not served here; GET /v1/models lists those that are");
        let param = Some("model".to_owned());
        Self { param, ..Self::new(StatusCode::NOT_FOUND, "model_not_found", message) }
    }

    /// The body did not come in time.
    pub(crate) fn slow_body(limit: Duration) -> Self {
        let message = format!("the body did not arrive within {limit:?}");
        Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    }

    /// The body is too large.
    pub(crate) fn large_body(limit: usize) -> Self {
        let message = format!("the request is too large, at most {limit} bytes are taken");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// The body is not JSON by its header.
    pub(crate) fn wrong_content(message: &str) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    /// Too many answers are under way.
    pub(crate) fn busy(limit: usize) -> Self {
        let message = format!("{limit} answers are under way here, no more are begun");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", message);
        Self { retry_after: Some(SOON), ..error }
    }

    /// Something is not done here at all.
    pub(crate) fn not_here(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, code, message)
    }

    /// Something is not to be had at the moment.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
        Self { retry_after: Some(SOON), ..error }
    }

    /// The answer took too long.
    pub(crate) fn deadline(limit: Duration) -> Self {
        let message = format!("the answer was not complete within {limit:?}");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
    }

    /// A fault of this software or of the fleet.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// A failure that the fleet reports.
    pub(crate) fn of_class(
        class: ErrorClass,
        message: String,
        retry_after_ms: Option<u64>,
    ) -> Self {
        match class {
            ErrorClass::InvalidRequest => Self::invalid(None, message),
            ErrorClass::Overloaded => Self {
                retry_after: Some(retry_after_ms.map_or(SOON, Duration::from_millis)),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", message)
            },
            ErrorClass::StageUnavailable => Self::unavailable("stage_unavailable", message),
            ErrorClass::UnknownSession
            | ErrorClass::StaleEpoch
            | ErrorClass::StepGap
            | ErrorClass::Preempted => Self::unavailable("session_lost", message),
            ErrorClass::Cancelled => Self::unavailable("cancelled", message),
            ErrorClass::VersionMismatch => {
                Self { code: "version_mismatch", ..Self::internal(message) }
            }
            ErrorClass::Internal => Self::internal(message),
        }
    }

    /// An answer of the fleet that did not come, or broke off.
    pub(crate) fn of_stream(error: &StreamError, model: &ModelName) -> Self {
        match error {
            // Whoever may not ask a model has no such model.
            StreamError::NoResponders { .. } | StreamError::Forbidden { .. } => {
                Self::no_model(model.as_str())
            }
            // The deadline of an answer ends no later, but both may have passed by now.
            StreamError::Idle { timeout, .. } => Self::deadline(*timeout),
            StreamError::CoordinatorGone { .. }
            | StreamError::Gap { .. }
            | StreamError::Unfinished { .. } => {
                let message = "the answer broke off: its coordinator is gone, or the way to it";
                Self::unavailable("answer_lost", message)
            }
            StreamError::Publish(PublishError::PayloadTooLarge { limit, .. }) => {
                Self::large_body(*limit)
            }
            StreamError::Closed
            | StreamError::Subscribe(
                SubscribeError::Disconnected { .. } | SubscribeError::Closed,
            )
            | StreamError::Publish(PublishError::Disconnected { .. } | PublishError::Closed) => {
                Self::unavailable("broker_unavailable", "the broker cannot be reached")
            }
            StreamError::Decode(_)
            | StreamError::Subscribe(SubscribeError::Subject { .. })
            | StreamError::Publish(
                PublishError::BulkFull { .. }
                | PublishError::Subject { .. }
                | PublishError::NoReply { .. }
                | PublishError::Encode(_),
            ) => Self::internal("the fleet and the gateway do not understand each other"),
        }
    }

    /// The status.
    #[cfg(test)]
    pub(crate) const fn status(&self) -> StatusCode {
        self.status
    }

    /// The machine-readable reason.
    pub(crate) const fn code(&self) -> &'static str {
        self.code
    }

    /// The body.
    pub(crate) fn to_json(&self) -> String {
        let Self { kind, code, param, message, .. } = self;
        let error = Inner { message, kind, param: param.as_deref(), code };
        // Texts and nothing else: they can always be represented.
        serde_json::to_string(&Envelope { error }).unwrap_or_default()
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let param = match &error {
            RequestError::Empty { field }
            | RequestError::TooLong { field, .. }
            | RequestError::Range { field, .. }
            | RequestError::Needs { field, .. } => Some(param_of(field)),
            RequestError::BiasToken { .. } | RequestError::AllForbidden { .. } => {
                Some("logit_bias")
            }
            RequestError::Input { .. }
            | RequestError::TokenId { .. }
            | RequestError::Context { .. } => None,
        };
        Self::invalid(param.map(str::to_owned), error.to_string())
    }
}

/// The parameter in the name of a part of it, such as "a text of stop".
fn param_of(field: &str) -> &str {
    field.rsplit(' ').next().unwrap_or(field)
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.to_json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            let value = u64::try_from(seconds).unwrap_or(u64::MAX);
            headers.insert(RETRY_AFTER, HeaderValue::from(value));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::REQUEST_TIMEOUT {
            // What is still to come of the body is no request.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_its_status() {
        let status = |class| ApiError::of_class(class, String::new(), None).status().as_u16();
        assert_eq!(status(ErrorClass::InvalidRequest), 400);
        assert_eq!(status(ErrorClass::Overloaded), 429);
        assert_eq!(status(ErrorClass::StageUnavailable), 503);
        assert_eq!(status(ErrorClass::StepGap), 503);
        assert_eq!(status(ErrorClass::Cancelled), 503);
        assert_eq!(status(ErrorClass::VersionMismatch), 500);
        assert_eq!(status(ErrorClass::Internal), 500);
    }

    #[test]
    fn a_refusal_says_when_to_come_back_in_whole_seconds() {
        for (hint, seconds) in
            [(None, "1"), (Some(1), "1"), (Some(1001), "2"), (Some(60_000), "60")]
        {
            let error = ApiError::of_class(ErrorClass::Overloaded, "full".to_owned(), hint);
            let response = error.into_response();
            assert_eq!(response.headers()[RETRY_AFTER], seconds, "{hint:?}");
        }
    }

    #[test]
    fn the_body_has_the_form_of_openai() {
        let error = ApiError::invalid(Some("stop".to_owned()), "stop has \"two\" faults");
        let body: serde_json::Value = serde_json::from_str(&error.to_json()).expect("JSON");
        assert_eq!(
            body,
            serde_json::json!({"error": {"message": "stop has \"two\" faults",
                "type": "invalid_request_error", "param": "stop", "code": "invalid_value"}})
        );
    }

    #[test]
    fn the_parameter_of_a_refused_value_is_named() {
        let error = ApiError::from(RequestError::Empty { field: "a text of stop" });
        assert_eq!(error.param.as_deref(), Some("stop"));
        let error = ApiError::from(RequestError::BiasToken { found: 9, vocab_size: 3 });
        assert_eq!(error.param.as_deref(), Some("logit_bias"));
    }
}
