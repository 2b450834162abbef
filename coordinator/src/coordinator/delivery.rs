//! Events on their way to clients, and clients that do not listen.

use std::time::Instant;

use stagebus_bus::PublishError;
use stagebus_schemas::cloud_events::{EventOrigin, encode_event};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::Event;
use stagebus_schemas::subjects::UnheardEvent;
use tracing::debug;

use super::Coordinator;
use crate::action::Action;
use crate::client::Client;
use crate::outbox::Outgoing;

impl Coordinator {
    /// Sends an event, or keeps it while its client or the broker is away.
    pub(super) async fn send_event(
        &mut self,
        client: &Client,
        event: &Event,
    ) -> Result<(), PublishError> {
        let number = self.outboxes.next_number(&client.reply);
        let origin = EventOrigin {
            subjects: &self.subjects,
            coordinator: self.state.id(),
            request: client.request.as_deref(),
            answer: Some(number.client),
            index: number.event,
        };
        let mut message = encode_event(event, client.content, client.packing, &origin)?;
        let limit = self.bus.max_payload().saturating_sub(HEADER_BYTES + message.attribute_bytes());
        if message.payload.len() > limit {
            let error = Event::Error {
                class: ErrorClass::InvalidRequest,
                message: format!(
                    "answer of {} bytes exceeds the broker's limit of {limit}; ask for a stream",
                    message.payload.len()
                ),
                retry_after_ms: None,
            };
            message = encode_event(&error, client.content, client.packing, &origin)?;
        }
        let message = self.outboxes.push(&client.reply, Some(message), Instant::now());
        match message {
            Some(message) => self.publish_event(message).await,
            None => Ok(()),
        }
    }

    /// Ends a client's events with an empty message.
    pub(super) async fn send_end(&mut self, client: &Client) -> Result<(), PublishError> {
        let message = self.outboxes.push(&client.reply, None, Instant::now());
        match message {
            Some(message) => self.publish_event(message).await,
            None => Ok(()),
        }
    }

    /// Notes that nobody heard an event.
    pub(super) fn on_unheard(&mut self, unheard: UnheardEvent) {
        self.outboxes.unheard(unheard, Instant::now());
    }

    /// Sends again what nobody heard, and ends the requests of clients that are gone.
    pub(super) async fn tend_outboxes(&mut self) {
        let (messages, gone) = self.outboxes.tick(Instant::now());
        for message in messages {
            if let Err(error) = self.publish_event(message).await {
                debug!(%error, "event was not sent again");
            }
        }
        for reply in gone {
            self.handle(Action::ClientGone(reply)).await;
        }
    }

    async fn publish_event(&mut self, message: Outgoing) -> Result<(), PublishError> {
        // What is not sent now is sent when the connection stands again.
        if !self.bus.is_connected() {
            return Ok(());
        }
        let Outgoing { subject, number, event } = message;
        let reply = self.subjects.unheard(self.state.id(), number);
        let sent = match event {
            Some(event) => self.bus.publish_public(&subject, &reply, event).await,
            None => self.bus.publish_with_reply(&subject, &reply, bytes::Bytes::new()).await,
        };
        match sent {
            Err(PublishError::Disconnected { .. }) => Ok(()),
            sent => sent,
        }
    }
}

/// Room that a message's header takes of the broker's limit.
const HEADER_BYTES: usize = 256;
