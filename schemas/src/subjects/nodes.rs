//! Subjects of machines that are measured for a plan. They belong to no model: which one a machine
//! will run is what the plan is about.

use crate::ids::NodeId;

/// What all of them start with.
pub(crate) const ROOT: &str = "stagebus.node.v1";

/// Asks all nodes to describe themselves.
pub const CALL: &str = "stagebus.node.v1.call";

/// Questions to any node; only to grant rights.
pub const ASK_ANY: &str = "stagebus.node.v1.*.ask";

/// Questions to one node.
#[must_use]
pub fn ask(node: &NodeId) -> String {
    format!("{ROOT}.{node}.ask")
}
