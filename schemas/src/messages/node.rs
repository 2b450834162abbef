//! Questions to a machine that may take part in a plan, and its answers.
//!
//! Measuring takes seconds to minutes, so it is begun by one question and its result asked for by
//! others: whoever asks hears at once when the node is gone.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::error::ErrorReply;
use crate::ids::{ModelName, NodeId};
use crate::messages::forward::{MAX_STAGES, MAX_TEXT_BYTES};
use crate::tensor::bytes_field;
use crate::version::MessageVersion;

/// Largest payload of an echo, in bytes: the hidden state of a row, with much to spare.
pub const MAX_ECHO_BYTES: usize = 1 << 20;

/// Most echoes of one question.
pub const MAX_ECHOES: usize = 1000;

/// Most devices of a node.
pub const MAX_DEVICES: usize = 64;

/// Most layers of a stage of a probe.
const MAX_LAYERS: usize = 1 << 16;

/// A question to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeQuestion {
    /// Version of this message.
    pub version: MessageVersion,
    /// What is asked.
    pub query: NodeQuery,
}

/// What is asked of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NodeQuery {
    /// Tell what you are.
    Describe,
    /// Begin to measure a model; what an earlier question has measured is forgotten.
    Measure(Probe),
    /// Tell how far that is, or what it found.
    Measured,
    /// Send echoes to another node and tell how long they take.
    Ways(Ways),
    /// Answer at once.
    Echo(Echo),
}

/// The model to measure, cut so that the costs of its parts can be told apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Name of the model.
    pub model: ModelName,
    /// Fingerprint of the shard set of the probe.
    pub fingerprint: String,
    /// Layers of each of its stages.
    pub split: Vec<u32>,
    /// How weights are mapped, in the sharder's words.
    pub weights: String,
    /// What becomes of weights that are stored in floats, in the sharder's words; what suits the
    /// model when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floats: Option<String>,
    /// Rows of the larger micro-batch, one session each; the smaller one has one row.
    pub many_rows: u32,
}

/// Echoes from one node to another through the broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ways {
    /// The other node.
    pub to: NodeId,
    /// Bytes that go there.
    pub bytes: u32,
    /// Bytes that come back.
    pub back_bytes: u32,
    /// How many, one after the other.
    pub count: u32,
}

/// A payload, and how large the answer's payload is to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Echo {
    /// Any bytes.
    #[serde(with = "bytes_field")]
    pub payload: Bytes,
    /// Bytes of the answer.
    pub back_bytes: u32,
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeReply {
    /// Version of this message.
    pub version: MessageVersion,
    /// Who answers.
    pub node: NodeId,
    /// The answer.
    pub answer: NodeAnswer,
}

/// What a node answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NodeAnswer {
    /// What it is.
    Here(NodeDescription),
    /// Measuring has begun.
    Begun,
    /// Measuring goes on.
    Underway(ProbeProgress),
    /// What was measured.
    Measured(NodeMeasurement),
    /// Round trips of the echoes, in nanoseconds, in order.
    Ways(Vec<u64>),
    /// The payload of an echo.
    Echo(#[serde(with = "bytes_field")] Bytes),
    /// The question cannot be answered.
    Failed(ErrorReply),
}

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeDescription {
    /// Its name, for people and files.
    pub name: String,
    /// Name of the host; nodes with the same one share its memory.
    pub host: String,
    /// Cores that the process may use.
    pub n_cores: u32,
    /// Memory of the machine, in bytes.
    pub memory_bytes: u64,
    /// Memory that a stage may take now, in bytes.
    pub free_bytes: u64,
    /// Devices that it measures, in OpenVINO's words.
    pub devices: Vec<String>,
    /// Engine, as its configuration names it.
    pub engine: String,
    /// Numerics profile.
    pub profile: String,
    /// Inference threads; 0 leaves the choice to the device.
    pub threads: u32,
    /// Whether it has a model file to cut; one that has none pulls the probe from the broker.
    pub has_model: bool,
}

/// How far measuring is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeProgress {
    /// Steps done.
    pub done: u32,
    /// Steps in all; 0 while that is not known.
    pub total: u32,
}

/// What a node has measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeMeasurement {
    /// From the task that hears messages to an inference thread and back, in nanoseconds.
    pub handoff_ns: u64,
    /// Every device.
    pub devices: Vec<DeviceMeasurement>,
}

/// A device with a model on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceMeasurement {
    /// OpenVINO's name of it.
    pub device: String,
    /// Stages of the probe that were measured, as far as there was room for them.
    pub stages: Vec<StageMeasurement>,
    /// Memory that these stages took beyond that of the process, in bytes; 0 where the system does not
    /// tell.
    pub resident_bytes: u64,
    /// Bytes of the KV caches of these stages for [`Self::kv_tokens`] tokens.
    pub kv_bytes: u64,
    /// Tokens of the KV caches, counted once for each layer that holds them.
    pub kv_tokens: u64,
    /// Why the device does not run the model; there are no stages then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// A stage of the probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageMeasurement {
    /// Its place.
    pub stage: u32,
    /// Median time of a pass of one row, in nanoseconds.
    pub one_ns: u64,
    /// Median time of a pass of many rows, in nanoseconds.
    pub many_ns: u64,
    /// Median time of a pass of one row after a rest, in nanoseconds.
    pub rested_ns: u64,
}

impl Message for NodeQuestion {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        match &self.query {
            NodeQuery::Describe | NodeQuery::Measured => Ok(()),
            NodeQuery::Measure(probe) => {
                let floats = probe.floats.as_deref().unwrap_or_default();
                check_text("fingerprint", &probe.fingerprint)?;
                check_text("weights", &probe.weights)?;
                check_text("floats", floats)?;
                check_count("split", probe.split.len(), 1..=MAX_STAGES, "1 to 1024 stages")?;
                for &layers in &probe.split {
                    check_count("layers", layers as usize, 1..=MAX_LAYERS, "1 to 65536 layers")?;
                }
                check_count("many_rows", probe.many_rows as usize, 2..=256, "2 to 256 rows")
            }
            NodeQuery::Ways(ways) => {
                check_echo("bytes", ways.bytes as usize)?;
                check_echo("back_bytes", ways.back_bytes as usize)?;
                check_count("count", ways.count as usize, 1..=MAX_ECHOES, "1 to 1000 echoes")
            }
            NodeQuery::Echo(echo) => {
                check_echo("payload", echo.payload.len())?;
                check_echo("back_bytes", echo.back_bytes as usize)
            }
        }
    }
}

impl Message for NodeReply {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        match &self.answer {
            NodeAnswer::Here(node) => {
                for (field, text) in [
                    ("name", &node.name),
                    ("host", &node.host),
                    ("engine", &node.engine),
                    ("profile", &node.profile),
                ] {
                    check_text(field, text)?;
                }
                check_devices(node.devices.len())?;
                node.devices.iter().try_for_each(|device| check_text("device", device))
            }
            NodeAnswer::Begun | NodeAnswer::Underway(_) => Ok(()),
            NodeAnswer::Measured(measured) => {
                check_devices(measured.devices.len())?;
                for device in &measured.devices {
                    check_text("device", &device.device)?;
                    let n_stages = device.stages.len();
                    check_count("stages", n_stages, 0..=MAX_STAGES, "at most 1024 stages")?;
                    let failure = device.failure.as_ref().map_or(0, String::len);
                    check_count("failure", failure, 0..=4096, "at most 4096 bytes of text")?;
                }
                Ok(())
            }
            NodeAnswer::Ways(times) => {
                check_count("ways", times.len(), 1..=MAX_ECHOES, "1 to 1000 echoes")
            }
            NodeAnswer::Echo(payload) => check_echo("payload", payload.len()),
            NodeAnswer::Failed(error) => error.validate(),
        }
    }
}

fn check_text(field: &'static str, text: &str) -> Result<(), CodecError> {
    check_count(field, text.len(), 0..=MAX_TEXT_BYTES, "at most 256 bytes of text")
}

fn check_echo(field: &'static str, bytes: usize) -> Result<(), CodecError> {
    check_count(field, bytes, 0..=MAX_ECHO_BYTES, "at most a MiB")
}

fn check_devices(n_devices: usize) -> Result<(), CodecError> {
    check_count("devices", n_devices, 0..=MAX_DEVICES, "at most 64 devices")
}
