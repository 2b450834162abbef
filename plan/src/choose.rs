//! The choice between the best layouts of every number of stages.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, mib};
use crate::facts::{PROCESS_BYTES, Question};
use crate::layout::Layout;
use crate::search::Search;

/// How much better a layout must be than one with fewer machines, which has less to fail and to look
/// after, and whose prediction may be off by some per cent.
const MARGIN: f64 = 1.05;

/// What was chosen, and what the choice was between.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Index of the chosen layout.
    pub chosen: usize,
    /// The best layout of every number of stages that fits, fewest first.
    pub layouts: Vec<Layout>,
    /// Why.
    pub reason: Reason,
}

/// Why a layout was chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Reason {
    /// The number of stages was given.
    Asked,
    /// Fewer nodes have no room for the model.
    Room {
        /// Bytes that the model needs on one node, with its KV cache.
        needed: u64,
        /// Bytes of the node with most room.
        most: u64,
    },
    /// There is one node.
    Alone,
    /// More nodes would be slower, or not enough faster to be worth it.
    FewestAreFast {
        /// Tokens per second of the chosen layout.
        tok_s: f64,
        /// The best that more nodes would do.
        more_tok_s: f64,
    },
    /// More nodes are faster.
    MoreAreFaster {
        /// Tokens per second of the chosen layout.
        tok_s: f64,
        /// The best that fewer nodes would do.
        fewer_tok_s: f64,
    },
}

impl Plan {
    /// The chosen layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layouts[self.chosen]
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked => f.write_str("as many stages as asked for"),
            Self::Room { needed, most } => write!(
                f,
                "fewer nodes have no room: the model needs {} on one, the largest has {}",
                mib(*needed),
                mib(*most)
            ),
            Self::Alone => f.write_str("there is one node, and the model fits it"),
            Self::FewestAreFast { tok_s, more_tok_s } if more_tok_s < tok_s => write!(
                f,
                "more nodes would be slower: {more_tok_s:.1} tokens a second instead of {tok_s:.1}"
            ),
            Self::FewestAreFast { tok_s, more_tok_s } => write!(
                f,
                "more nodes would hardly be faster: {more_tok_s:.1} tokens a second instead of \
                 {tok_s:.1}"
            ),
            Self::MoreAreFaster { tok_s, fewer_tok_s } => write!(
                f,
                "fewer nodes would be slower: {fewer_tok_s:.1} tokens a second instead of \
                 {tok_s:.1}"
            ),
        }
    }
}

/// Plans how a model runs.
///
/// # Errors
/// [`PlanError`] if it fits nowhere.
pub fn plan(question: &Question) -> Result<Plan, PlanError> {
    let nodes = question.nodes.iter().filter(|node| !node.devices.is_empty());
    if nodes.count() == 0 {
        return Err(PlanError::NoNodes);
    }
    let most_stages = question.nodes.len().min(question.model.n_layers());
    let counts = match question.wish.stages {
        Some(asked) => asked..=asked,
        None => 1..=most_stages,
    };
    let layouts: Vec<Layout> =
        counts.filter_map(|n_stages| Search::new(question, n_stages).best()).collect();
    let Some(fewest) = layouts.first() else { return Err(refusal(question)) };
    if question.wish.stages.is_some() {
        return Ok(Plan { chosen: 0, layouts, reason: Reason::Asked });
    }
    let needs_several = fewest.stages.len() > 1;
    let mut chosen = 0;
    for (index, layout) in layouts.iter().enumerate() {
        if layout.tok_s > layouts[chosen].tok_s * MARGIN {
            chosen = index;
        }
    }
    let tok_s = layouts[chosen].tok_s;
    let best_of = |layouts: &[Layout]| layouts.iter().map(|layout| layout.tok_s).reduce(f64::max);
    let reason = match (best_of(&layouts[..chosen]), best_of(&layouts[chosen + 1..])) {
        (Some(fewer_tok_s), _) => Reason::MoreAreFaster { tok_s, fewer_tok_s },
        (None, _) if needs_several => {
            Reason::Room { needed: whole(question).0, most: most_room(question) }
        }
        (None, Some(more_tok_s)) => Reason::FewestAreFast { tok_s, more_tok_s },
        (None, None) => Reason::Alone,
    };
    Ok(Plan { chosen, layouts, reason })
}

/// Bytes that the model needs, on the device that needs least, and those of its largest part.
fn whole(question: &Question) -> (u64, u64) {
    let n_layers = question.model.n_layers();
    let devices = || question.nodes.iter().flat_map(|node| &node.devices);
    let least = |layers: std::ops::Range<usize>| {
        devices().map(|device| question.memory_bytes(device, &layers)).min().unwrap_or(0)
    };
    let part = (0..n_layers).map(|layer| least(layer..layer + 1)).max().unwrap_or(0);
    (least(0..n_layers), part)
}

fn most_room(question: &Question) -> u64 {
    question.nodes.iter().map(|node| node.memory_bytes).max().unwrap_or(0)
}

/// Why no layout fits.
fn refusal(question: &Question) -> PlanError {
    let (n_nodes, n_layers) = (question.nodes.len(), question.model.n_layers());
    if let Some(asked) = question.wish.stages {
        let no_room = (1..=n_nodes.min(n_layers)).contains(&asked);
        return PlanError::Stages { asked, n_nodes, n_layers, no_room };
    }
    let (needed, largest_part) = whole(question);
    let needed = needed.saturating_sub(PROCESS_BYTES);
    let room = question.nodes.iter().map(|node| node.memory_bytes.saturating_sub(PROCESS_BYTES));
    let room: u64 = room.sum();
    if room < needed {
        PlanError::TooLarge { needed, room, n_nodes }
    } else {
        PlanError::NoCut { needed, room, largest_part, n_nodes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LAYER_BYTES, question};

    fn room_for(question: &mut Question, layers: &[u64]) {
        for (node, layers) in question.nodes.iter_mut().zip(layers) {
            // Beside the layers half of one for an end, a quarter for the process, and KV cache.
            node.memory_bytes = (layers + 1) * LAYER_BYTES;
        }
    }

    #[test]
    fn one_node_is_preferred_when_the_model_fits() {
        let plan = plan(&question(3, 10)).expect("it fits");
        assert_eq!(plan.layout().stages.len(), 1);
        assert_eq!(plan.layouts.len(), 3, "the others are shown");
        assert!(matches!(plan.reason, Reason::FewestAreFast { tok_s, more_tok_s }
            if more_tok_s < tok_s));
        let text = plan.reason.to_string();
        assert!(text.starts_with("more nodes would be slower"), "{text}");
        let plan = super::plan(&question(1, 10)).expect("it fits");
        assert_eq!(plan.reason, Reason::Alone);
    }

    #[test]
    fn many_sessions_may_want_more_nodes() {
        let mut many = question(2, 10);
        many.wish.sessions = 16;
        let plan = plan(&many).expect("it fits");
        assert_eq!(plan.layout().stages.len(), 2, "{plan:?}");
        assert!(matches!(plan.reason, Reason::MoreAreFaster { .. }));
        let split = plan.layout().split();
        assert_eq!(split, [6, 4], "the head takes the time of two layers");
    }

    #[test]
    fn memory_decides_how_many_nodes_and_how_many_layers() {
        let mut small = question(3, 10);
        room_for(&mut small, &[4, 7, 2]);
        let plan = plan(&small).expect("it fits");
        assert_eq!(plan.layout().stages.len(), 2, "{plan:?}");
        assert!(matches!(plan.reason, Reason::Room { .. }), "{:?}", plan.reason);
        let mut nodes: Vec<usize> = plan.layout().stages.iter().map(|stage| stage.node).collect();
        nodes.sort_unstable();
        assert_eq!(nodes, [0, 1], "no other two hold it");
    }

    #[test]
    fn a_quicker_node_is_worth_a_hop_only_if_it_is_quick_enough() {
        let mut mixed = question(2, 10);
        let layer = &mut mixed.nodes[0].devices[0].layer;
        (layer.one_ms, layer.rested_ms) = (10.0, 10.0);
        let plan = plan(&mixed).expect("it fits");
        assert_eq!(plan.layout().stages.len(), 1);
        assert_eq!(plan.layout().stages[0].node, 1, "the quick one alone");
        room_for(&mut mixed, &[100, 5]);
        let plan = super::plan(&mixed).expect("it fits");
        assert!(matches!(plan.reason, Reason::MoreAreFaster { .. }), "{plan:?}");
        let quick = plan.layout().stages.iter().find(|stage| stage.node == 1);
        assert_eq!(quick.map(|stage| stage.layers.len()), Some(5), "as many as it has room for");
    }

    #[test]
    fn what_fits_nowhere_says_by_how_much() {
        let mut small = question(2, 10);
        room_for(&mut small, &[2, 3]);
        let error = plan(&small).expect_err("too large");
        let PlanError::TooLarge { needed, room, n_nodes: 2 } = error else {
            panic!("{error:?}");
        };
        assert!(needed > room && needed > 10 * LAYER_BYTES);
        assert!(error.to_string().contains("are missing"), "{error}");
        let mut crumbs = question(12, 10);
        room_for(&mut crumbs, &[1; 12]);
        crumbs.model.head_bytes = 2 * LAYER_BYTES;
        let error = plan(&crumbs).expect_err("the head fits nowhere");
        assert!(matches!(error, PlanError::NoCut { .. }), "{error:?}");
        let mut none = question(1, 10);
        none.nodes[0].devices.clear();
        assert_eq!(plan(&none), Err(PlanError::NoNodes));
    }

    #[test]
    fn a_number_of_stages_is_taken_or_refused() {
        let mut asked = question(3, 10);
        asked.wish.stages = Some(2);
        let plan = plan(&asked).expect("it fits");
        assert_eq!((plan.layout().stages.len(), plan.reason), (2, Reason::Asked));
        asked.wish.stages = Some(4);
        let error = super::plan(&asked).expect_err("more than nodes");
        assert!(matches!(error, PlanError::Stages { asked: 4, no_room: false, .. }), "{error:?}");
        asked.wish.stages = Some(2);
        room_for(&mut asked, &[1, 1, 1]);
        let error = super::plan(&asked).expect_err("no room");
        assert!(error.to_string().contains("no cut into so many"), "{error}");
    }
}
