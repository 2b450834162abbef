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

    pub(crate) fn greater(&mut self, a: Value, b: Value) -> Value {
        self.add(operation("Greater", "opset1", &[NUMPY]), &[a, b], ElementType::Boolean)
    }

    pub(crate) fn bitwise_and(&mut self, a: Value, b: Value) -> Value {
        self.add(operation("BitwiseAnd", "opset13", &[NUMPY]), &[a, b], a.element)
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

    pub(crate) fn tanh(&mut self, a: Value) -> Value {
        self.unary("Tanh", a)
    }

    /// The Gaussian error linear unit, approximated by tanh.
    pub(crate) fn gelu_tanh(&mut self, a: Value) -> Value {
        self.add(operation("Gelu", "opset7", &[("approximation_mode", "TANH")]), &[a], a.element)
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

    /// Repeats a value so many times along each axis.
    pub(crate) fn tile(&mut self, a: Value, repeats: &[i64]) -> io::Result<Value> {
        let repeats = self.i64s(repeats)?;
        Ok(self.add(operation("Tile", "opset1", &[]), &[a, repeats], a.element))
    }

    /// Reshapes to the shape of another value.
    pub(crate) fn reshape_like(&mut self, a: Value, other: Value) -> Value {
        let shape = self.shape_of(other);
        let attributes = &[("special_zero", "false")];
        self.add(operation("Reshape", "opset1", attributes), &[a, shape], a.element)
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

    /// Puts zeros behind the end of each axis.
    pub(crate) fn pad(&mut self, a: Value, ends: &[i64]) -> io::Result<Value> {
        let begins = self.i64s(&vec![0; ends.len()])?;
        let ends = self.i64s(ends)?;
        let zero = self.f32s(&[], &[0.0])?;
        let attributes = &[("pad_mode", "constant")];
        Ok(self.add(operation("Pad", "opset1", attributes), &[a, begins, ends, zero], a.element))
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

    /// exp(x) over its sum along an axis.
    pub(crate) fn softmax(&mut self, a: Value, axis: i64) -> Value {
        let axis = axis.to_string();
        self.add(operation("Softmax", "opset8", &[("axis", &axis)]), &[a], a.element)
    }

    /// The `k` largest elements along an axis and their places (i32), largest first.
    pub(crate) fn top_k(&mut self, a: Value, k: i64, axis: i64) -> io::Result<[Value; 2]> {
        let (k, axis) = (self.i64(k)?, axis.to_string());
        let attributes = &[
            ("axis", &*axis),
            ("mode", "max"),
            ("sort", "value"),
            ("index_element_type", "i32"),
            ("stable", "true"),
        ];
        let top_k = operation("TopK", "opset11", attributes);
        let node = self.push(top_k, &[a, k], vec![a.element, ElementType::I32]);
        let output = |output, element| Value { node, output, element };
        Ok([output(0, a.element), output(1, ElementType::I32)])
    }

    /// A new last axis of length `depth`: 1 at the place that an element names, else 0.
    pub(crate) fn one_hot(&mut self, a: Value, depth: i64) -> io::Result<Value> {
        let depth = self.i64(depth)?;
        let (on, off) = (self.f32s(&[], &[1.0])?, self.f32s(&[], &[0.0])?);
        let one_hot = operation("OneHot", "opset1", &[("axis", "-1")]);
        Ok(self.add(one_hot, &[a, depth, on, off], ElementType::F32))
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

    /// Sums of what stands before each element along an axis.
    pub(crate) fn count_before(&mut self, a: Value, axis: i64) -> io::Result<Value> {
        let axis = self.i64(axis)?;
        let attributes = &[("exclusive", "true"), ("reverse", "false")];
        Ok(self.add(operation("CumSum", "opset3", attributes), &[a, axis], a.element))
    }

    /// softmax(q k^T * scale + mask) v; `scale` is 1 / sqrt(head_dim) if it is not given.
    pub(crate) fn attention(
        &mut self,
        q: Value,
        k: Value,
        v: Value,
        mask: Value,
        scale: Option<Value>,
    ) -> Value {
        let attributes = &[("causal", "false")];
        let attention = operation("ScaledDotProductAttention", "opset13", attributes);
        let inputs: Vec<Value> = [q, k, v, mask].into_iter().chain(scale).collect();
        self.add(attention, &inputs, q.element)
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
