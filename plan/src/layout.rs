//! One way to spread a model, and what it is predicted to do.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::facts::{DeviceCosts, Duty, Question};

/// A stage on a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Placed {
    /// The node, by index.
    pub node: usize,
    /// Its device, by index.
    pub device: usize,
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// A pass of one row, in milliseconds.
    pub pass_ms: f64,
    /// Memory that it takes with the KV cache of all sessions, in bytes.
    pub memory_bytes: u64,
    /// KV cache of all sessions, in bytes.
    pub kv_bytes: u64,
}

/// What the time of a token of a lone session is made of, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenParts {
    /// Passes of all stages.
    pub passes_ms: f64,
    /// Messages between machines.
    pub links_ms: f64,
    /// From messages to inference threads and back, within the processes.
    pub handoffs_ms: f64,
}

impl TokenParts {
    /// All of it.
    #[must_use]
    pub fn token_ms(self) -> f64 {
        self.passes_ms + self.links_ms + self.handoffs_ms
    }
}

/// A way to spread the model. The coordinator is on the node of the first stage and hosts that stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Layout {
    /// The stages, in order.
    pub stages: Vec<Placed>,
    /// Predicted time per token of one session alone, without drafts, in milliseconds.
    pub token_ms: f64,
    /// What that is made of.
    pub parts: TokenParts,
    /// Predicted tokens per second of all sessions that were asked for, without drafts.
    pub tok_s: f64,
}

/// A stage before the layout is complete: node, device, layers.
pub(crate) type Spot = (usize, usize, Range<usize>);

impl Layout {
    /// Predicts what these stages do.
    pub(crate) fn of(question: &Question, spots: &[Spot]) -> Self {
        let device = |(node, device, _): &Spot| &question.nodes[*node].devices[*device];
        let n_layers = question.model.n_layers();
        let placed = |spot: &Spot| Placed {
            node: spot.0,
            device: spot.1,
            layers: spot.2.clone(),
            pass_ms: device(spot).pass_ms(&spot.2, n_layers, Duty::alone(spots.len())),
            memory_bytes: question.memory_bytes(device(spot), &spot.2),
            kv_bytes: question.kv_bytes(device(spot), &spot.2),
        };
        let nodes: Vec<usize> = spots.iter().map(|spot| spot.0).collect();
        let (n_batches, duty) = batches(question.wish.sessions, spots.len());
        let passes = |duty: Duty| {
            spots.iter().map(move |spot: &Spot| device(spot).pass_ms(&spot.2, n_layers, duty))
        };
        let alone = passes(Duty::alone(spots.len()));
        let parts = TokenParts { passes_ms: alone.sum(), ..between(question, &nodes) };
        let around = passes(duty).sum::<f64>() + parts.links_ms + parts.handoffs_ms;
        let slowest = passes(duty).fold(0.0, f64::max);
        let round = around.max(slowest * n_batches as f64);
        Self {
            stages: spots.iter().map(placed).collect(),
            token_ms: parts.token_ms(),
            parts,
            tok_s: question.wish.sessions as f64 * 1e3 / round,
        }
    }

    /// Layers of each stage.
    #[must_use]
    pub fn split(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| stage.layers.len()).collect()
    }
}

/// How many batches so many sessions make on so many stages, and what each stage has to do for one.
pub(crate) fn batches(sessions: usize, n_stages: usize) -> (usize, Duty) {
    let n_batches = sessions.min(n_stages).max(1);
    let rows = sessions.div_ceil(n_batches).max(1);
    (n_batches, Duty { rows, rests: n_batches < n_stages })
}

/// What a step needs between the passes of stages on these nodes.
pub(crate) fn between(question: &Question, nodes: &[usize]) -> TokenParts {
    let hidden = nodes.windows(2).map(|pair| question.links.hidden_ms[pair[0]][pair[1]]);
    let back = match nodes {
        [first, .., last] => question.links.token_ms[*last][*first],
        _ => 0.0,
    };
    let handoff = |node: usize| question.nodes[node].handoff_ms;
    // Once for each stage, and once between the coordinator and the stage that it hosts.
    let coordinator = nodes.first().map_or(0.0, |&first| handoff(first));
    TokenParts {
        passes_ms: 0.0,
        links_ms: hidden.sum::<f64>() + back,
        handoffs_ms: nodes.iter().map(|&node| handoff(node)).sum::<f64>() + coordinator,
    }
}

/// The quickest device of a node that has room for these layers, and the time of its pass.
pub(crate) fn device_for(
    question: &Question,
    node: usize,
    layers: &Range<usize>,
    duty: Duty,
) -> Option<(usize, f64)> {
    let facts = &question.nodes[node];
    let fits = |device: &&DeviceCosts| question.memory_bytes(device, layers) <= facts.memory_bytes;
    let pass = |device: &DeviceCosts| device.pass_ms(layers, question.model.n_layers(), duty);
    let devices = facts.devices.iter().enumerate();
    devices
        .filter(|(_, device)| fits(device))
        .map(|(index, device)| (index, pass(device)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::question;

    #[test]
    fn a_lone_session_pays_for_every_stage_and_every_way() {
        let mut question = question(2, 10);
        question.nodes[1].handoff_ms = 0.25;
        question.links.hidden_ms[0][1] = 7.0;
        question.links.token_ms[1][0] = 5.0;
        let layout = Layout::of(&question, &[(0, 0, 0..4), (1, 0, 4..10)]);
        // Calls of 0.5 and 0.1 after a rest, layers of 1, head of 2; handoffs of 0.1 twice on the
        // first node.
        assert!((layout.parts.passes_ms - (0.6 + 4.0 + 0.6 + 6.0 + 2.0)).abs() < 1e-9);
        assert!((layout.parts.links_ms - 12.0).abs() < 1e-9);
        assert!((layout.parts.handoffs_ms - 0.45).abs() < 1e-9, "{layout:?}");
        assert!((layout.token_ms - 25.65).abs() < 1e-9);
        assert!((layout.tok_s - 1e3 / 25.65).abs() < 1e-9);
        assert_eq!(layout.split(), [4, 6]);
    }

    #[test]
    fn many_sessions_go_as_fast_as_the_slowest_stage() {
        let mut question = question(2, 10);
        question.wish.sessions = 16;
        let layout = Layout::of(&question, &[(0, 0, 0..4), (1, 0, 4..10)]);
        // Two batches of eight rows; the second stage takes twice 8.5 ms for a round of both.
        let busy = |rows| Duty { rows, rests: false };
        let slowest = question.nodes[1].devices[0].pass_ms(&(4..10), 10, busy(8));
        assert!((layout.tok_s - 16.0 * 1e3 / (2.0 * slowest)).abs() < 1e-6, "{layout:?}");
        assert_eq!(batches(16, 2), (2, busy(8)));
        assert_eq!(batches(3, 2), (2, busy(2)));
        assert_eq!(batches(1, 1), (1, busy(1)));
        assert_eq!(batches(1, 3), (1, Duty::alone(3)), "stages wait for each other");
        assert_eq!(batches(2, 3), (2, Duty::alone(3)));
    }

    #[test]
    fn the_quickest_device_with_room_is_taken() {
        let mut question = question(1, 4);
        let quick = DeviceCosts {
            device: "GPU".to_owned(),
            memory_factor: 1e9,
            call: crate::RowCost::default(),
            ..question.nodes[0].devices[0].clone()
        };
        question.nodes[0].devices.push(quick);
        assert_eq!(device_for(&question, 0, &(0..4), Duty::alone(1)).map(|found| found.0), Some(0));
        question.nodes[0].devices[1].memory_factor = 1.0;
        assert_eq!(device_for(&question, 0, &(0..4), Duty::alone(1)).map(|found| found.0), Some(1));
        question.nodes[0].memory_bytes = 0;
        assert_eq!(device_for(&question, 0, &(0..4), Duty::alone(1)), None);
    }
}
