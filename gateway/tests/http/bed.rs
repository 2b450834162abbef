//! A broker, a shard set, a fleet and gateways, started for one test.

use std::net::SocketAddr;
use std::time::Duration;

use stagebus_bus::{Bus, BusOptions, RequestError};
use stagebus_coordinator::{CoordinatorConfig, CoordinatorError, CoordinatorSettings};
use stagebus_engine::testing::TestModel;
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_gateway::{GatewayConfig, GatewayError, GatewaySettings};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::subjects::Subjects;
use stagebus_settings::BrokerSettings;
use stagebus_shards::Manifest;
use stagebus_shards::text::TextModel;
use stagebus_telemetry::{CoordinatorTelemetry, WorkerTelemetry};
use stagebus_worker::{EngineChoice, WorkerConfig, WorkerError, WorkerSettings};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::client;
use crate::shard_set;

/// Longest wait for anything; only a hang takes that long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Name of the model.
pub(crate) const MODEL: &str = "tiny";

/// A broker with a shard set.
pub(crate) struct Bed {
    pub(crate) broker: LocalBroker,
    pub(crate) folder: TempDir,
    pub(crate) manifest: Manifest,
    pub(crate) text: TextModel,
    pub(crate) subjects: Subjects,
    pub(crate) bus: Bus,
    toy: TestModel,
}

/// Bounds the wait for something.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.unwrap()
}

impl Bed {
    pub(crate) async fn new() -> Self {
        let broker = LocalBroker::start(BrokerOptions::default()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let manifest = shard_set::write(folder.path(), 1);
        Self {
            bus: Bus::connect(BusOptions::new(broker.url(), "test")).await.unwrap(),
            toy: TestModel::from_manifest(&manifest),
            text: TextModel::load(folder.path()).unwrap(),
            subjects: Subjects::new(&ModelName::new(MODEL).unwrap()),
            broker,
            folder,
            manifest,
        }
    }

    fn broker_settings(&self) -> BrokerSettings {
        BrokerSettings { url: self.broker.url(), ..BrokerSettings::default() }
    }

    /// Starts a worker with the toy model and a coordinator.
    pub(crate) async fn fleet(&self) -> Fleet {
        let settings = WorkerSettings {
            shards: self.folder.path().to_owned(),
            stage: Some(0),
            engine: EngineChoice::Test,
            ..WorkerSettings::default()
        };
        let worker = WorkerConfig {
            broker: self.broker_settings(),
            settings,
            switch: None,
            telemetry: WorkerTelemetry::default(),
        };
        let coordinator = CoordinatorConfig {
            shards: self.folder.path().to_owned(),
            broker: self.broker_settings(),
            settings: CoordinatorSettings::default(),
            wait_for_workers: true,
            hosted: None,
            telemetry: CoordinatorTelemetry::default(),
        };
        let (tell, ready) = oneshot::channel();
        let mut fleet = Fleet {
            coordinator: CancellationToken::new(),
            worker: stagebus_worker::Shutdown::new(),
            tasks: JoinSet::new(),
        };
        let (stop_worker, stop) = (fleet.worker.clone(), fleet.coordinator.clone());
        fleet.tasks.spawn(async move {
            stagebus_worker::run(worker, stop_worker, |_| {}).await.map_err(Failed::Worker)
        });
        fleet.tasks.spawn(async move {
            let told = |_: &_| tell.send(()).unwrap();
            let ended = Box::pin(stagebus_coordinator::run(coordinator, stop, told)).await;
            ended.map_err(Failed::Coordinator)
        });
        soon(ready).await.unwrap();
        fleet
    }

    /// Starts a gateway on a free port.
    pub(crate) async fn gateway(&self, change: impl FnOnce(&mut GatewaySettings)) -> Gateway {
        Gateway::start(self.broker_settings(), change).await
    }

    /// Starts a gateway and waits until it lists the model.
    pub(crate) async fn gateway_with_model(
        &self,
        change: impl FnOnce(&mut GatewaySettings),
    ) -> Gateway {
        let gateway = self.gateway(change).await;
        gateway.until_models(&[MODEL]).await;
        gateway
    }

    /// Tokens that greedy decoding gives, up to and with an end token.
    pub(crate) fn expected(&self, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut tokens = self.toy.expected(prompt, n);
        if let Some(end) = tokens.iter().position(|token| *token == shard_set::END) {
            tokens.truncate(end + 1);
        }
        tokens
    }

    /// Waits until the broker has seen all subscriptions made so far.
    pub(crate) async fn settle(&self) {
        let answer = self.bus.request_bytes("nobody", None, Vec::new().into(), PATIENCE).await;
        assert!(matches!(answer, Err(RequestError::NoResponders { .. })), "{answer:?}");
    }
}

/// A worker and a coordinator.
pub(crate) struct Fleet {
    coordinator: CancellationToken,
    worker: stagebus_worker::Shutdown,
    tasks: JoinSet<Result<(), Failed>>,
}

#[derive(Debug)]
enum Failed {
    #[expect(dead_code, reason = "shown when a test fails")]
    Worker(WorkerError),
    #[expect(dead_code, reason = "shown when a test fails")]
    Coordinator(CoordinatorError),
}

impl Fleet {
    /// Asks for the end of both and waits for it.
    pub(crate) async fn end(mut self) {
        self.coordinator.cancel();
        soon(self.tasks.join_next()).await.unwrap().unwrap().unwrap();
        self.worker.drain.cancel();
        soon(self.tasks.join_next()).await.unwrap().unwrap().unwrap();
    }
}

/// A gateway that listens.
pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) base_url: String,
    pub(crate) stop: CancellationToken,
    tasks: JoinSet<Result<(), GatewayError>>,
}

impl Gateway {
    pub(crate) async fn start(
        broker: BrokerSettings,
        change: impl FnOnce(&mut GatewaySettings),
    ) -> Self {
        let (config, stop) = (config(broker, change), CancellationToken::new());
        let (tell, ready) = oneshot::channel();
        let mut tasks = JoinSet::new();
        let stopped = stop.clone();
        tasks.spawn(async move {
            Box::pin(stagebus_gateway::run(config, stopped, |ready| {
                tell.send(ready.clone()).unwrap();
                Ok(())
            }))
            .await
        });
        let ready = soon(ready).await.unwrap();
        Self { address: ready.listen, base_url: ready.base_url, stop, tasks }
    }

    /// Names of the models that are listed.
    pub(crate) async fn models(&self) -> Vec<String> {
        let list = client::get(self.address, "/v1/models").await.json();
        let data = list["data"].as_array().unwrap().iter();
        data.map(|model| model["id"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until exactly these models are listed.
    pub(crate) async fn until_models(&self, names: &[&str]) {
        soon(async { while self.models().await != names {} }).await;
    }

    /// Waits for its end.
    pub(crate) async fn ended(mut self) -> Result<(), GatewayError> {
        soon(self.tasks.join_next()).await.unwrap().unwrap()
    }

    /// Asks for its end and waits for it.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.ended().await.unwrap();
    }
}

/// The configuration of a gateway on a free port.
pub(crate) fn config(
    broker: BrokerSettings,
    change: impl FnOnce(&mut GatewaySettings),
) -> GatewayConfig {
    let mut settings =
        GatewaySettings { listen: "127.0.0.1:0".parse().unwrap(), ..GatewaySettings::default() };
    change(&mut settings);
    GatewayConfig { broker, settings }
}
