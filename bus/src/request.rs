//! One question, one answer.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::client::RequestErrorKind;
use bytes::Bytes;
use stagebus_schemas::codec::{self, ContentType, Message};
use stagebus_schemas::trace::TraceContext;
use tokio::time::Instant;

use crate::connection::Bus;
use crate::error::{PublishError, RequestError};
use crate::events::is_answer_inbox;
use crate::publish::{headers, trace_headers};
use crate::subscription::Delivery;
use crate::switch::{AtEnd, Switch};
use crate::violation::{Operation, Violation};

impl Bus {
    /// Sends an internal message and decodes the answer.
    ///
    /// # Errors
    /// [`RequestError`]: nobody listens, nobody answered in time, and a bad answer differ.
    pub async fn request<M: Message, R: Message>(
        &self,
        subject: &str,
        message: &M,
        timeout: Duration,
    ) -> Result<R, RequestError> {
        self.request_in_trace(subject, message, timeout, None).await
    }

    /// The same as a part of a trace, which whoever answers learns.
    ///
    /// # Errors
    /// As [`Bus::request`].
    pub async fn request_in_trace<M: Message, R: Message>(
        &self,
        subject: &str,
        message: &M,
        timeout: Duration,
        trace: Option<TraceContext>,
    ) -> Result<R, RequestError> {
        let payload = codec::encode(message).map_err(PublishError::from)?;
        let headers = self.traced(trace, payload.len()).map(trace_headers);
        let answer = self.ask(subject, headers, payload.into(), timeout).await?;
        answer
            .decode()
            .map_err(|source| RequestError::Decode { subject: subject.to_owned(), source })
    }

    /// Sends bytes and returns the answer. `timeout` spans the whole call, a wait for the
    /// connection included.
    ///
    /// # Errors
    /// [`RequestError`], without [`RequestError::Decode`].
    pub async fn request_bytes(
        &self,
        subject: &str,
        content_type: Option<ContentType>,
        payload: Bytes,
        timeout: Duration,
    ) -> Result<Delivery, RequestError> {
        let headers = content_type.map(headers);
        self.ask(subject, headers, payload, timeout).await
    }

    async fn ask(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        payload: Bytes,
        timeout: Duration,
    ) -> Result<Delivery, RequestError> {
        let (bytes, limit) = (payload.len(), self.max_payload());
        if bytes > limit {
            return Err(PublishError::PayloadTooLarge { bytes, limit }.into());
        }
        let deadline = Instant::now() + timeout;
        if let Some(switch) = self.switch.as_ref().filter(|switch| switch.has(subject)) {
            let question = Delivery::direct(subject, None, payload).with_headers(headers);
            return self.request_directly(switch, question, (deadline, timeout)).await;
        }
        self.connected(deadline.min(Instant::now() + self.publish_timeout))
            .await
            .map_err(|_passed| PublishError::Disconnected { waited: self.publish_timeout })?;
        let mut request = async_nats::Request::new().payload(payload).timeout(None);
        if let Some(headers) = headers {
            request = request.headers(headers);
        }
        let forbidden =
            |violation| RequestError::Forbidden { subject: subject.to_owned(), violation };
        let mut refusals = self.refusals();
        if let Some(violation) = self.signals.answers_refused() {
            return Err(forbidden(violation));
        }
        let answer = self.client.send_request(subject.to_owned(), request);
        let concerns = |violation: &Violation| {
            violation.subject == subject && violation.operation == Operation::Publish
                || is_answer_inbox(violation)
        };
        let answer = tokio::select! {
            answer = tokio::time::timeout_at(deadline, answer) => answer,
            violation = refusals.of(concerns) => return Err(forbidden(violation)),
        };
        match answer {
            Ok(Ok(message)) => Ok(message.into()),
            Ok(Err(error)) => Err(match error.kind() {
                RequestErrorKind::NoResponders => {
                    RequestError::NoResponders { subject: subject.to_owned() }
                }
                RequestErrorKind::TimedOut => {
                    RequestError::Timeout { subject: subject.to_owned(), timeout }
                }
                RequestErrorKind::InvalidSubject => {
                    PublishError::Subject { subject: subject.to_owned() }.into()
                }
                RequestErrorKind::MaxPayloadExceeded => {
                    PublishError::PayloadTooLarge { bytes, limit }.into()
                }
                RequestErrorKind::Other => PublishError::Closed.into(),
            }),
            Err(_) => Err(RequestError::Timeout { subject: subject.to_owned(), timeout }),
        }
    }

    /// Asks at an address of this process.
    async fn request_directly(
        &self,
        switch: &Switch,
        question: Delivery,
        (deadline, timeout): (Instant, Duration),
    ) -> Result<Delivery, RequestError> {
        let asked = question.subject().to_owned();
        let subject = || asked.clone();
        let inbox = self.new_inbox();
        let mut answers = switch.listen(&inbox, 1, &self.signals, AtEnd::Forget);
        if switch.pass(question.with_reply(&inbox)).is_err() {
            return Err(RequestError::NoResponders { subject: subject() });
        }
        match tokio::time::timeout_at(deadline, answers.next()).await {
            Ok(Some(answer)) if !answer.no_responders => Ok(answer),
            Ok(_) => Err(RequestError::NoResponders { subject: subject() }),
            Err(_) => Err(RequestError::Timeout { subject: subject(), timeout }),
        }
    }
}
