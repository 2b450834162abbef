//! What is known of model, machines and links, and what is wanted.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::MANY_ROWS;

/// Memory of a worker's process beside weights and KV cache, in bytes: the runtime, compiled code and
/// buffers. A worker of a small model has about 200 MiB.
pub(crate) const PROCESS_BYTES: u64 = 256 << 20;

/// What a part of a model costs on a device, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RowCost {
    /// For one row.
    pub one_ms: f64,
    /// For [`MANY_ROWS`] rows of as many sessions in one call.
    pub many_ms: f64,
    /// For one row, when the processor has rested before: its caches and its clock have to come back.
    pub rested_ms: f64,
}

impl RowCost {
    /// For any number of rows, on the line through the two that were measured. What a rest costs does
    /// not depend on the rows.
    #[must_use]
    pub fn at(self, duty: Duty) -> f64 {
        let per_row = (self.many_ms - self.one_ms) / (MANY_ROWS - 1) as f64;
        let first = if duty.rests { self.rested_ms } else { self.one_ms };
        first + per_row * duty.rows.saturating_sub(1) as f64
    }
}

/// What a stage has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duty {
    /// Rows of a pass, each of a session of its own.
    pub rows: usize,
    /// Whether it waits for other stages between its passes.
    pub rests: bool,
}

impl Duty {
    /// For the token of a session that is alone on so many stages.
    #[must_use]
    pub fn alone(n_stages: usize) -> Self {
        Self { rows: 1, rests: n_stages > 1 }
    }
}

/// A device of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceCosts {
    /// OpenVINO's name of it.
    pub device: String,
    /// A call of a stage, whatever is in it.
    pub call: RowCost,
    /// A layer.
    pub layer: RowCost,
    /// The embedding table.
    pub embedding: RowCost,
    /// The head: last norm and logits.
    pub head: RowCost,
    /// KV cache of a layer, in bytes per token.
    pub kv_token_bytes: f64,
    /// Memory that a loaded stage takes over the size of its files; at least 1.
    pub memory_factor: f64,
}

impl DeviceCosts {
    /// The time of a pass of a stage, in milliseconds.
    #[must_use]
    pub fn pass_ms(&self, layers: &Range<usize>, n_layers: usize, duty: Duty) -> f64 {
        let mut ms = self.call.at(duty) + self.layer.at(duty) * layers.len() as f64;
        if layers.start == 0 {
            ms += self.embedding.at(duty);
        }
        if layers.end == n_layers {
            ms += self.head.at(duty);
        }
        ms
    }
}

/// A machine that takes part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Its name, for people and files.
    pub name: String,
    /// Memory that a stage may take, in bytes.
    pub memory_bytes: u64,
    /// From the task that hears a message to the inference thread and back, in milliseconds.
    pub handoff_ms: f64,
    /// Devices that run the model.
    pub devices: Vec<DeviceCosts>,
}

/// A model, as far as it matters where it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Bytes of each layer.
    pub layer_bytes: Vec<u64>,
    /// Bytes of the embedding table.
    pub embedding_bytes: u64,
    /// Bytes of the head.
    pub head_bytes: u64,
}

impl ModelFacts {
    /// Number of layers.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.layer_bytes.len()
    }

    /// Bytes of the files of a stage.
    #[must_use]
    pub fn stage_bytes(&self, layers: &Range<usize>) -> u64 {
        let mut bytes: u64 = self.layer_bytes[layers.clone()].iter().sum();
        if layers.start == 0 {
            bytes += self.embedding_bytes;
        }
        if layers.end == self.n_layers() {
            bytes += self.head_bytes;
        }
        bytes
    }
}

/// One way between every two nodes through the broker, in milliseconds, by index of sender and
/// receiver. What stands for a node and itself is not looked at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkTimes {
    /// For the hidden state of one row.
    pub hidden_ms: Vec<Vec<f64>>,
    /// For a chosen token.
    pub token_ms: Vec<Vec<f64>>,
}

/// What the plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// Sessions at the same time.
    pub sessions: usize,
    /// Tokens that each of them may reach.
    pub context: usize,
    /// Number of stages, if it is given.
    pub stages: Option<usize>,
}

/// Everything that a plan follows from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// The model.
    pub model: ModelFacts,
    /// The machines.
    pub nodes: Vec<NodeFacts>,
    /// The ways between them.
    pub links: LinkTimes,
    /// What it is for.
    pub wish: Wish,
}

impl Question {
    /// Memory that a stage takes on a device, in bytes.
    #[must_use]
    pub(crate) fn memory_bytes(&self, device: &DeviceCosts, layers: &Range<usize>) -> u64 {
        let weights = self.model.stage_bytes(layers) as f64 * device.memory_factor.max(1.0);
        let tokens = self.wish.context as f64 * self.wish.sessions as f64;
        let cache = tokens * device.kv_token_bytes * layers.len() as f64;
        (weights + cache) as u64 + PROCESS_BYTES
    }

    /// KV cache of a stage on a device for all sessions, in bytes.
    pub(crate) fn kv_bytes(&self, device: &DeviceCosts, layers: &Range<usize>) -> u64 {
        let tokens = self.wish.context as f64 * self.wish.sessions as f64;
        (tokens * device.kv_token_bytes * layers.len() as f64).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_cost_what_the_line_says() {
        let cost = RowCost { one_ms: 2.0, many_ms: 9.0, rested_ms: 2.5 };
        let at = |rests| [0, 1, 2, 8, 15].map(|rows| cost.at(Duty { rows, rests })).to_vec();
        assert_eq!(at(false), [2.0, 2.0, 3.0, 9.0, 16.0]);
        assert_eq!(at(true), [2.5, 2.5, 3.5, 9.5, 16.5]);
    }

    #[test]
    fn ends_of_the_model_are_counted_where_they_are() {
        let model = ModelFacts { layer_bytes: vec![10, 20, 30], embedding_bytes: 5, head_bytes: 7 };
        let bytes = [0..1, 1..2, 2..3, 0..3].map(|layers| model.stage_bytes(&layers));
        assert_eq!(bytes, [15, 20, 37, 72]);
        let cost = |ms| RowCost { one_ms: ms, many_ms: ms, rested_ms: 2.0 * ms };
        let device = DeviceCosts {
            device: "CPU".to_owned(),
            call: cost(0.5),
            layer: cost(1.0),
            embedding: cost(0.25),
            head: cost(4.0),
            kv_token_bytes: 1.0,
            memory_factor: 1.0,
        };
        let ms = |n_stages| {
            let duty = Duty::alone(n_stages);
            [0..1, 1..2, 1..3, 0..3].map(|layers| device.pass_ms(&layers, 3, duty)).to_vec()
        };
        assert_eq!(ms(1), [1.75, 1.5, 6.5, 7.75]);
        assert_eq!(ms(2), [3.5, 3.0, 13.0, 15.5], "each waits for the other one");
    }
}
