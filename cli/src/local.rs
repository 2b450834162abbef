//! A private fleet for one command: options, start, watch, orderly end.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use stagebus_bus::{Bus, BusOptions};
use stagebus_fleet::{BrokerChoice, Ended, FleetSpec, LocalFleet, LogSink};
use stagebus_settings::ProcessArgs;
use stagebus_shards::{FloatCoding, ShardSet, WeightMode};
use stagebus_worker::{EngineChoice, ProfileChoice};
use tokio_util::sync::CancellationToken;

use crate::ask::converse::Target;
use crate::draft::DraftArgs;
use crate::source::{self, Cut, SourceArgs};
use crate::weights;

/// Stages of a model that is sharded on the way, when nothing else is said.
pub const DEFAULT_STAGES: usize = 2;

/// Longest wait for an event of a private fleet: it serves nobody else, so silence means trouble.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// Options of every command that starts a fleet.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LocalArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// How weights are mapped when a model file is sharded [default: exact]
    #[arg(long, value_name = "MODE", value_parser = weights::parser())]
    weights: Option<WeightMode>,

    /// Layers of each stage when a model file is sharded
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', conflicts_with = "shards")]
    split: Option<Vec<usize>>,

    /// Workers of each stage
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers_per_stage: usize,

    /// Engine that runs the stages
    #[arg(long, value_name = "NAME")]
    engine: Option<EngineChoice>,

    /// Device that runs the stages, as OpenVINO names it: CPU, GPU, NPU, AUTO
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,

    /// Inference threads of each worker; 0 leaves it to the device
    #[arg(long, value_name = "N")]
    threads: Option<u16>,

    #[command(flatten)]
    draft: DraftArgs,

    /// Where tokens are chosen: on the last stage, or in the coordinator from whole rows of logits
    /// [default: token]
    #[arg(long, value_name = "MODE", value_parser = ["token", "full"])]
    head: Option<String>,
}

/// What a command adds to its options.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted<'a> {
    /// The model file, unless a shard set is named.
    pub model: Option<&'a Path>,
    /// Number of stages.
    pub n_stages: Option<usize>,
    /// Numerics profile.
    pub profile: Option<ProfileChoice>,
    /// Hides progress bars and remarks.
    pub quiet: bool,
}

impl LocalArgs {
    /// Opens the shard set that the options name, or makes one.
    ///
    /// # Errors
    /// Options that contradict each other or the shard set, and what the sharder says.
    pub async fn shard_set(
        &self,
        wanted: &Wanted<'_>,
        stop: &CancellationToken,
    ) -> anyhow::Result<ShardSet> {
        let profile = wanted.profile.unwrap_or_default();
        let weights = weights::for_profile(self.weights, profile)?;
        if let Some(dir) = &self.source.shards {
            let needed = self.weights.is_some() || profile == ProfileChoice::Exact;
            return source::open(dir, wanted.n_stages, needed.then_some(weights));
        }
        let n_stages = match &self.split {
            Some(split) => crate::shard::stage_count(wanted.n_stages, Some(split))?,
            None => wanted.n_stages.unwrap_or(DEFAULT_STAGES),
        };
        // The exact profile implies that no weight changes.
        let floats = (profile == ProfileChoice::Exact).then_some(FloatCoding::Keep);
        let cut = Cut { n_stages, split: self.split.clone(), weights, floats };
        source::shard_set(&self.source, wanted.model, &cut, wanted.quiet, stop).await
    }

    /// Describes a fleet for a shard set: log kept for errors, and a private broker on a free port
    /// unless `broker` names a running one.
    ///
    /// # Errors
    /// The running program cannot be found, or the draft model cannot be used.
    pub fn spec(
        &self,
        set: &ShardSet,
        profile: Option<ProfileChoice>,
        broker: Option<String>,
        process: &ProcessArgs,
    ) -> anyhow::Result<FleetSpec> {
        let mut spec = FleetSpec::with_this_program(set.dir.clone())?;
        spec.workers_per_stage = self.workers_per_stage;
        spec.config.clone_from(&process.config);
        match broker {
            Some(url) => spec.broker = BrokerChoice::Running(url),
            // The configuration may be that of another broker, with TLS.
            None => spec.settings.push("broker.tls.required=false".to_owned()),
        }
        // The test engine knows no language, so nothing drafts for it.
        if self.engine != Some(EngineChoice::Test) {
            let cache = self.source.cache.as_deref();
            spec.settings.extend(self.draft.settings(set, cache, process)?);
        }
        spec.settings.extend(process.set.iter().cloned());
        let named = [
            ("worker.profile", profile.map(|profile| profile.profile().to_string())),
            ("worker.engine", self.engine.map(|engine| engine.kind().to_string())),
            ("worker.device", self.device.clone()),
            ("worker.threads", self.threads.map(|n| n.to_string())),
            ("coordinator.head", self.head.clone()),
        ];
        for (key, value) in named {
            spec.settings.extend(value.map(|value| format!("{key}={value}")));
        }
        Ok(spec)
    }

    /// The first option that was given, for commands that take them in one mode only.
    #[must_use]
    pub fn first_given(&self) -> Option<&'static str> {
        [
            ("--shards", self.source.shards.is_some()),
            ("--cache", self.source.cache.is_some()),
            ("--weights", self.weights.is_some()),
            ("--split", self.split.is_some()),
            ("--workers-per-stage", self.workers_per_stage != 1),
            ("--engine", self.engine.is_some()),
            ("--device", self.device.is_some()),
            ("--threads", self.threads.is_some()),
            ("--head", self.head.is_some()),
        ]
        .into_iter()
        .find_map(|(option, given)| given.then_some(option))
        .or_else(|| self.draft.first_given())
    }

    /// Number of workers of each stage.
    #[must_use]
    pub fn workers_per_stage(&self) -> usize {
        self.workers_per_stage
    }

    /// The engine asked for, or the default.
    #[must_use]
    pub fn engine(&self) -> EngineChoice {
        self.engine.unwrap_or_default()
    }
}

/// Starts a fleet; gives up when `stop` is cancelled.
///
/// # Errors
/// What keeps the fleet from starting, or that the user stopped it.
pub async fn start(spec: FleetSpec, stop: &CancellationToken) -> anyhow::Result<LocalFleet> {
    tokio::select! {
        fleet = LocalFleet::start(spec) => fleet.context("the local fleet did not start"),
        () = stop.cancelled() => anyhow::bail!("stopped while the local fleet was starting"),
    }
}

/// Runs `work` on a private fleet and ends the fleet, whatever happens. A part of the fleet that
/// dies ends the work.
///
/// # Errors
/// What `work` reports; a fleet that does not start, loses a part or does not end in order.
pub async fn with_fleet<T>(
    spec: FleetSpec,
    stop: &CancellationToken,
    work: impl AsyncFnOnce(Target) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let set = ShardSet::open(&spec.shards)?;
    let mut fleet = start(spec, stop).await?;
    let url = fleet.url().to_owned();
    let work = async {
        let bus = Bus::connect(BusOptions::new(url, "stagebus")).await?;
        let model =
            set.manifest.model.parse().context("the shard set's model name is not valid")?;
        work(Target { bus, model, idle_timeout: IDLE_TIMEOUT }).await
    };
    let result = tokio::select! {
        result = work => result,
        ended = fleet.ended() => ended.map_err(Into::into).and_then(|ended| Err(lost(&ended))),
    };
    let end = end(fleet).await;
    let value = result?;
    end?;
    Ok(value)
}

/// The error for a part of the fleet that ended by itself, with the end of its log.
fn lost(ended: &Ended) -> anyhow::Error {
    let Ended { name, status, last_lines } = ended;
    anyhow::anyhow!("{name} ended by itself ({status}); its last lines:\n{last_lines}")
}

/// Ends a fleet in order and reports those who did not leave by themselves.
///
/// # Errors
/// A part that had to be killed, or left with a failure.
pub async fn end(fleet: LocalFleet) -> anyhow::Result<()> {
    let report = fleet.shutdown().await?;
    anyhow::ensure!(
        report.killed.is_empty(),
        "had to be killed at the end: {}",
        report.killed.join(", ")
    );
    let failed: Vec<String> =
        report.failed.iter().map(|(name, status)| format!("{name} ({status})")).collect();
    anyhow::ensure!(failed.is_empty(), "failed while leaving: {}", failed.join(", "));
    Ok(())
}

/// Where the log lines of the fleet go.
#[must_use]
pub fn log_sink(shown: bool) -> LogSink {
    if shown { LogSink::Stderr } else { LogSink::Quiet }
}
