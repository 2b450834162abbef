//! What the layers of a graph and its stages weigh.

use std::collections::HashSet;

use super::cut::Stage;
use super::layers::{Layers, constants, sources};
use super::net::{Net, Node, Place};
use crate::ir::element::ElementType;
use crate::split::{Costs, Part};

/// Bytes of the constants of a stage.
pub(super) fn bytes_of(net: &Net, stage: &Stage) -> u64 {
    let nodes = stage.order.iter().map(|index| &net.nodes[*index]);
    let places: HashSet<Place> = nodes.flat_map(|node| node.places()).collect();
    places.iter().map(|place| place.bytes).sum()
}

/// What the layers and the head cost: the constants that their operations are made from.
pub(super) fn costs(net: &Net, layers: &Layers) -> Costs {
    let is_constant = constants(net);
    let nothing = Part { n_bytes: 0, n_weights: 0 };
    let mut parts = vec![nothing; layers.len() + 1];
    let mut counted: HashSet<(Place, usize)> = HashSet::new();
    for index in 0..net.nodes.len() {
        let Some(level) = layers.level(index) else { continue };
        let mut stack = vec![index];
        while let Some(index) = stack.pop() {
            let node = &net.nodes[index];
            // Of a table in which tokens are looked up, one row is read per token.
            let n_free = usize::from(node.is("Gather") && layers.level(index).is_some());
            let inputs = sources(node).iter().skip(n_free).map(|input| input.node);
            stack.extend(inputs.filter(|input| is_constant[*input]));
            for place in node.places() {
                if counted.insert((place, level)) {
                    parts[level].n_bytes += place.bytes;
                    parts[level].n_weights += n_elements(node, place);
                }
            }
        }
    }
    let head = parts.pop().unwrap_or(nothing);
    Costs::new(&parts, head)
}

/// Elements of a constant; those in bodies of loops are taken for bytes.
fn n_elements(node: &Node, place: Place) -> u64 {
    let element = node.attribute("element_type").and_then(ElementType::from_attribute);
    element.map_or(place.bytes, |element| place.bytes * 8 / element.bits())
}
