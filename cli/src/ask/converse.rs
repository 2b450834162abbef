//! One request over the public subject: sends it, reads its events, cancels it when asked to.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::{Bus, EventStream, PublishError, StreamError};
use stagebus_schemas::ids::{ModelName, RequestId};
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_schemas::subjects::Subjects;
use tokio_util::sync::CancellationToken;

use super::answer::{Answer, AnswerError};

/// How long to wait for the last events after a cancellation.
const CANCEL_WAIT: Duration = Duration::from_secs(5);

/// Where a request goes.
#[derive(Debug, Clone)]
pub struct Target {
    /// The connection.
    pub bus: Bus,
    /// The model.
    pub model: ModelName,
    /// Longest wait for each event.
    pub idle_timeout: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The request was not sent or its stream broke.
    #[error("no answer from model {model}")]
    Stream {
        /// The model.
        model: ModelName,
        /// Why.
        #[source]
        source: StreamError,
    },
    /// The fleet refused, failed, or broke the contract.
    #[error(transparent)]
    Answer(#[from] AnswerError),
    /// The cancellation was not sent.
    #[error("the request could not be cancelled")]
    Cancel(#[source] PublishError),
    /// No end came after a cancellation.
    #[error("the request did not end within {CANCEL_WAIT:?} of its cancellation")]
    NotCancelled,
    /// The text could not be shown.
    #[error("the answer could not be written")]
    Write(#[from] io::Error),
}

/// Sends a request and reads its answer to the end; new text goes to `show` at once.
///
/// When `stop` is cancelled, the request is cancelled and the rest of its stream is read.
///
/// # Errors
/// [`AskError`].
pub async fn converse(
    target: &Target,
    request: PromptRequest,
    stop: &CancellationToken,
    show: &mut dyn FnMut(&str) -> io::Result<()>,
) -> Result<Answer, AskError> {
    let subjects = Subjects::new(&target.model);
    let request_id = request.request_id.clone().unwrap_or_else(RequestId::random);
    let request = PromptRequest { request_id: Some(request_id.clone()), ..request };
    let mut answer = Answer::asked_now();
    let mut events = target
        .bus
        .prompt(&subjects.prompt(), &request, target.idle_timeout)
        .await
        .map_err(|source| AskError::Stream { model: target.model.clone(), source })?;
    let stopped = tokio::select! {
        ended = read(target, &mut events, &mut answer, show) => {
            ended?;
            false
        }
        () = stop.cancelled() => true,
    };
    if stopped {
        target
            .bus
            .publish_bytes(&subjects.cancel(&request_id), None, Bytes::new())
            .await
            .map_err(AskError::Cancel)?;
        let rest = read(target, &mut events, &mut answer, show);
        match tokio::time::timeout(CANCEL_WAIT, rest).await {
            Ok(ended) => ended?,
            Err(_) => return Err(AskError::NotCancelled),
        }
    }
    if !answer.is_complete() {
        return Err(AnswerError::Incomplete.into());
    }
    Ok(answer)
}

/// Reads events until the end of the stream.
///
/// # Cancel safety
/// Every event that was received is in `answer`; reading goes on with another call.
async fn read(
    target: &Target,
    events: &mut EventStream,
    answer: &mut Answer,
    show: &mut dyn FnMut(&str) -> io::Result<()>,
) -> Result<(), AskError> {
    loop {
        let event = match events.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(()),
            Err(source) => return Err(AskError::Stream { model: target.model.clone(), source }),
        };
        let text = answer.take(event)?;
        if !text.is_empty() {
            show(&text)?;
        }
    }
}
