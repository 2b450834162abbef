//! Questions for tests.

use crate::facts::{DeviceCosts, LinkTimes, ModelFacts, NodeFacts, Question, RowCost, Wish};

/// Bytes of a layer of the model.
pub(crate) const LAYER_BYTES: u64 = 1 << 30;

/// Equal nodes with room for everything, links of 1 ms, a call of 0.5 ms and 0.1 ms after a rest,
/// layers of 1 ms, a head of 2 ms; many rows take twice as long as one.
pub(crate) fn question(n_nodes: usize, n_layers: usize) -> Question {
    let cost = |ms: f64| RowCost { one_ms: ms, many_ms: 2.0 * ms, rested_ms: ms };
    let device = DeviceCosts {
        device: "CPU".to_owned(),
        call: RowCost { rested_ms: 0.6, ..cost(0.5) },
        layer: cost(1.0),
        embedding: cost(0.0),
        head: cost(2.0),
        kv_token_bytes: 1024.0,
        memory_factor: 1.0,
    };
    let node = |index: usize| NodeFacts {
        name: format!("n{index}"),
        memory_bytes: 1 << 50,
        handoff_ms: 0.1,
        devices: vec![device.clone()],
    };
    let ways = vec![vec![1.0; n_nodes]; n_nodes];
    Question {
        model: ModelFacts {
            layer_bytes: vec![LAYER_BYTES; n_layers],
            embedding_bytes: LAYER_BYTES / 2,
            head_bytes: LAYER_BYTES / 2,
        },
        nodes: (0..n_nodes).map(node).collect(),
        links: LinkTimes { hidden_ms: ways.clone(), token_ms: ways },
        wish: Wish { sessions: 1, context: 1024, stages: None },
    }
}
