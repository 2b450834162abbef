//! Reading the events of a job: those that are stored, and those that still come.

use std::time::Duration;

use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::pull::{Ordered, OrderedConfig};
use async_nats::jetstream::consumer::{
    Consumer, DeliverPolicy, Info as ConsumerInfo, IntoConsumerConfig as _, ReplayPolicy,
};
use futures::StreamExt as _;
use serde_json::json;
use stagebus_schemas::cloud_events;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::Event;
use stagebus_schemas::subjects::Subjects;

use super::DELIVERY;
use super::error::JobError;
use crate::connection::Bus;
use crate::events::{BusEvent, BusEvents};
use crate::jetstream::Api;
use crate::subscription::read_headers;

/// How long one question for more events stands. A broker that comes back without our consumer is
/// noticed within two of them.
const QUESTION: Duration = Duration::from_secs(5);

/// Pause before a broker that does not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// Longest wait for an event that is stored.
const STORED_TIMEOUT: Duration = Duration::from_secs(30);

/// One event of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredEvent {
    /// The event.
    pub event: Event,
    /// Its sequence in the stream.
    pub sequence: u64,
    /// Delivery of the job that it came from; 0 if that is not known.
    pub delivery: u64,
}

/// The events of one job, in order. A broker that was away is asked for the rest.
pub struct Results {
    api: Api,
    stream: String,
    subject: String,
    events: BusEvents,
    /// Absent while the broker has to be asked anew.
    messages: Option<Ordered>,
    /// Events that are stored and not read.
    pending: u64,
    /// Sequence of the last event read.
    last: u64,
}

impl std::fmt::Debug for Results {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Results");
        shown.field("subject", &self.subject).field("pending", &self.pending);
        shown.finish_non_exhaustive()
    }
}

impl Bus {
    /// Reads the events of a job from the first one on.
    ///
    /// # Errors
    /// [`JobError::NoJetStream`], [`JobError::NoStream`], [`JobError::NoAnswer`],
    /// [`JobError::Refused`].
    pub async fn results(
        &self,
        subjects: &Subjects,
        request: &RequestId,
    ) -> Result<Results, JobError> {
        Results::open(self, &Api::new(self), subjects, request).await
    }
}

impl Results {
    pub(super) async fn open(
        bus: &Bus,
        api: &Api,
        subjects: &Subjects,
        request: &RequestId,
    ) -> Result<Self, JobError> {
        let mut results = Self {
            api: api.clone(),
            stream: subjects.results_stream(),
            subject: subjects.result(request),
            events: bus.events(),
            messages: None,
            pending: 0,
            last: 0,
        };
        results.ask().await?;
        Ok(results)
    }

    /// Asks the broker for the events after the last one read.
    async fn ask(&mut self) -> Result<(), JobError> {
        // The name is ours so that the subject of this request tells the filter: a broker's
        // permissions can hold a client to the events that it may read.
        let name = RequestId::random().to_string();
        let (stream, filter) = (&self.stream, &self.subject);
        let config = OrderedConfig {
            name: Some(name.clone()),
            filter_subject: filter.clone(),
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: self.last + 1 },
            replay_policy: ReplayPolicy::Instant,
            max_expires: QUESTION,
            ..OrderedConfig::default()
        };
        let body =
            json!({ "stream_name": stream, "config": config.clone().into_consumer_config() });
        let subject = format!("CONSUMER.CREATE.{stream}.{name}.{filter}");
        let info: ConsumerInfo = self.api.request(&subject, &body).await?;
        self.pending = info.num_pending;
        let messages = Consumer::new(config, info, self.api.context.clone()).messages().await;
        self.messages = Some(messages.map_err(|error| JobError::Read { source: Box::new(error) })?);
        Ok(())
    }

    /// The next message, over breaks of the connection and ends of the broker.
    async fn message(&mut self) -> Result<Message, JobError> {
        loop {
            match &mut self.messages {
                Some(messages) => tokio::select! {
                    message = messages.next() => match message {
                        Some(Ok(message)) => return Ok(message),
                        Some(Err(_)) | None => self.messages = None,
                    },
                    // The broker forgets who asked when the connection breaks.
                    Some(event) = self.events.next() => if event == BusEvent::Connected {
                        self.messages = None;
                    },
                },
                None => match self.ask().await {
                    Ok(()) => {}
                    Err(JobError::NoAnswer { .. } | JobError::Request { .. }) => {
                        tokio::time::sleep(ASK_AGAIN).await;
                    }
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// Returns the next event that is stored; `None` when all are read.
    ///
    /// # Errors
    /// [`JobError::Idle`], [`JobError::Codec`]; as [`Bus::results`] if the broker came back
    /// without the events.
    ///
    /// # Cancel safety
    /// No event is lost when the future is dropped.
    pub async fn next_stored(&mut self) -> Result<Option<StoredEvent>, JobError> {
        if self.pending == 0 {
            return Ok(None);
        }
        self.next(STORED_TIMEOUT).await.map(Some)
    }

    /// Waits up to `idle` for the next event, stored or new.
    ///
    /// # Errors
    /// As [`Results::next_stored`].
    ///
    /// # Cancel safety
    /// No event is lost when the future is dropped.
    pub async fn next(&mut self, idle: Duration) -> Result<StoredEvent, JobError> {
        let message = match tokio::time::timeout(idle, self.message()).await {
            Ok(message) => message?,
            Err(_) => return Err(JobError::Idle { timeout: idle }),
        };
        let info = message.info().map_err(|source| JobError::Form { source })?;
        self.pending = info.pending;
        self.last = info.stream_sequence;
        let header =
            |name: &str| message.headers.as_ref()?.get(name).map(async_nats::HeaderValue::as_str);
        let headers = read_headers(message.headers.as_ref());
        Ok(StoredEvent {
            event: cloud_events::decode_event(&headers, &message.payload)?,
            sequence: info.stream_sequence,
            delivery: header(DELIVERY).and_then(|text| text.parse().ok()).unwrap_or(0),
        })
    }
}
