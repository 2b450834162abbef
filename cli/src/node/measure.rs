//! Measures a model on the devices of this machine: finds the probe, loads as many of its stages as
//! there is room for, and runs them in turn.

use std::time::Duration;

use anyhow::Context as _;
use stagebus_engine::{EngineOptions, StageRequest, open_backend};
use stagebus_plan::ProbeStage;
use stagebus_schemas::messages::node::{DeviceMeasurement, Probe, ProbeProgress, StageMeasurement};
use stagebus_settings::find_openvino;
use stagebus_shards::ShardSet;
use stagebus_worker::{EngineChoice, WorkerSettings};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::passes::{Chain, MAX_POSITION, REST, Stage};
use super::probe::{Origin, ProbeSet};

/// Memory that a loaded stage may need for a moment over the size of its files, in percent: weights
/// are laid out anew for the processor.
const LOAD_PERCENT: u64 = 150;

/// Steps of a device beside loading its stages: one row, one row with rests, many rows.
const RUNS: u32 = 3;

/// What to measure.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) probe: Probe,
    /// Where the probe is had from.
    pub(super) origin: Origin,
    /// Devices in OpenVINO's words.
    pub(super) devices: Vec<String>,
    /// How a worker would run a stage.
    pub(super) settings: WorkerSettings,
    /// Memory that may be taken.
    pub(super) free_bytes: u64,
    /// Where sharding and pulling run.
    pub(super) runtime: Handle,
    /// Ends the work early.
    pub(super) stop: CancellationToken,
}

/// Tells how far the work is.
struct Steps<'a> {
    tell: &'a watch::Sender<ProbeProgress>,
    stop: &'a CancellationToken,
}

impl Steps<'_> {
    fn one(&self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.stop.is_cancelled(), "stopped");
        self.tell.send_modify(|progress| progress.done = progress.done.saturating_add(1));
        Ok(())
    }
}

impl Order {
    /// Where what takes long runs, and what ends it early.
    fn means(&self) -> (&Handle, &CancellationToken) {
        (&self.runtime, &self.stop)
    }
}

/// Measures every device. Blocks for seconds to minutes.
///
/// # Errors
/// As [`ProbeSet::find`].
pub(super) fn measure(
    order: &Order,
    tell: &watch::Sender<ProbeProgress>,
) -> anyhow::Result<Vec<DeviceMeasurement>> {
    let probe = ProbeSet::find(&order.origin, &order.probe, order.means())?;
    let n_steps = (probe.shards.manifest.n_stages() as u64 + u64::from(RUNS))
        .saturating_mul(order.devices.len() as u64);
    let total = u32::try_from(n_steps).unwrap_or(u32::MAX);
    tell.send_replace(ProbeProgress { done: 0, total });
    let steps = Steps { tell, stop: &order.stop };
    let mut all = Vec::new();
    for device in &order.devices {
        let measured = on_device(order, &probe, device, &steps);
        anyhow::ensure!(!order.stop.is_cancelled(), "stopped");
        all.push(measured.unwrap_or_else(|error| {
            tracing::warn!(device, error = format!("{error:#}"), "the device is left out");
            DeviceMeasurement { failure: Some(short(&format!("{error:#}"))), ..empty(device) }
        }));
    }
    Ok(all)
}

/// A failure as it fits a message.
fn short(text: &str) -> String {
    text.chars().take(500).collect()
}

fn empty(device: &str) -> DeviceMeasurement {
    DeviceMeasurement {
        device: device.to_owned(),
        stages: Vec::new(),
        resident_bytes: 0,
        kv_bytes: 0,
        kv_tokens: 0,
        failure: None,
    }
}

fn on_device(
    order: &Order,
    probe: &ProbeSet,
    device: &str,
    steps: &Steps<'_>,
) -> anyhow::Result<DeviceMeasurement> {
    let many = usize::try_from(order.probe.many_rows)?;
    let before = resident_bytes();
    let mut chain = load(order, probe, (device, many), steps)?;
    chain.fill_first()?;
    let one = chain.run(1, Duration::ZERO, &order.stop)?;
    steps.one()?;
    let rested = chain.run(1, REST, &order.stop)?;
    steps.one()?;
    let (kv_bytes, kv_tokens) = chain.kv_use();
    chain.fill_others(many)?;
    let all = chain.run(many, Duration::ZERO, &order.stop)?;
    steps.one()?;
    let taken = resident_bytes().saturating_sub(before);
    let stages = chain.stage_indices().zip(one).zip(rested.into_iter().zip(all));
    let stages = stages
        .map(|((stage, one_ns), (rested_ns, many_ns))| {
            Ok(StageMeasurement { stage: u32::try_from(stage)?, one_ns, many_ns, rested_ns })
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(DeviceMeasurement { stages, resident_bytes: taken, kv_bytes, kv_tokens, ..empty(device) })
}

/// Loads the stages: first those that every difference needs, then blocks while there is room.
fn load(
    order: &Order,
    probe: &ProbeSet,
    (device, many): (&str, usize),
    steps: &Steps<'_>,
) -> anyhow::Result<Chain> {
    let shards = &probe.shards;
    let manifest = &shards.manifest;
    let n_layers = manifest.dims.n_layers;
    let kind = |stage: usize| {
        let entry = &manifest.stages[stage];
        ProbeStage::of(&(entry.first_layer..entry.end_layer), n_layers)
    };
    let mut wanted: Vec<usize> = (0..manifest.n_stages()).collect();
    wanted.sort_by_key(|&stage| kind(stage) == ProbeStage::Block);
    let library = match order.settings.engine {
        EngineChoice::Test => None,
        EngineChoice::Auto
        | EngineChoice::Paged
        | EngineChoice::Stateful
        | EngineChoice::Static => Some(find_openvino()?),
    };
    let options = EngineOptions {
        device: device.to_owned(),
        max_sessions: many,
        context_limit: Some(MAX_POSITION),
        kv_bytes: Some(kv_bytes(shards, many)),
        ..order.settings.engine_options()?
    };
    let mut chain = Chain::new(manifest);
    let mut needed = 0;
    for index in wanted {
        let entry = shards.stage(index)?;
        needed += entry.bin.bytes.saturating_mul(LOAD_PERCENT) / 100;
        if needed <= order.free_bytes {
            probe.bring(index, order.means())?;
            let library = library.as_ref().map(stagebus_settings::OpenVinoLibrary::path);
            let request = StageRequest { shards, stage: index, library };
            let backend = open_backend(order.settings.engine.kind(), &request, &options)
                .with_context(|| format!("stage {index} of the probe does not load"))?;
            chain.push(Stage::new(index, entry.first_layer..entry.end_layer, backend));
        } else if kind(index) != ProbeStage::Block {
            anyhow::bail!(
                "no room for the ends of the model and a layer: they need {} MiB, {} are free",
                needed >> 20,
                order.free_bytes >> 20
            );
        }
        steps.one()?;
    }
    chain.sort();
    Ok(chain)
}

/// Room for the KV caches of a stage, in bytes: more than any of its sessions can fill, in single
/// precision. Blocks that nobody can need are not made.
fn kv_bytes(shards: &ShardSet, n_sessions: usize) -> u64 {
    let manifest = &shards.manifest;
    let layers =
        |stage: &stagebus_shards::manifest::StageEntry| stage.end_layer - stage.first_layer;
    let most_layers = manifest.stages.iter().map(layers).max().unwrap_or(1);
    let row = 2 * manifest.dims.n_kv_heads * manifest.dims.head_dim * size_of::<f32>();
    let tokens = 2 * MAX_POSITION * n_sessions;
    (row * most_layers) as u64 * tokens as u64
}

/// Memory of this process; 0 where the system does not tell.
fn resident_bytes() -> u64 {
    stagebus_fleet::rss_bytes(std::process::id()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_cut_to_what_a_message_holds() {
        assert_eq!(short("a"), "a");
        assert_eq!(short(&"é".repeat(4096)).len(), 1000);
    }

    #[test]
    fn a_stopped_measurement_takes_no_further_step() {
        let (tell, progress) = watch::channel(ProbeProgress { done: 1, total: 4 });
        let stop = CancellationToken::new();
        let steps = Steps { tell: &tell, stop: &stop };
        steps.one().expect("nobody has stopped it");
        assert_eq!(*progress.borrow(), ProbeProgress { done: 2, total: 4 });
        stop.cancel();
        steps.one().expect_err("stopped");
    }
}
