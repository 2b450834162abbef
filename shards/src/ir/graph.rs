//! A graph under construction: nodes in creation order, constants already in the weight file.

use std::borrow::Cow;
use std::io;

use super::bin::{BinWriter, Span};
use super::element::ElementType;

/// One output of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(super) node: usize,
    pub(super) output: usize,
    pub(super) element: ElementType,
}

impl Value {
    /// Its element type.
    pub(crate) fn element(self) -> ElementType {
        self.element
    }
}

/// A dimension of a parameter or state: fixed, or known only at run time.
pub(crate) type Dim = Option<u64>;

#[derive(Debug)]
pub(super) struct Node {
    pub(super) kind: Cow<'static, str>,
    pub(super) opset: Cow<'static, str>,
    pub(super) name: String,
    pub(super) attributes: Vec<(Cow<'static, str>, String)>,
    pub(super) inputs: Vec<Value>,
    pub(super) outputs: Vec<ElementType>,
    /// Tensor name of output 0, which is how callers find inputs and outputs.
    pub(super) tensor_name: Option<String>,
    /// Dimensions of output 0, written for people and for graph viewers where known.
    pub(super) dims: Vec<Dim>,
    /// Further XML of the layer: runtime information, and the bodies of loops.
    pub(super) extra: String,
}

/// A node of another graph, to be taken over as it is.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) kind: String,
    pub(crate) opset: String,
    pub(crate) name: String,
    pub(crate) attributes: Vec<(String, String)>,
    pub(crate) inputs: Vec<Value>,
    pub(crate) outputs: Vec<ElementType>,
    /// Further XML of the layer.
    pub(crate) extra: String,
}

/// What an operation is, before its inputs are known.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) kind: &'static str,
    pub(super) opset: &'static str,
    pub(super) attributes: Vec<(&'static str, String)>,
}

/// A graph and its weight file.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(crate) bin: BinWriter,
    /// XML behind the edges: what is to be known of the model as a whole.
    pub(crate) model_info: String,
    scope: String,
}

impl Graph {
    pub(crate) fn new(bin: BinWriter) -> Self {
        Self { nodes: Vec::new(), bin, model_info: String::new(), scope: String::new() }
    }

    /// Sets the prefix of the names of the nodes to come, for example `layers.3.attention`.
    pub(crate) fn scope(&mut self, scope: impl Into<String>) {
        self.scope = scope.into();
    }

    /// Adds a node with one output.
    pub(super) fn add(
        &mut self,
        operation: Operation,
        inputs: &[Value],
        element: ElementType,
    ) -> Value {
        let node = self.push(operation, inputs, vec![element]);
        Value { node, output: 0, element }
    }

    /// Adds a node with any number of outputs; returns its index.
    pub(super) fn push(
        &mut self,
        operation: Operation,
        inputs: &[Value],
        outputs: Vec<ElementType>,
    ) -> usize {
        let index = self.nodes.len();
        let Operation { kind, opset, attributes } = operation;
        let name = if self.scope.is_empty() {
            format!("{kind}_{index}")
        } else {
            format!("{}.{kind}_{index}", self.scope)
        };
        let attributes = attributes.into_iter().map(|(key, value)| (key.into(), value)).collect();
        self.nodes.push(Node {
            kind: kind.into(),
            opset: opset.into(),
            name,
            attributes,
            inputs: inputs.to_vec(),
            outputs,
            tensor_name: None,
            dims: Vec::new(),
            extra: String::new(),
        });
        index
    }

    /// Adds a node of another graph; returns its outputs.
    pub(crate) fn copy(&mut self, copied: Copied) -> Vec<Value> {
        let Copied { kind, opset, name, attributes, inputs, outputs, extra } = copied;
        let node = self.nodes.len();
        let values = outputs.iter().enumerate();
        let values = values.map(|(output, element)| Value { node, output, element: *element });
        let values = values.collect();
        let attributes = attributes.into_iter().map(|(key, value)| (key.into(), value)).collect();
        let (tensor_name, dims) = (None, Vec::new());
        let (kind, opset) = (kind.into(), opset.into());
        let node =
            Node { kind, opset, name, attributes, inputs, outputs, tensor_name, dims, extra };
        self.nodes.push(node);
        values
    }

    /// Changes an attribute of the node that makes a value.
    pub(crate) fn set_attribute(&mut self, value: Value, name: &str, text: String) {
        let attributes = &mut self.nodes[value.node].attributes;
        if let Some((_, old)) = attributes.iter_mut().find(|(key, _)| key == name) {
            *old = text;
        }
    }

    /// Adds a model input.
    pub(crate) fn parameter(&mut self, name: &str, element: ElementType, dims: &[Dim]) -> Value {
        let attributes =
            vec![("shape", shape_text(dims)), ("element_type", element.attribute().to_owned())];
        let operation = Operation { kind: "Parameter", opset: "opset1", attributes };
        let node = self.push(operation, &[], vec![element]);
        let entry = &mut self.nodes[node];
        name.clone_into(&mut entry.name);
        entry.tensor_name = Some(name.to_owned());
        entry.dims = dims.to_vec();
        Value { node, output: 0, element }
    }

    /// Makes a value a model output.
    pub(crate) fn result(&mut self, name: &str, value: Value) {
        let attributes = Vec::new();
        let operation = Operation { kind: "Result", opset: "opset1", attributes };
        let node = self.push(operation, &[value], Vec::new());
        name.clone_into(&mut self.nodes[node].name);
        self.nodes[value.node].tensor_name = Some(name.to_owned());
    }

    /// Adds a constant that is in the weight file already.
    pub(crate) fn constant_at(&mut self, element: ElementType, dims: &[u64], span: Span) -> Value {
        let dims: Vec<Dim> = dims.iter().map(|dim| Some(*dim)).collect();
        let attributes = vec![
            ("element_type", element.attribute().to_owned()),
            ("shape", shape_text(&dims)),
            ("offset", span.offset.to_string()),
            ("size", span.bytes.to_string()),
        ];
        let operation = Operation { kind: "Const", opset: "opset1", attributes };
        let node = self.push(operation, &[], vec![element]);
        self.nodes[node].dims = dims;
        Value { node, output: 0, element }
    }

    /// Adds an i64 vector constant.
    pub(crate) fn i64s(&mut self, values: &[i64]) -> io::Result<Value> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let span = self.bin.store(&bytes)?;
        Ok(self.constant_at(ElementType::I64, &[values.len() as u64], span))
    }

    /// Adds an i64 scalar constant.
    pub(crate) fn i64(&mut self, value: i64) -> io::Result<Value> {
        let span = self.bin.store(&value.to_le_bytes())?;
        Ok(self.constant_at(ElementType::I64, &[], span))
    }

    /// Adds an f32 constant of any shape.
    pub(crate) fn f32s(&mut self, dims: &[u64], values: &[f32]) -> io::Result<Value> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let span = self.bin.store(&bytes)?;
        Ok(self.constant_at(ElementType::F32, dims, span))
    }
}

/// A shape as attributes spell it: `1,?,64`.
pub(super) fn shape_text(dims: &[Dim]) -> String {
    let texts: Vec<String> =
        dims.iter().map(|dim| dim.map_or_else(|| "?".to_owned(), |dim| dim.to_string())).collect();
    texts.join(",")
}

#[cfg(test)]
mod evaluate;
