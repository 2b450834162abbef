//! Why there is no plan.

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No node runs the model.
    #[error("no node runs the model: start `stagebus node` on every machine that may take part")]
    NoNodes,
    /// All machines together are too small.
    #[error(
        "the model needs {} with its KV cache, the {n_nodes} nodes have room for {}: {} are missing; \
         add a node, or ask for a shorter --context or fewer --sessions",
        mib(*needed), mib(*room), mib(needed.saturating_sub(*room))
    )]
    TooLarge {
        /// Bytes that the model needs with its KV cache.
        needed: u64,
        /// Bytes that all nodes have for it.
        room: u64,
        /// Nodes.
        n_nodes: usize,
    },
    /// The machines are large enough together, but no cut fits them.
    #[error(
        "no cut fits the {n_nodes} nodes, although they have {} for the {} that the model needs: a \
         stage is at least one layer, with the embedding table or the head {}",
        mib(*room), mib(*needed), mib(*largest_part)
    )]
    NoCut {
        /// Bytes that the model needs with its KV cache.
        needed: u64,
        /// Bytes that all nodes have for it.
        room: u64,
        /// Bytes of the largest part that cannot be cut.
        largest_part: u64,
        /// Nodes.
        n_nodes: usize,
    },
    /// So many stages cannot be placed.
    #[error(
        "{asked} stages cannot be placed: there are {n_nodes} nodes, each runs one stage, and the \
         model has {n_layers} layers{}",
        if *no_room { "; no cut into so many fits their memory" } else { "" }
    )]
    Stages {
        /// Stages asked for.
        asked: usize,
        /// Nodes.
        n_nodes: usize,
        /// Layers of the model.
        n_layers: usize,
        /// Whether the number fits nodes and layers, and only memory is missing.
        no_room: bool,
    },
}

/// Bytes for people.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}
