//! Finds the layers of a decoder in its graph.
//!
//! What a token says travels from `input_ids` to the logits. Of the ways from the attention of one
//! layer to the logits, every one passes the residual stream: the output of the attention is added
//! to it, and so is that of the feed-forward part. An operation on every such way is a
//! **dominator** of the logits, and the value in front of the next layer is the last dominator
//! that is also one of the next layer's queries. Keys and values are left out of the ways, since a
//! layer may read another layer's.
//!
//! Every operation that depends on tokens then belongs to the layer whose residual stream it
//! follows last. Shapes (`ShapeOf`) say nothing of tokens and belong to no layer: masks, rotary
//! tables and initial states are free to be computed again in every stage.

use std::collections::HashMap;

use super::error::IrErrorKind;
use super::net::{Net, Node, Value};
use super::shapes::{CacheAxes, from_front, integers};

/// The inputs of the model; positions may be counted in the graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs {
    pub(super) input_ids: Value,
    pub(super) attention_mask: Value,
    pub(super) position_ids: Option<Value>,
    pub(super) beam_idx: Value,
}

/// The cache of keys or values of one layer.
#[derive(Debug)]
pub(super) struct Cache {
    /// The `ReadValue`.
    pub(super) read: usize,
    /// The `Gather` behind it: what the cache holds before the step.
    pub(super) past: usize,
    /// The `Concat` behind that: with the rows of the step.
    pub(super) all: usize,
    /// What the `Concat` puts behind the past: the rows of the step.
    pub(super) rows: Value,
    /// The `Assign`.
    pub(super) assign: usize,
    pub(super) axes: CacheAxes,
}

/// The layers of a graph.
#[derive(Debug)]
pub(super) struct Layers {
    pub(super) inputs: Inputs,
    pub(super) caches: Vec<Cache>,
    /// The residual stream in front of each layer but the first.
    streams: Vec<Value>,
    /// The rows that the head takes, behind the last layer.
    pub(super) head: Value,
    pub(super) logits: Value,
    /// The layer of each operation that depends on tokens; the number of layers behind the last
    /// one.
    levels: Vec<Option<usize>>,
}

impl Layers {
    /// Finds the layers.
    ///
    /// # Errors
    /// [`IrErrorKind`] if the graph is none of a decoder with state.
    pub(super) fn find(net: &Net, weights: &[u8]) -> Result<Self, IrErrorKind> {
        let inputs = inputs(net)?;
        let logits = logits(net)?;
        let caches = caches(net, weights, inputs)?;
        let content = content(net, inputs);
        let (streams, spine) = streams(net, &content, logits)?;
        let head = head(net, &content, &spine)?;
        let levels = vec![None; net.nodes.len()];
        let mut layers = Self { inputs, caches, streams, head, logits, levels };
        layers.assign_levels(net, &content)?;
        layers.check_head(net)?;
        Ok(layers)
    }

    /// Number of layers.
    pub(super) fn len(&self) -> usize {
        self.streams.len() + 1
    }

    /// The residual stream in front of a layer; the first one has none.
    pub(super) fn stream(&self, layer: usize) -> Option<Value> {
        self.streams.get(layer.checked_sub(1)?).copied()
    }

    /// The layer of an operation that depends on tokens.
    pub(super) fn level(&self, node: usize) -> Option<usize> {
        self.levels[node]
    }

    /// Gives every operation its layer: first without the caches, whose layer is that of what
    /// they keep, then with them.
    fn assign_levels(&mut self, net: &Net, content: &[bool]) -> Result<(), IrErrorKind> {
        let mut owners = HashMap::new();
        self.levels = self.propagate(net, content, &owners);
        for cache in &self.caches {
            let level = self.levels[cache.all].filter(|level| *level < self.len());
            let Some(level) = level else {
                let variable = net.nodes[cache.read].attribute("variable_id");
                let variable = variable.unwrap_or_default().to_owned();
                return Err(IrErrorKind::State { variable, problem: "belongs to no layer" });
            };
            owners.insert(cache.read, level);
        }
        self.levels = self.propagate(net, content, &owners);
        Ok(())
    }

    fn propagate(
        &self,
        net: &Net,
        content: &[bool],
        owners: &HashMap<usize, usize>,
    ) -> Vec<Option<usize>> {
        let streams = (1..).zip(&self.streams).map(|(layer, stream)| (stream.node, layer));
        let mut starts: HashMap<usize, usize> = streams.collect();
        starts.insert(self.head.node, self.len());
        let mut levels: Vec<Option<usize>> = Vec::with_capacity(net.nodes.len());
        for (index, node) in net.nodes.iter().enumerate() {
            let inherited = sources(node).iter().filter_map(|input| levels[input.node]).max();
            let start = starts.get(&index).or_else(|| owners.get(&index)).copied();
            let level = start.or(inherited).unwrap_or_default();
            levels.push(content[index].then_some(level));
        }
        levels
    }

    /// Behind the head's rows every row must be treated like every other, whatever their number.
    fn check_head(&self, net: &Net) -> Result<(), IrErrorKind> {
        const BY_ROW: [&str; 8] =
            ["MatMul", "Add", "Subtract", "Multiply", "Divide", "Tanh", "Convert", "Result"];
        let is_constant = constants(net);
        let n_layers = self.len();
        for (index, node) in net.nodes.iter().enumerate() {
            if index == self.head.node || self.levels[index] != Some(n_layers) {
                continue;
            }
            let fits = |input: &Value| {
                is_constant[input.node] || self.levels[input.node] == Some(n_layers)
            };
            if !BY_ROW.contains(&node.kind.as_str()) || !node.inputs.iter().all(fits) {
                return Err(IrErrorKind::Head);
            }
        }
        Ok(())
    }

    /// What is read behind a cut in front of a layer and made before it, besides the residual
    /// stream: each value with the layer of one that reads it.
    pub(super) fn crossing(&self, net: &Net, layer: usize) -> Vec<(Value, usize)> {
        let stream = self.stream(layer);
        let mut found: Vec<(Value, usize)> = Vec::new();
        for (index, node) in net.nodes.iter().enumerate() {
            let Some(level) = self.levels[index].filter(|level| *level >= layer) else { continue };
            if stream.is_some_and(|stream| stream.node == index) || node.is("ReadValue") {
                continue;
            }
            for input in sources(node) {
                let crosses = self.levels[input.node].is_some_and(|found| found < layer);
                if crosses && !found.iter().any(|(value, _)| value == input) {
                    found.push((*input, level));
                }
            }
        }
        found
    }

    /// The cache that a value is, or is a rearrangement of.
    pub(super) fn cache_behind(&self, net: &Net, value: Value) -> Option<&Cache> {
        const REARRANGING: [&str; 6] =
            ["Unsqueeze", "Broadcast", "Reshape", "Transpose", "Convert", "Slice"];
        let mut node = value.node;
        loop {
            if let Some(cache) = self.caches.iter().find(|cache| cache.all == node) {
                return Some(cache);
            }
            let found = &net.nodes[node];
            if !REARRANGING.contains(&found.kind.as_str()) {
                return None;
            }
            node = found.inputs.first()?.node;
        }
    }
}

/// Finds and checks the inputs.
fn inputs(net: &Net) -> Result<Inputs, IrErrorKind> {
    let parameters: Vec<usize> =
        (0..net.nodes.len()).filter(|index| net.nodes[*index].is("Parameter")).collect();
    let names = [
        ("input_ids", "i64", 2),
        ("attention_mask", "i64", 2),
        ("position_ids", "i64", 2),
        ("beam_idx", "i32", 1),
    ];
    let mut found = HashMap::new();
    for index in parameters {
        let node = &net.nodes[index];
        let Some((name, expected, rank)) =
            names.iter().find(|(name, ..)| node.is_named(name)).copied()
        else {
            return Err(IrErrorKind::UnknownInput { name: node.name.clone() });
        };
        let element = node.attribute("element_type").unwrap_or_default();
        if element != expected {
            let (name, found) = (name.to_owned(), element.to_owned());
            return Err(IrErrorKind::ElementType { name, found, expected });
        }
        let dims = node.outputs.first().map_or(&[][..], |port| &port.dims);
        if dims.len() != rank || dims.iter().any(Option::is_some) {
            return Err(IrErrorKind::InputShape { name, expected: rank, found: dims.len() });
        }
        found.insert(name, Value { node: index, output: 0 });
    }
    let get = |name| found.get(name).copied().ok_or(IrErrorKind::MissingInput { name });
    Ok(Inputs {
        input_ids: get("input_ids")?,
        attention_mask: get("attention_mask")?,
        position_ids: found.get("position_ids").copied(),
        beam_idx: get("beam_idx")?,
    })
}

fn logits(net: &Net) -> Result<Value, IrErrorKind> {
    let results: Vec<&Node> = net.nodes.iter().filter(|node| node.is("Result")).collect();
    match results[..] {
        [result] if result.inputs.len() == 1 => Ok(result.inputs[0]),
        _ => Err(IrErrorKind::Outputs { found: results.len() }),
    }
}

/// Finds the caches and checks that each has the form that engines know.
fn caches(net: &Net, weights: &[u8], inputs: Inputs) -> Result<Vec<Cache>, IrErrorKind> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); net.nodes.len()];
    for (index, node) in net.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|input| readers[input.node].push(index));
    }
    let mut assigns = HashMap::new();
    for (index, node) in net.nodes.iter().enumerate().filter(|(_, node)| node.is("Assign")) {
        assigns.insert(node.attribute("variable_id").unwrap_or_default(), index);
    }
    let reads: Vec<usize> =
        (0..net.nodes.len()).filter(|index| net.nodes[*index].is("ReadValue")).collect();
    if reads.is_empty() {
        return Err(IrErrorKind::NoState);
    }
    let cache = |read: usize| {
        let variable = net.nodes[read].attribute("variable_id").unwrap_or_default();
        let failed = |problem| IrErrorKind::State { variable: variable.to_owned(), problem };
        let &assign = assigns.get(variable).ok_or_else(|| failed("is never kept"))?;
        let all = net.nodes[assign].inputs.first().map_or(assign, |value| value.node);
        let past = match readers[read][..] {
            [past] if net.nodes[past].is("Gather") => past,
            _ => return Err(failed("is not read by one Gather alone")),
        };
        let (gather, concat) = (&net.nodes[past], &net.nodes[all]);
        if gather.inputs[1] != inputs.beam_idx {
            return Err(failed("is not gathered by beam_idx"));
        }
        let grows = concat.is("Concat")
            && concat.inputs.len() == 2
            && concat.inputs[0] == Value { node: past, output: 0 };
        if !grows {
            return Err(failed("does not grow by rows behind those that it holds"));
        }
        let axes = cache_axes(net, weights, gather, concat);
        let axes = axes.ok_or_else(|| failed("has no axes of sequences and slots"))?;
        Ok(Cache { read, past, all, rows: concat.inputs[1], assign, axes })
    };
    reads.into_iter().map(cache).collect()
}

fn cache_axes(net: &Net, weights: &[u8], gather: &Node, concat: &Node) -> Option<CacheAxes> {
    let rank = gather.outputs.first()?.dims.len();
    let axis = &net.nodes[gather.inputs.get(2)?.node];
    let batch = from_front(integers(axis, weights)?.next()?, rank)?;
    let slots = from_front(concat.attribute("axis")?.parse().ok()?, rank)?;
    (batch != slots).then_some(CacheAxes { batch, slots })
}

/// The inputs that give an operation what its output says; a shape says nothing of tokens.
pub(super) fn sources(node: &Node) -> &[Value] {
    match node.kind.as_str() {
        "ShapeOf" | "ReadValue" => &[],
        _ => &node.inputs,
    }
}

/// Whether each operation depends on tokens, those of the step or those in the caches.
fn content(net: &Net, inputs: Inputs) -> Vec<bool> {
    let mut content: Vec<bool> = Vec::with_capacity(net.nodes.len());
    for (index, node) in net.nodes.iter().enumerate() {
        let is_root = index == inputs.input_ids.node || node.is("ReadValue");
        content.push(is_root || sources(node).iter().any(|input| content[input.node]));
    }
    content
}

/// Whether each operation depends on constants only.
pub(super) fn constants(net: &Net) -> Vec<bool> {
    let mut constant: Vec<bool> = Vec::with_capacity(net.nodes.len());
    for node in &net.nodes {
        let follows = !node.inputs.is_empty()
            && !node.is("ReadValue")
            && node.inputs.iter().all(|input| constant[input.node]);
        constant.push(node.is("Const") || follows);
    }
    constant
}

/// The tree of dominators of what an operation leads to.
#[derive(Debug)]
struct Dominators {
    /// The next dominator of each operation that is reached, and its depth in the tree.
    next: Vec<Option<(usize, usize)>>,
    root: usize,
}

impl Dominators {
    fn find(net: &Net, content: &[bool], root: usize) -> Self {
        let mut tree = Self { next: vec![None; net.nodes.len()], root };
        for (index, node) in net.nodes.iter().enumerate().skip(root + 1) {
            let ways = match node.kind.as_str() {
                "ScaledDotProductAttention" => &node.inputs[..1],
                _ => sources(node),
            };
            let reached = ways.iter().map(|input| input.node);
            let reached = reached.filter(|input| content[*input] && tree.reaches(*input));
            let common = reached.reduce(|a, b| tree.common(a, b));
            tree.next[index] = common.map(|common| (common, tree.depth(common) + 1));
        }
        tree
    }

    fn reaches(&self, node: usize) -> bool {
        node == self.root || self.next[node].is_some()
    }

    fn depth(&self, node: usize) -> usize {
        self.next[node].map_or(0, |(_, depth)| depth)
    }

    fn up(&self, node: usize) -> usize {
        self.next[node].map_or(self.root, |(next, _)| next)
    }

    /// The last dominator that two operations share.
    fn common(&self, mut a: usize, mut b: usize) -> usize {
        while a != b {
            if self.depth(a) >= self.depth(b) { a = self.up(a) } else { b = self.up(b) }
        }
        a
    }

    /// All dominators of an operation and itself, first to last; empty if it is not reached.
    fn of(&self, node: usize) -> Vec<usize> {
        let mut way = Vec::new();
        let mut at = Some(node).filter(|node| self.reaches(*node));
        while let Some(node) = at {
            way.push(node);
            at = self.next[node].map(|(next, _)| next);
        }
        way.reverse();
        way
    }
}

/// The residual stream in front of each layer but the first, and the dominators of the logits
/// behind the attention of the last one.
///
/// Attentions that do not follow each other belong to one layer.
fn streams(
    net: &Net,
    content: &[bool],
    logits: Value,
) -> Result<(Vec<Value>, Vec<usize>), IrErrorKind> {
    let is_attention = |index: &usize| {
        let node = &net.nodes[*index];
        node.is("ScaledDotProductAttention") && content[node.inputs[0].node]
    };
    let mut attentions = (0..net.nodes.len()).filter(is_attention);
    let first = attentions.next().ok_or(IrErrorKind::NoAttention)?;
    let mut tree = Dominators::find(net, content, first);
    let mut streams = Vec::new();
    for attention in attentions {
        let way = tree.of(attention);
        let Some((_, way)) = way.split_last() else { continue };
        let spine = tree.of(logits.node);
        let shared = way.iter().zip(&spine).take_while(|(a, b)| a == b).map(|(node, _)| *node);
        let stream = shared.filter(|node| net.nodes[*node].outputs.len() == 1).last();
        // The attention that they start from has one output.
        streams.extend(stream.map(|node| Value { node, output: 0 }));
        tree = Dominators::find(net, content, attention);
    }
    let last = tree.of(logits.node);
    if last.is_empty() { Err(IrErrorKind::NoAttention) } else { Ok((streams, last)) }
}

/// The rows that are multiplied to logits: what the last product behind all layers takes.
fn head(net: &Net, content: &[bool], spine: &[usize]) -> Result<Value, IrErrorKind> {
    let product = spine.iter().rev().find(|node| net.nodes[**node].is("MatMul"));
    let product = &net.nodes[*product.ok_or(IrErrorKind::Head)?];
    let rows: Vec<Value> =
        product.inputs.iter().copied().filter(|input| content[input.node]).collect();
    match rows[..] {
        [rows] if net.nodes[rows.node].outputs.len() == 1 => Ok(rows),
        _ => Err(IrErrorKind::Head),
    }
}
