//! A broker, a shard set, a coordinator and stages, started for one test.

use std::time::Duration;

use stagebus_bus::{Bus, BusOptions, EventStream};
use stagebus_coordinator::{CoordinatorConfig, CoordinatorError, CoordinatorSettings, Hosted, run};
use stagebus_engine::testing::TestModel;
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::public::{
    Event, FinishReason, PromptRequest, TokenLogprobs, Usage,
};
use stagebus_schemas::subjects::Subjects;
use stagebus_settings::BrokerSettings;
use stagebus_shards::Manifest;
use stagebus_shards::text::TextModel;
use stagebus_telemetry::CoordinatorTelemetry;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::fake_stage::{Behaviour, FakeStage};
use crate::shard_set;

/// Longest wait for an event; only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A broker with clients.
pub(crate) struct Bed {
    pub(crate) broker: LocalBroker,
    pub(crate) folder: TempDir,
    pub(crate) manifest: Manifest,
    pub(crate) model: TestModel,
    pub(crate) text: TextModel,
    pub(crate) subjects: Subjects,
    pub(crate) bus: Bus,
}

impl Bed {
    pub(crate) async fn new(n_stages: usize) -> Self {
        let broker = LocalBroker::start(BrokerOptions::default()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let manifest = shard_set::write(folder.path(), n_stages);
        Self {
            bus: Bus::connect(BusOptions::new(broker.url(), "client")).await.unwrap(),
            model: TestModel::from_manifest(&manifest),
            text: TextModel::load(folder.path()).unwrap(),
            subjects: Subjects::new(&ModelName::new(manifest.model.clone()).unwrap()),
            broker,
            folder,
            manifest,
        }
    }

    /// Starts `per_stage` good workers of every stage.
    pub(crate) async fn stages(&self, per_stage: usize) -> Vec<FakeStage> {
        let mut stages = Vec::new();
        for stage in 0..self.manifest.n_stages() {
            for _ in 0..per_stage {
                stages.push(self.stage(stage, Behaviour::Good).await);
            }
        }
        stages
    }

    pub(crate) async fn stage(&self, stage: usize, behaviour: Behaviour) -> FakeStage {
        FakeStage::start(&self.broker.url(), &self.manifest, stage, behaviour).await
    }

    pub(crate) async fn coordinator(&self, settings: CoordinatorSettings) -> Running {
        self.coordinator_that_waits(settings, false).ready().await
    }

    pub(crate) fn coordinator_that_waits(
        &self,
        settings: CoordinatorSettings,
        wait_for_workers: bool,
    ) -> Starting {
        self.starting(settings, wait_for_workers, None, CoordinatorTelemetry::default())
    }

    /// A coordinator with a worker in its process.
    pub(crate) async fn hosting(&self, settings: CoordinatorSettings, hosted: Hosted) -> Running {
        self.starting(settings, false, Some(hosted), CoordinatorTelemetry::default()).ready().await
    }

    /// A coordinator that shows itself to the test.
    pub(crate) async fn shown(
        &self,
        settings: CoordinatorSettings,
        telemetry: CoordinatorTelemetry,
    ) -> Running {
        self.starting(settings, false, None, telemetry).ready().await
    }

    /// A coordinator that does not start.
    pub(crate) async fn coordinator_that_fails(
        &self,
        settings: CoordinatorSettings,
    ) -> CoordinatorError {
        let mut running =
            self.starting(settings, false, None, CoordinatorTelemetry::default()).running;
        running.tasks.join_next().await.unwrap().unwrap().unwrap_err()
    }

    fn starting(
        &self,
        settings: CoordinatorSettings,
        wait_for_workers: bool,
        hosted: Option<Hosted>,
        telemetry: CoordinatorTelemetry,
    ) -> Starting {
        let config = CoordinatorConfig {
            shards: self.folder.path().to_owned(),
            broker: BrokerSettings { url: self.broker.url(), ..BrokerSettings::default() },
            settings,
            wait_for_workers,
            hosted,
            telemetry,
        };
        let shutdown = CancellationToken::new();
        let (tell, ready) = oneshot::channel();
        let mut tasks = JoinSet::new();
        let stop = shutdown.clone();
        tasks.spawn(async move {
            Box::pin(run(config, stop, |_| {
                tell.send(()).unwrap();
            }))
            .await
        });
        Starting { ready, running: Running { shutdown, tasks } }
    }

    pub(crate) async fn ask(&self, request: &PromptRequest) -> Answer {
        Answer::read(self.send(request).await).await
    }

    pub(crate) async fn send(&self, request: &PromptRequest) -> EventStream {
        self.bus.prompt(&self.subjects.prompt(), request, PATIENCE).await.unwrap()
    }

    /// A prompt after which no end token comes for `n` tokens.
    pub(crate) fn prompt_with_long_answer(&self, n: usize) -> Vec<u32> {
        (0..).map(|n| vec![n]).find(|prompt| self.expected(prompt, n).len() == n).unwrap()
    }

    /// Tokens that greedy decoding gives, up to and with an end token.
    pub(crate) fn expected(&self, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut tokens = self.model.expected(prompt, n);
        if let Some(end) = tokens.iter().position(|token| *token == shard_set::END) {
            tokens.truncate(end + 1);
        }
        tokens
    }
}

/// A coordinator that may not be ready.
pub(crate) struct Starting {
    pub(crate) ready: oneshot::Receiver<()>,
    running: Running,
}

impl Starting {
    pub(crate) async fn ready(self) -> Running {
        tokio::time::timeout(PATIENCE, self.ready).await.unwrap().unwrap();
        self.running
    }
}

/// A coordinator that is ready.
pub(crate) struct Running {
    pub(crate) shutdown: CancellationToken,
    tasks: JoinSet<Result<(), CoordinatorError>>,
}

impl Running {
    /// Asks for the end and waits for it.
    pub(crate) async fn end(mut self) -> Result<(), CoordinatorError> {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.tasks.join_next()).await.unwrap().unwrap().unwrap()
    }
}

/// All events of one request.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) n_accepted: usize,
    pub(crate) n_token_events: usize,
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) done: Option<(FinishReason, Usage)>,
    pub(crate) error: Option<(ErrorClass, String, Option<u64>)>,
}

impl Answer {
    pub(crate) async fn read(mut stream: EventStream) -> Self {
        let mut answer = Self::default();
        while let Some(event) = stream.next().await.unwrap() {
            answer.add(event);
        }
        answer
    }

    pub(crate) fn add(&mut self, event: Event) {
        match event {
            Event::Accepted { .. } => self.n_accepted += 1,
            Event::Status { .. } => {}
            Event::Token { text, tokens, logprobs, .. } => {
                self.logprobs.extend(logprobs);
                self.n_token_events += 1;
                self.text.push_str(&text);
                self.tokens.extend(tokens);
            }
            Event::Done { finish_reason, usage, text, tokens, .. } => {
                self.text.extend(text);
                self.tokens.extend(tokens.unwrap_or_default());
                self.done = Some((finish_reason, usage));
            }
            Event::Error { class, message, retry_after_ms } => {
                self.error = Some((class, message, retry_after_ms));
            }
        }
    }

    pub(crate) fn class(&self) -> Option<ErrorClass> {
        self.error.as_ref().map(|(class, _, _)| *class)
    }

    pub(crate) fn finish_reason(&self) -> Option<FinishReason> {
        self.done.as_ref().map(|(reason, _)| *reason)
    }
}

/// A request for tokens after tokens.
pub(crate) fn tokens(prompt: &[u32], max_tokens: u32) -> PromptRequest {
    PromptRequest {
        tokens: Some(prompt.to_vec()),
        max_tokens: Some(max_tokens),
        ..PromptRequest::default()
    }
}
