//! The graph of an IR: its operations in an order in which each comes after what it reads.

use std::collections::HashMap;

use super::element::Element;
use super::error::IrErrorKind;
use super::operations;
use crate::ir::element::ElementType;

/// One output of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Value {
    pub(super) node: usize,
    pub(super) output: usize,
}

/// An output port.
#[derive(Debug)]
pub(super) struct Port {
    id: String,
    pub(super) element: ElementType,
    /// Dimensions as the file declares them: fixed, or known only at run time.
    pub(super) dims: Vec<Option<u64>>,
    /// The names that callers use, for inputs and outputs of the model.
    pub(super) names: Vec<String>,
}

/// Where a constant lies in the weight file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Place {
    /// Where the constant with this data is.
    pub(super) fn of(data: &Element) -> Option<Self> {
        let number = |name| data.attribute(name)?.parse().ok();
        Some(Self { offset: number("offset")?, bytes: number("size")? })
    }

    /// Checks that the constant is within a weight file.
    ///
    /// # Errors
    /// [`IrErrorKind::ConstantRange`].
    fn check(self, name: &str, file_bytes: u64) -> Result<(), IrErrorKind> {
        let Self { offset, bytes } = self;
        if offset.checked_add(bytes).is_some_and(|end| end <= file_bytes) {
            return Ok(());
        }
        Err(IrErrorKind::ConstantRange { name: name.to_owned(), offset, bytes, file_bytes })
    }
}

/// An operation.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) opset: String,
    pub(super) attributes: Vec<(String, String)>,
    pub(super) inputs: Vec<Value>,
    pub(super) outputs: Vec<Port>,
    /// Runtime information, and the bodies of loops.
    pub(super) extra: Vec<Element>,
    /// Where the elements of a constant are.
    pub(super) place: Option<Place>,
    /// Where those of the constants in its bodies are.
    pub(super) body_places: Vec<Place>,
}

impl Node {
    pub(super) fn is(&self, kind: &str) -> bool {
        self.kind == kind
    }

    pub(super) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Where its constants are.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        self.place.iter().chain(&self.body_places).copied()
    }

    /// Whether a caller knows the operation's first output by this name.
    pub(super) fn is_named(&self, name: &str) -> bool {
        self.name == name || self.outputs.iter().any(|port| port.names.iter().any(|n| n == name))
    }
}

/// A graph.
#[derive(Debug)]
pub(super) struct Net {
    pub(super) nodes: Vec<Node>,
    /// What is to be known of the model as a whole.
    pub(super) info: Vec<Element>,
}

impl Net {
    /// Reads the graph of a document.
    ///
    /// # Errors
    /// [`IrErrorKind`]: the document is no IR, has an unknown operation, or an edge leads nowhere.
    pub(super) fn read(root: Element) -> Result<Self, IrErrorKind> {
        let version = root.attribute("version").unwrap_or_default();
        if root.tag != "net" || !["10", "11"].contains(&version) {
            return Err(IrErrorKind::Version { found: version.to_owned() });
        }
        let (mut layers, mut edges, mut info) = (Vec::new(), Vec::new(), Vec::new());
        for child in root.children {
            match child.tag.as_str() {
                "layers" => layers = child.children,
                "edges" => edges = child.children,
                "rt_info" => info.push(child),
                _ => {}
            }
        }
        let mut nodes = Vec::with_capacity(layers.len());
        let (mut ids, mut ports) = (HashMap::new(), Vec::with_capacity(layers.len()));
        for layer in layers {
            let id = required(&layer, "id")?.to_owned();
            let input_ids = input_ports(&layer)?;
            let node = read_node(layer)?;
            if ids.insert(id, nodes.len()).is_some() {
                return Err(malformed(&node.name, "has the id of another layer"));
            }
            ports.push(input_ids);
            nodes.push(node);
        }
        connect(&mut nodes, &ids, &ports, &edges)?;
        nodes.iter().try_for_each(check_ports)?;
        nodes.iter_mut().for_each(convert_plainly);
        Ok(Self { nodes: sorted(nodes)?, info })
    }

    /// Checks that all constants are within the weight file, and finds those in bodies of loops.
    ///
    /// # Errors
    /// [`IrErrorKind::ConstantRange`].
    pub(super) fn check_places(&mut self, file_bytes: u64) -> Result<(), IrErrorKind> {
        for node in &mut self.nodes {
            if let Some(place) = node.place {
                place.check(&node.name, file_bytes)?;
            }
            let (name, body_places) = (&node.name, &mut node.body_places);
            for element in &mut node.extra {
                element.visit_constants(&mut |data| match Place::of(data) {
                    Some(place) => {
                        body_places.push(place);
                        place.check(name, file_bytes)
                    }
                    None => Err(malformed(name, "has a constant without offset and size in it")),
                })?;
            }
        }
        Ok(())
    }

    pub(super) fn port(&self, value: Value) -> &Port {
        &self.nodes[value.node].outputs[value.output]
    }

    /// The name of the operation that makes a value.
    pub(super) fn name(&self, value: Value) -> &str {
        &self.nodes[value.node].name
    }
}

fn malformed(place: &str, problem: &'static str) -> IrErrorKind {
    IrErrorKind::Malformed { place: format!("{place:?}"), problem }
}

fn required<'a>(element: &'a Element, name: &str) -> Result<&'a str, IrErrorKind> {
    let name_of = element.attribute("name").unwrap_or(&element.tag);
    let missing = || IrErrorKind::Malformed {
        place: format!("<{}> {name_of:?}", element.tag),
        problem: "lacks an attribute that every one has",
    };
    element.attribute(name).ok_or_else(missing)
}

/// Ids of the input ports, in order.
fn input_ports(layer: &Element) -> Result<Vec<String>, IrErrorKind> {
    let ports = layer.child("input").into_iter().flat_map(|input| &input.children);
    ports.map(|port| Ok(required(port, "id")?.to_owned())).collect()
}

fn read_node(layer: Element) -> Result<Node, IrErrorKind> {
    let name = required(&layer, "name")?.to_owned();
    let kind = required(&layer, "type")?.to_owned();
    let opset = required(&layer, "version")?.to_owned();
    if !operations::is_known(&kind, &opset) {
        return Err(IrErrorKind::UnknownOperation { name, kind, opset });
    }
    let ports = layer.child("output").into_iter().flat_map(|output| &output.children);
    let outputs = ports.map(|port| read_port(port, &name)).collect::<Result<_, _>>()?;
    let (mut attributes, mut extra) = (Vec::new(), Vec::new());
    let (inputs, body_places) = (Vec::new(), Vec::new());
    for child in layer.children {
        match child.tag.as_str() {
            "data" => attributes = child.attributes,
            "input" | "output" => {}
            _ => extra.push(child),
        }
    }
    let mut node =
        Node { name, kind, opset, attributes, inputs, outputs, extra, place: None, body_places };
    if node.is("Const") {
        node.place = Some(constant_place(&node)?);
    }
    Ok(node)
}

fn read_port(port: &Element, layer: &str) -> Result<Port, IrErrorKind> {
    let precision = required(port, "precision")?;
    let Some(element) = ElementType::from_precision(precision) else {
        return Err(IrErrorKind::ElementType {
            name: layer.to_owned(),
            found: precision.to_owned(),
            expected: "a type of numbers",
        });
    };
    let dims = port.children_named("dim").map(|dim| match dim.text.as_str() {
        "-1" => Ok(None),
        text => match text.parse() {
            Ok(dim) => Ok(Some(dim)),
            Err(_) => Err(malformed(layer, "has a dimension that is no number")),
        },
    });
    let names = port.attribute("names").unwrap_or_default();
    Ok(Port {
        id: required(port, "id")?.to_owned(),
        element,
        dims: dims.collect::<Result<_, _>>()?,
        names: names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect(),
    })
}

/// Reads where a constant is and checks its length against its shape.
fn constant_place(node: &Node) -> Result<Place, IrErrorKind> {
    let number = |name: &str| -> Result<u64, IrErrorKind> {
        let value = node.attribute(name).and_then(|value| value.parse().ok());
        value.ok_or_else(|| malformed(&node.name, "is a constant without offset and size"))
    };
    let place = Place { offset: number("offset")?, bytes: number("size")? };
    let found = node.attribute("element_type").unwrap_or_default();
    let Some(element) = ElementType::from_attribute(found) else {
        let (name, found) = (node.name.clone(), found.to_owned());
        return Err(IrErrorKind::ElementType { name, found, expected: "a type of numbers" });
    };
    let shape = node.attribute("shape").unwrap_or_default();
    let dims = shape.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    let bits = dims
        .map(|dim| dim.parse::<u64>().ok())
        .try_fold(element.bits(), |bits, dim| dim.and_then(|dim| bits.checked_mul(dim)));
    let Some(bits) = bits else {
        return Err(malformed(&node.name, "is a constant whose shape is no list of numbers"));
    };
    let expected = bits.div_ceil(8);
    if place.bytes != expected {
        let (name, found) = (node.name.clone(), place.bytes);
        return Err(IrErrorKind::ConstantSize { name, expected, found });
    }
    Ok(place)
}

/// Fills in the inputs of all nodes.
fn connect(
    nodes: &mut [Node],
    ids: &HashMap<String, usize>,
    ports: &[Vec<String>],
    edges: &[Element],
) -> Result<(), IrErrorKind> {
    let mut inputs: Vec<Vec<Option<Value>>> =
        ports.iter().map(|ports| vec![None; ports.len()]).collect();
    for edge in edges {
        let end = |name| required(edge, name);
        let (from, from_port) = (end("from-layer")?, end("from-port")?);
        let (to, to_port) = (end("to-layer")?, end("to-port")?);
        let place = format!("edge from {from}:{from_port} to {to}:{to_port}");
        let nowhere = |problem| IrErrorKind::Malformed { place: place.clone(), problem };
        let (Some(&from), Some(&to)) = (ids.get(from), ids.get(to)) else {
            return Err(nowhere("ends at a layer that is not there"));
        };
        let output = nodes[from].outputs.iter().position(|port| port.id == from_port);
        let input = ports[to].iter().position(|port| port == to_port);
        let (Some(output), Some(input)) = (output, input) else {
            return Err(nowhere("ends at a port that is not there"));
        };
        if inputs[to][input].replace(Value { node: from, output }).is_some() {
            return Err(nowhere("is the second one to this port"));
        }
    }
    for (node, inputs) in nodes.iter_mut().zip(inputs) {
        let inputs: Option<Vec<Value>> = inputs.into_iter().collect();
        let Some(inputs) = inputs else { return Err(malformed(&node.name, "lacks an input")) };
        node.inputs = inputs;
    }
    Ok(())
}

/// Checks the number of ports of the operations that are looked into.
fn check_ports(node: &Node) -> Result<(), IrErrorKind> {
    let (least, outputs) = match node.kind.as_str() {
        "Const" | "Parameter" | "ReadValue" => (0, 1),
        "ShapeOf" => (1, 1),
        "Gather" | "Concat" | "ConvertLike" => (2, 1),
        "ScaledDotProductAttention" => (3, 1),
        _ => return Ok(()),
    };
    if node.inputs.len() >= least && node.outputs.len() == outputs {
        return Ok(());
    }
    Err(malformed(&node.name, "has not the ports of its type"))
}

/// A conversion to the type of another value is one to that type, and the value is not needed.
fn convert_plainly(node: &mut Node) {
    if node.is("ConvertLike") {
        let element = node.outputs[0].element.attribute();
        node.kind = "Convert".to_owned();
        node.opset = "opset1".to_owned();
        node.attributes = vec![("destination_type".to_owned(), element.to_owned())];
        node.inputs.truncate(1);
    }
}

/// Puts nodes behind what they read; those that are free to choose keep their order.
fn sorted(nodes: Vec<Node>) -> Result<Vec<Node>, IrErrorKind> {
    let n_nodes = nodes.len();
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); n_nodes];
    let mut n_missing: Vec<usize> = Vec::with_capacity(n_nodes);
    for (index, node) in nodes.iter().enumerate() {
        n_missing.push(node.inputs.len());
        node.inputs.iter().for_each(|input| readers[input.node].push(index));
    }
    let mut ready: std::collections::BTreeSet<usize> =
        (0..n_nodes).filter(|index| n_missing[*index] == 0).collect();
    let mut rank = vec![usize::MAX; n_nodes];
    let mut n_placed = 0;
    while let Some(index) = ready.pop_first() {
        rank[index] = n_placed;
        n_placed += 1;
        for &reader in &readers[index] {
            n_missing[reader] -= 1;
            if n_missing[reader] == 0 {
                ready.insert(reader);
            }
        }
    }
    if let Some(index) = rank.iter().position(|rank| *rank == usize::MAX) {
        return Err(malformed(&nodes[index].name, "reads what is made of it"));
    }
    let mut nodes: Vec<(usize, Node)> = rank.iter().copied().zip(nodes).collect();
    nodes.sort_by_key(|(rank, _)| *rank);
    let rename = |mut node: Node| {
        node.inputs.iter_mut().for_each(|input| input.node = rank[input.node]);
        node
    };
    Ok(nodes.into_iter().map(|(_, node)| rename(node)).collect())
}
