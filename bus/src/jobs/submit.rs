//! Putting a request into the queue.

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::message::PublishMessage;
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_schemas::subjects::Subjects;

use super::error::JobError;
use crate::connection::Bus;
use crate::error::PublishError;
use crate::jetstream::{Api, ApiError};
use crate::publish::CONTENT_TYPE;

/// A request that the broker has stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submitted {
    /// Name under which its events are stored.
    pub request: RequestId,
    /// Its number in the queue.
    pub sequence: u64,
    /// True: a job of this name was there already, and this one is the same.
    pub duplicate: bool,
}

impl Bus {
    /// Puts a request into the queue and waits for the word that it is stored. A request of the
    /// same name is stored once.
    ///
    /// # Errors
    /// [`JobError::NoStream`] without a coordinator that takes jobs or without JetStream,
    /// [`JobError::QueueFull`], [`JobError::NoAnswer`] (it may be stored: submit it again under
    /// the same name), [`JobError::Publish`], [`JobError::Refused`].
    pub async fn submit(
        &self,
        subjects: &Subjects,
        request: PromptRequest,
    ) -> Result<Submitted, JobError> {
        let name = request.request_id.clone().unwrap_or_else(RequestId::random);
        let request = PromptRequest { request_id: Some(name.clone()), ..request };
        let content = ContentType::Json;
        let payload = codec::encode_public(content, &request)?;
        let (bytes, limit) = (payload.len(), self.max_payload());
        if bytes > limit {
            return Err(PublishError::PayloadTooLarge { bytes, limit }.into());
        }
        let subject = subjects.job();
        let message = PublishMessage::build()
            .payload(payload.into())
            .header(CONTENT_TYPE, content.header())
            .message_id(name.as_str());
        match Api::new(self).publish(&subject, message).await {
            Ok(ack) => {
                Ok(Submitted { request: name, sequence: ack.sequence, duplicate: ack.duplicate })
            }
            Err(ApiError::Refused { code, .. }) if code == ErrorCode::STREAM_STORE_FAILED.0 => {
                Err(JobError::QueueFull { subject })
            }
            Err(error) => Err(error.into()),
        }
    }
}
