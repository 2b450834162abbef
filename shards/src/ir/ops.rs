//! The operations that stage graphs are made of, one function each.

use std::io;

use super::element::ElementType;
use super::graph::{Dim, Graph, Operation, Value, shape_text};

const NUMPY: (&str, &str) = ("auto_broadcast", "numpy");

fn operation(
    kind: &'static str,
    opset: &'static str,
    attributes: &[(&'static str, &str)],
) -> Operation {
    let attributes = attributes.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
    Operation { kind, opset, attributes }
}

impl Graph {
    fn eltwise(&mut self, kind: &'static str, a: Value, b: Value) -> Value {
        self.add(operation(kind, "opset1", &[NUMPY]), &[a, b], a.element)
    }

    pub(crate) fn add_values(&mut self, a: Value, b: Value) -> Value {
        self.eltwise("Add", a, b)
    }

    pub(crate) fn subtract(&mut self, a: Value, b: Value) -> Value {
        self.eltwise("Subtract", a, b)
    }

    pub(crate) fn multiply(&mut self, a: Value, b: Value) -> Value {
        self.eltwise("Multiply", a, b)
    }

    pub(crate) fn divide(&mut self, a: Value, b: Value) -> Value {
        let attributes = &[NUMPY, ("m_pythondiv", "true")];
        self.add(operation("Divide", "opset1", attributes), &[a, b], a.element)
    }

    pub(crate) fn power(&mut self, a: Value, b: Value) -> Value {
        self.eltwise("Power", a, b)
    }

    pub(crate) fn less_equal(&mut self, a: Value, b: Value) -> Value {
        self.add(operation("LessEqual", "opset1", &[NUMPY]), &[a, b], ElementType::Boolean)
    }

    pub(crate) fn logical_and(&mut self, a: Value, b: Value) -> Value {
        self.add(operation("LogicalAnd", "opset1", &[NUMPY]), &[a, b], ElementType::Boolean)
    }

    pub(crate) fn select(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        let inputs = &[condition, yes, no];
        self.add(operation("Select", "opset1", &[NUMPY]), inputs, yes.element)
    }

    fn unary(&mut self, kind: &'static str, a: Value) -> Value {
        self.add(operation(kind, "opset1", &[]), &[a], a.element)
    }

    pub(crate) fn sqrt(&mut self, a: Value) -> Value {
        self.unary("Sqrt", a)
    }

    pub(crate) fn cos(&mut self, a: Value) -> Value {
        self.unary("Cos", a)
    }

    pub(crate) fn sin(&mut self, a: Value) -> Value {
        self.unary("Sin", a)
    }

    /// x * sigmoid(x).
    pub(crate) fn swish(&mut self, a: Value) -> Value {
        self.add(operation("Swish", "opset4", &[]), &[a], a.element)
    }

    pub(crate) fn convert(&mut self, a: Value, to: ElementType) -> Value {
        let attributes = &[("destination_type", to.attribute())];
        self.add(operation("Convert", "opset1", attributes), &[a], to)
    }

    pub(crate) fn matmul(&mut self, a: Value, b: Value, transpose_b: bool) -> Value {
        let transpose_b = if transpose_b { "true" } else { "false" };
        let attributes = &[("transpose_a", "false"), ("transpose_b", transpose_b)];
        self.add(operation("MatMul", "opset1", attributes), &[a, b], a.element)
    }

    /// Reduces over constant axes.
    fn reduce(
        &mut self,
        kind: &'static str,
        a: Value,
        axes: &[i64],
        keep_dims: &str,
    ) -> io::Result<Value> {
        let axes = self.i64s(axes)?;
        let attributes = &[("keep_dims", keep_dims)];
        Ok(self.add(operation(kind, "opset1", attributes), &[a, axes], a.element))
    }

    pub(crate) fn reduce_mean(&mut self, a: Value, axis: i64) -> io::Result<Value> {
        self.reduce("ReduceMean", a, &[axis], "true")
    }

    /// Sums an axis away.
    pub(crate) fn reduce_sum(&mut self, a: Value, axis: i64) -> io::Result<Value> {
        self.reduce("ReduceSum", a, &[axis], "false")
    }

    pub(crate) fn shape_of(&mut self, a: Value) -> Value {
        let attributes = &[("output_type", "i64")];
        self.add(operation("ShapeOf", "opset3", attributes), &[a], ElementType::I64)
    }

    pub(crate) fn gather(&mut self, a: Value, indices: Value, axis: i64) -> io::Result<Value> {
        let axis = self.i64(axis)?;
        let attributes = &[("batch_dims", "0")];
        Ok(self.add(operation("Gather", "opset8", attributes), &[a, indices, axis], a.element))
    }

    /// Reshapes to a constant shape; 0 keeps the dimension, -1 takes what is left.
    pub(crate) fn reshape(&mut self, a: Value, dims: &[i64]) -> io::Result<Value> {
        let dims = self.i64s(dims)?;
        let attributes = &[("special_zero", "true")];
        Ok(self.add(operation("Reshape", "opset1", attributes), &[a, dims], a.element))
    }

    pub(crate) fn transpose(&mut self, a: Value, order: &[i64]) -> io::Result<Value> {
        let order = self.i64s(order)?;
        Ok(self.add(operation("Transpose", "opset1", &[]), &[a, order], a.element))
    }

    pub(crate) fn unsqueeze(&mut self, a: Value, axes: &[i64]) -> io::Result<Value> {
        let axes = self.i64s(axes)?;
        Ok(self.add(operation("Unsqueeze", "opset1", &[]), &[a, axes], a.element))
    }

    pub(crate) fn concat(&mut self, parts: &[Value], axis: i64) -> Value {
        let axis = axis.to_string();
        let element = parts[0].element;
        self.add(operation("Concat", "opset1", &[("axis", &axis)]), parts, element)
    }

    /// Takes `start..end` of one axis.
    pub(crate) fn slice(
        &mut self,
        a: Value,
        axis: i64,
        range: std::ops::Range<i64>,
    ) -> io::Result<Value> {
        let start = self.i64s(&[range.start])?;
        let end = self.i64s(&[range.end])?;
        let step = self.i64s(&[1])?;
        let axis = self.i64s(&[axis])?;
        let inputs = &[a, start, end, step, axis];
        Ok(self.add(operation("Slice", "opset8", &[]), inputs, a.element))
    }

    /// Cuts one axis into pieces of the given lengths.
    pub(crate) fn split(&mut self, a: Value, axis: i64, lengths: &[i64]) -> io::Result<Vec<Value>> {
        let axis = self.i64(axis)?;
        let n_outputs = lengths.len();
        let lengths = self.i64s(lengths)?;
        let split = operation("VariadicSplit", "opset1", &[]);
        let node = self.push(split, &[a, axis, lengths], vec![a.element; n_outputs]);
        Ok((0..n_outputs).map(|output| Value { node, output, element: a.element }).collect())
    }

    /// The numbers `start..end` (scalars) in steps of one.
    pub(crate) fn range(&mut self, start: Value, end: Value) -> io::Result<Value> {
        let step = self.i64(1)?;
        let attributes = &[("output_type", "i64")];
        let range = operation("Range", "opset4", attributes);
        Ok(self.add(range, &[start, end, step], ElementType::I64))
    }

    pub(crate) fn broadcast(&mut self, a: Value, shape: Value) -> Value {
        let attributes = &[("mode", "numpy")];
        self.add(operation("Broadcast", "opset3", attributes), &[a, shape], a.element)
    }

    /// Broadcasts in both directions: a dimension of 1 in `shape` keeps the input's.
    pub(crate) fn broadcast_both(&mut self, a: Value, shape: Value) -> Value {
        let attributes = &[("mode", "bidirectional")];
        self.add(operation("Broadcast", "opset3", attributes), &[a, shape], a.element)
    }

    /// softmax(q k^T / sqrt(head_dim) + mask) v.
    pub(crate) fn attention(&mut self, q: Value, k: Value, v: Value, mask: Value) -> Value {
        let attributes = &[("causal", "false")];
        let attention = operation("ScaledDotProductAttention", "opset13", attributes);
        self.add(attention, &[q, k, v, mask], q.element)
    }

    /// Reads a state that starts as `initial`.
    pub(crate) fn read_value(&mut self, initial: Value, variable: &str, dims: &[Dim]) -> Value {
        let shape = shape_text(dims);
        let element = initial.element;
        let attributes = &[
            ("variable_id", variable),
            ("variable_type", element.attribute()),
            ("variable_shape", &shape),
        ];
        self.add(operation("ReadValue", "opset6", attributes), &[initial], element)
    }

    /// Keeps a value as a state for the next inference.
    pub(crate) fn assign(&mut self, value: Value, variable: &str) {
        let attributes = &[("variable_id", variable)];
        self.add(operation("Assign", "opset6", attributes), &[value], value.element);
    }
}
