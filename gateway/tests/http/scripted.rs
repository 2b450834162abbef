//! A coordinator that says what a test wants, message by message.

use stagebus_bus::Subscription;
use stagebus_schemas::codec::{ContentType, decode_public, encode_public};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::{CoordinatorId, RequestId};
use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;
use stagebus_schemas::messages::public::{
    Event, FinishReason, PromptRequest, RequestState, Timings, Usage,
};
use stagebus_schemas::subjects::Subject;
use stagebus_schemas::version::MessageVersion;

use crate::bed::{Bed, Gateway, MODEL, soon};

/// The listener on the public subjects.
pub(crate) struct Scripted<'a> {
    bed: &'a Bed,
    prompts: Subscription,
    cancels: Subscription,
    id: CoordinatorId,
}

/// A request that came.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) request: PromptRequest,
    reply: String,
}

impl Asked {
    pub(crate) fn id(&self) -> RequestId {
        self.request.request_id.clone().unwrap()
    }
}

impl<'a> Scripted<'a> {
    pub(crate) async fn start(bed: &'a Bed) -> Self {
        let scripted = Self {
            prompts: bed.bus.subscribe(&bed.subjects.prompt()).await.unwrap(),
            cancels: bed.bus.subscribe(&bed.subjects.cancel_all()).await.unwrap(),
            id: CoordinatorId::random(),
            bed,
        };
        bed.settle().await;
        scripted
    }

    /// Announces itself; after `interval_ms` four times over it counts as gone.
    pub(crate) async fn announce(&self, accepting: bool, interval_ms: u32) {
        let announcement = CoordinatorAnnouncement {
            version: MessageVersion::CURRENT,
            coordinator: self.id.clone(),
            model: MODEL.parse().unwrap(),
            fingerprint: self.bed.manifest.fingerprint.clone(),
            n_stages: 1,
            host: "test".to_owned(),
            accepting,
            interval_ms,
            n_sessions: 0,
            requests_done: 0,
            tokens_out: 0,
            tokens_drafted: 0,
            tokens_accepted: 0,
            recoveries: 0,
        };
        let subject = self.bed.subjects.coordinator(&self.id);
        self.bed.bus.publish(&subject, &announcement).await.unwrap();
    }

    /// Announces itself until a gateway lists the model: the broker may not have seen the
    /// gateway's subscription before.
    pub(crate) async fn until_listed(&self, gateway: &Gateway) {
        soon(async {
            while gateway.models().await != [MODEL] {
                self.announce(true, 60_000).await;
            }
        })
        .await;
    }

    /// Waits for the next request.
    pub(crate) async fn asked(&mut self) -> Asked {
        let delivery = soon(self.prompts.next()).await.unwrap();
        let request = decode_public(delivery.content(), &delivery.payload).unwrap();
        Asked { request, reply: delivery.reply().unwrap().to_owned() }
    }

    /// Waits for the next request and accepts it.
    pub(crate) async fn accepted(&mut self) -> Asked {
        let asked = self.asked().await;
        self.accept(&asked).await;
        asked
    }

    pub(crate) async fn accept(&self, asked: &Asked) {
        let event = Event::Accepted { request_id: asked.id(), prompt_tokens: 3, seed: None };
        self.tell(asked, &event).await;
    }

    pub(crate) async fn tell(&self, asked: &Asked, event: &Event) {
        let payload = encode_public(ContentType::Json, event).unwrap().into();
        let content = Some(ContentType::Json);
        self.bed.bus.publish_bytes(&asked.reply, content, payload).await.unwrap();
    }

    /// Tells a token event.
    pub(crate) async fn token(&self, asked: &Asked, i: u64, text: &str) {
        let (text, tokens, logprobs) = (text.to_owned(), vec![1], Vec::new());
        let steps = Vec::new();
        self.tell(asked, &Event::Token { i, text, tokens, logprobs, steps }).await;
    }

    pub(crate) async fn status(&self, asked: &Asked) {
        let (state, stage, message) = (RequestState::Generating, None, None);
        self.tell(asked, &Event::Status { state, stage, message }).await;
    }

    /// Ends the answer in order.
    pub(crate) async fn done(&self, asked: &Asked, finish_reason: FinishReason) {
        let text = (asked.request.stream == Some(false)).then(|| "whole".to_owned());
        let usage = Usage { prompt_tokens: 3, completion_tokens: 1, ..Usage::default() };
        let (timings, tokens, logprobs) = (Timings::default(), None, Vec::new());
        let done = Event::Done { finish_reason, usage, timings, text, tokens, logprobs };
        self.tell(asked, &done).await;
        self.end(asked).await;
    }

    /// Ends the answer with a failure.
    pub(crate) async fn fail(&self, asked: &Asked, class: ErrorClass, retry_after_ms: Option<u64>) {
        let message = "as the test wants it".to_owned();
        self.tell(asked, &Event::Error { class, message, retry_after_ms }).await;
        self.end(asked).await;
    }

    async fn end(&self, asked: &Asked) {
        self.bed.bus.publish_bytes(&asked.reply, None, Vec::new().into()).await.unwrap();
    }

    /// Waits for the next cancellation.
    ///
    /// # Cancel safety
    /// No cancellation is lost when the future is dropped.
    pub(crate) async fn cancelled(&mut self) -> RequestId {
        let delivery = soon(self.cancels.next()).await.unwrap();
        match self.bed.subjects.parse(delivery.subject()) {
            Ok(Subject::Cancel(request)) => request,
            other => panic!("{other:?}"),
        }
    }

    /// A cancellation that is already here.
    pub(crate) async fn no_cancellation(&mut self) {
        self.bed.settle().await;
        assert!(self.cancels.try_next().is_none());
    }
}
