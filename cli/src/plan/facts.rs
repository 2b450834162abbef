//! From what nodes measured to what a plan follows from.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Context as _;
use stagebus_plan::{DeviceCosts, ModelFacts, NodeFacts, ProbeStage, RowCost, StageTimes, fit};
use stagebus_schemas::messages::node::DeviceMeasurement;
use stagebus_shards::Manifest;
use stagebus_shards::manifest::StageEntry;

use super::ask::Measured;
use super::error::AskError;

/// Most memory that a loaded stage is taken to need over the size of its files: the runtime keeps its
/// own copy of the weights beside the mapped file, whose pages make way. Of a small model the rest of
/// the process is more than the weights, and is counted apart.
const MOST_MEMORY_FACTOR: f64 = 1.5;

fn layers_of(entry: &StageEntry) -> Range<usize> {
    entry.first_layer..entry.end_layer
}

/// The sizes of the model's parts, from the files of the probe.
///
/// # Errors
/// A probe without a stage of one layer.
pub(super) fn model(manifest: &Manifest) -> anyhow::Result<ModelFacts> {
    let n_layers = manifest.dims.n_layers;
    let kind = |entry: &StageEntry| ProbeStage::of(&layers_of(entry), n_layers);
    let single = manifest.stages.iter().find(|entry| kind(entry) == ProbeStage::Single);
    let single = single.context("the probe has no stage of one layer")?.bin.bytes;
    let mut facts = ModelFacts { layer_bytes: Vec::new(), embedding_bytes: 0, head_bytes: 0 };
    for entry in &manifest.stages {
        let (bytes, n) = (entry.bin.bytes, entry.end_layer - entry.first_layer);
        match kind(entry) {
            ProbeStage::First => facts.embedding_bytes = bytes.saturating_sub(single),
            ProbeStage::Last => facts.head_bytes = bytes.saturating_sub(single),
            ProbeStage::Single | ProbeStage::Block => {
                facts.layer_bytes.extend(vec![bytes / n as u64; n]);
                continue;
            }
        }
        facts.layer_bytes.push(bytes.min(single));
    }
    Ok(facts)
}

/// What every node has and takes. Nodes of one host share its memory evenly.
///
/// # Errors
/// A measurement that does not fit the probe.
pub(super) fn nodes(measured: &[Measured], manifest: &Manifest) -> anyhow::Result<Vec<NodeFacts>> {
    let mut of_host: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for node in measured {
        let (free, n) = of_host.entry(&node.about.host).or_default();
        (*free, *n) = ((*free).max(node.about.free_bytes), *n + 1);
    }
    let facts = |node: &Measured| {
        let (free, n) = of_host.get(node.about.host.as_str()).copied().unwrap_or((0, 1));
        let measured = node.found.devices.iter().filter(|device| device.failure.is_none());
        Ok(NodeFacts {
            name: node.name.clone(),
            memory_bytes: node.about.free_bytes.min(free / n.max(1)),
            handoff_ms: ms(node.found.handoff_ns),
            devices: measured
                .map(|device| costs(&node.name, device, manifest))
                .collect::<anyhow::Result<_>>()?,
        })
    };
    measured.iter().map(facts).collect()
}

fn costs(
    name: &str,
    device: &DeviceMeasurement,
    manifest: &Manifest,
) -> anyhow::Result<DeviceCosts> {
    let mut times = Vec::new();
    let mut bytes = 0;
    for stage in &device.stages {
        let entry = usize::try_from(stage.stage).ok().and_then(|at| manifest.stages.get(at));
        let entry = entry.ok_or_else(|| AskError::NoSuchStage {
            name: name.to_owned(),
            stage: stage.stage,
            n_stages: manifest.n_stages(),
        })?;
        bytes += entry.bin.bytes;
        let pass = RowCost {
            one_ms: ms(stage.one_ns),
            many_ms: ms(stage.many_ns),
            rested_ms: ms(stage.rested_ns),
        };
        times.push(StageTimes { layers: layers_of(entry), pass });
    }
    let fitted = fit(&times, manifest.dims.n_layers)
        .with_context(|| format!("{} of node {name} cannot be judged", device.device))?;
    let over = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    Ok(DeviceCosts {
        device: device.device.clone(),
        call: fitted.call,
        layer: fitted.layer,
        embedding: fitted.embedding,
        head: fitted.head,
        kv_token_bytes: over(device.kv_bytes, device.kv_tokens),
        memory_factor: over(device.resident_bytes, bytes).clamp(1.0, MOST_MEMORY_FACTOR),
    })
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
pub(super) mod tests {
    use stagebus_schemas::ids::NodeId;
    use stagebus_schemas::messages::node::{NodeDescription, NodeMeasurement, StageMeasurement};
    use stagebus_shards::manifest::{FileEntry, ModelDims};
    use stagebus_shards::{Form, WeightMode};

    use super::*;

    /// A probe of six layers: 1, 1, 3, 1; a layer has 100 bytes, the embedding table 40, the head 60.
    pub(in crate::plan) fn probe() -> Manifest {
        let file =
            |name: &str, bytes| FileEntry { name: name.to_owned(), bytes, sha256: "0".repeat(64) };
        let stage = |index: usize, layers: Range<usize>, bytes| StageEntry {
            index,
            first_layer: layers.start,
            end_layer: layers.end,
            cost_share: 0.25,
            xml: file("x.xml", 1),
            bin: file("x.bin", bytes),
        };
        Manifest {
            format_version: 1,
            model: "m".to_owned(),
            architecture: "llama".to_owned(),
            fingerprint: "f".repeat(64),
            source: "m.gguf".to_owned(),
            weights: WeightMode::Exact,
            floats: None,
            form: Form::Stateful,
            dims: ModelDims {
                n_layers: 6,
                hidden_dim: 16,
                n_heads: 2,
                n_kv_heads: 1,
                head_dim: 8,
                vocab_size: 32,
                context_length: 128,
            },
            bos_id: None,
            eos_ids: Vec::new(),
            stages: vec![
                stage(0, 0..1, 140),
                stage(1, 1..2, 100),
                stage(2, 2..5, 300),
                stage(3, 5..6, 160),
            ],
            text_files: Vec::new(),
            head_tokens: None,
        }
    }

    /// A node whose calls take 1 ms, layers 2 ms, the embedding table nothing, the head 5 ms.
    pub(in crate::plan) fn node(name: &str, host: &str, free_bytes: u64) -> Measured {
        let stage = |stage, ms: u64| StageMeasurement {
            stage,
            one_ns: ms * 1_000_000,
            many_ns: ms * 3_000_000,
            rested_ns: ms * 2_000_000,
        };
        let device = DeviceMeasurement {
            device: "CPU".to_owned(),
            stages: vec![stage(0, 3), stage(1, 3), stage(2, 7), stage(3, 8)],
            resident_bytes: 840,
            kv_bytes: 600,
            kv_tokens: 300,
            failure: None,
        };
        let failed = DeviceMeasurement {
            device: "GPU".to_owned(),
            stages: Vec::new(),
            failure: Some("no such device".to_owned()),
            ..device.clone()
        };
        Measured {
            id: NodeId::random(),
            name: name.to_owned(),
            about: NodeDescription {
                name: name.to_owned(),
                host: host.to_owned(),
                n_cores: 2,
                memory_bytes: free_bytes,
                free_bytes,
                devices: vec!["CPU".to_owned(), "GPU".to_owned()],
                engine: "paged".to_owned(),
                profile: "fast".to_owned(),
                threads: 1,
                has_model: true,
            },
            found: NodeMeasurement { handoff_ns: 50_000, devices: vec![device, failed] },
        }
    }

    #[test]
    fn parts_have_the_bytes_of_their_files() {
        let facts = model(&probe()).expect("a probe");
        assert_eq!(facts.layer_bytes, [100; 6]);
        assert_eq!((facts.embedding_bytes, facts.head_bytes), (40, 60));
    }

    #[test]
    fn devices_are_judged_and_failed_ones_left_out() {
        let facts = nodes(&[node("a", "h", 1000)], &probe()).expect("measurements");
        let [device] = facts[0].devices.as_slice() else { panic!("{facts:?}") };
        let near = |found: f64, expected: f64| (found - expected).abs() < 1e-9;
        assert!(near(device.call.one_ms, 1.0) && near(device.layer.one_ms, 2.0), "{device:?}");
        assert!(near(device.embedding.one_ms, 0.0) && near(device.head.one_ms, 5.0));
        assert!(near(device.layer.many_ms, 6.0) && near(device.kv_token_bytes, 2.0));
        assert!(near(device.layer.rested_ms, 4.0) && near(device.head.rested_ms, 10.0));
        assert!(near(device.memory_factor, 1.2) && near(facts[0].handoff_ms, 0.05));
        let mut strange = node("a", "h", 1000);
        strange.found.devices[0].stages[0].stage = 9;
        let error = nodes(&[strange], &probe()).expect_err("no such stage");
        assert!(error.to_string().contains("measured stage 9 of a probe with 4"), "{error}");
    }

    #[test]
    fn nodes_of_one_host_share_its_memory() {
        let all = [node("a", "h", 1000), node("b", "h", 300), node("c", "i", 700)];
        let facts = nodes(&all, &probe()).expect("measurements");
        let memory: Vec<u64> = facts.iter().map(|node| node.memory_bytes).collect();
        assert_eq!(memory, [500, 300, 700]);
    }
}
