//! A coordinator that says the same for every request.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use stagebus_bus::{Bus, BusOptions, Subscription};
use stagebus_schemas::cloud_events::{PublicMessage, decode_request};
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::ids::{CoordinatorId, ModelName, RequestId};
use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;
use stagebus_schemas::messages::public::{Event, FinishReason, RequestState, Timings, Usage};
use stagebus_schemas::subjects::{Subjects, UnheardEvent};
use stagebus_schemas::version::MessageVersion;

use super::ways;

/// The model that it serves.
pub(super) const MODEL: &str = "bench";

/// Interval of its announcements: one lasts for the whole run.
const INTERVAL_MS: u32 = 600_000;

/// How long a gateway may take to hear of it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The text of one token.
fn piece(i: u64) -> String {
    format!(" word{i}")
}

/// The text of an answer.
pub(super) fn text(n_tokens: u16) -> String {
    (0..u64::from(n_tokens)).map(piece).collect()
}

/// The coordinator. It encodes events and publishes them as the real one does.
pub(super) struct Scripted {
    bus: Bus,
    subjects: Subjects,
    id: CoordinatorId,
    prompts: Subscription,
    n_answers: u64,
}

/// A request that came.
pub(super) struct Asked {
    reply: String,
    number: UnheardEvent,
}

/// The subjects of the model.
pub(super) fn subjects() -> anyhow::Result<Subjects> {
    Ok(Subjects::new(&ModelName::new(MODEL)?))
}

impl Scripted {
    pub(super) async fn start(broker: &str) -> anyhow::Result<Self> {
        let bus = Bus::connect(BusOptions::new(broker, "stagebus-bench-coordinator")).await?;
        let subjects = subjects()?;
        let prompts = bus.subscribe(&subjects.prompt()).await?;
        Ok(Self { bus, subjects, id: CoordinatorId::random(), prompts, n_answers: 0 })
    }

    #[cfg(test)]
    pub(super) fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Announces itself until the gateway lists the model.
    pub(super) async fn until_listed(&self, gateway: SocketAddr) -> anyhow::Result<()> {
        let announcement = CoordinatorAnnouncement {
            version: MessageVersion::CURRENT,
            coordinator: self.id.clone(),
            model: ModelName::new(MODEL)?,
            fingerprint: "0".repeat(64),
            n_stages: 1,
            host: "bench".to_owned(),
            accepting: true,
            interval_ms: INTERVAL_MS,
            n_sessions: 0,
            requests_done: 0,
            tokens_out: 0,
            tokens_drafted: 0,
            tokens_accepted: 0,
            recoveries: 0,
        };
        let subject = self.subjects.coordinator(&self.id);
        let deadline = Instant::now() + PATIENCE;
        let listed = format!("\"{MODEL}\"");
        while !ways::get(gateway, "/v1/models").await?.contains(&listed) {
            anyhow::ensure!(Instant::now() < deadline, "the gateway does not list the model");
            self.bus.publish(&subject, &announcement).await?;
        }
        Ok(())
    }

    /// Answers the next request with so many tokens, a pause before each but the first; returns
    /// when each of them was handed to the connection.
    pub(super) async fn answer(
        &mut self,
        n_tokens: u16,
        pace: Duration,
    ) -> anyhow::Result<Vec<Instant>> {
        let mut asked = self.accept().await?;
        let mut left = Vec::with_capacity(n_tokens.into());
        for i in 0..u64::from(n_tokens) {
            if i > 0 && !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            left.push(Instant::now());
            self.token(&mut asked, i).await?;
        }
        self.done(&mut asked, n_tokens.into()).await?;
        Ok(left)
    }

    /// Begins to answer the next request: one token.
    pub(super) async fn begin(&mut self) -> anyhow::Result<Asked> {
        let mut asked = self.accept().await?;
        self.token(&mut asked, 0).await?;
        Ok(asked)
    }

    /// Says that a request lives.
    pub(super) async fn live(&self, asked: &mut Asked) -> anyhow::Result<()> {
        let (state, stage, message) = (RequestState::Generating, None, None);
        self.tell(asked, &Event::Status { state, stage, message }).await
    }

    /// Ends an answer that was begun.
    pub(super) async fn finish(&self, asked: &mut Asked) -> anyhow::Result<()> {
        self.done(asked, 1).await
    }

    async fn accept(&mut self) -> anyhow::Result<Asked> {
        let delivery = self.prompts.next().await.context("the connection was closed")?;
        let reply = delivery.reply().context("a request without a reply subject")?.to_owned();
        let request = decode_request(&delivery.public_headers(), &delivery.payload)?.request_id;
        let request = request.unwrap_or_else(RequestId::random);
        let number = UnheardEvent { client: self.n_answers, event: 0 };
        self.n_answers += 1;
        let mut asked = Asked { reply, number };
        let accepted = Event::Accepted { request_id: request, prompt_tokens: 3, seed: None };
        self.tell(&mut asked, &accepted).await?;
        Ok(asked)
    }

    async fn token(&self, asked: &mut Asked, i: u64) -> anyhow::Result<()> {
        let (text, tokens, logprobs) = (piece(i), vec![1], Vec::new());
        self.tell(asked, &Event::Token { i, text, tokens, logprobs, steps: Vec::new() }).await
    }

    async fn done(&self, asked: &mut Asked, completion_tokens: u32) -> anyhow::Result<()> {
        let usage = Usage { prompt_tokens: 3, completion_tokens, ..Usage::default() };
        let (finish_reason, timings) = (FinishReason::Length, Timings::default());
        let (text, tokens, logprobs) = (None, None, Vec::new());
        let done = Event::Done { finish_reason, usage, timings, text, tokens, logprobs };
        self.tell(asked, &done).await?;
        let reply = self.subjects.unheard(&self.id, asked.number);
        Ok(self.bus.publish_with_reply(&asked.reply, &reply, Bytes::new()).await?)
    }

    async fn tell(&self, asked: &mut Asked, event: &Event) -> anyhow::Result<()> {
        let payload = codec::encode_public(ContentType::Json, event)?.into();
        let message = PublicMessage::plain(ContentType::Json, payload);
        let reply = self.subjects.unheard(&self.id, asked.number);
        asked.number.event += 1;
        Ok(self.bus.publish_public(&asked.reply, &reply, message).await?)
    }
}
