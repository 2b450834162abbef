//! Shapes in terms of what a step consists of: rows of a batch, slots of a cache.
//!
//! Graphs take shapes from wherever they are at hand: the number of rows from the embedding, the
//! length of the past from the first layer's cache. A later stage has neither, so where a shape
//! of an earlier stage is asked for, another value of the same shape has to take its place. This
//! finds out what every dimension means. An operation without a rule keeps the dimensions that
//! the file declares; the others are unknown, and nothing is done with them.

use std::collections::HashMap;

use super::net::{Net, Node, Port, Value};

/// What a dimension is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dim {
    /// Always the same.
    Fixed(u64),
    /// Sequences of the batch.
    Batch,
    /// Rows of the step.
    Rows,
    /// Slots of the cache before the step.
    Past,
    /// Slots of the cache with the rows of the step.
    Slots,
    /// Not known.
    Unknown,
}

/// Axes of a cache: of sequences and of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheAxes {
    pub(super) batch: usize,
    pub(super) slots: usize,
}

/// The dimensions of every value, and the elements of small integer vectors.
#[derive(Debug)]
pub(super) struct Shapes {
    dims: Vec<Vec<Vec<Dim>>>,
    elements: Vec<Option<Vec<Dim>>>,
}

/// What the shapes follow from.
#[derive(Clone, Copy)]
pub(super) struct Basis<'a> {
    pub(super) net: &'a Net,
    /// Bytes of the weight file.
    pub(super) weights: &'a [u8],
    /// The axes of the cache that a `ReadValue` reads.
    pub(super) caches: &'a HashMap<usize, CacheAxes>,
}

impl Shapes {
    /// Follows the shapes through the graph.
    pub(super) fn infer(basis: &Basis<'_>) -> Self {
        let n_nodes = basis.net.nodes.len();
        let mut shapes =
            Self { dims: Vec::with_capacity(n_nodes), elements: Vec::with_capacity(n_nodes) };
        for (index, node) in basis.net.nodes.iter().enumerate() {
            // Vectors that are put together of vectors could double with every operation.
            let elements = shapes.elements_of(basis, node);
            let elements = elements.filter(|elements| elements.len() <= MAX_ELEMENTS);
            let found = shapes.dims_of(basis, index, node);
            let mut dims: Vec<Vec<Dim>> = node.outputs.iter().map(declared).collect();
            // All outputs of a split are alike but for their length.
            for dims in &mut dims {
                let found = found.as_deref().filter(|found| found.len() == dims.len());
                for (dim, found) in dims.iter_mut().zip(found.unwrap_or_default()) {
                    *dim = if *found == Dim::Unknown { *dim } else { *found };
                }
            }
            shapes.dims.push(dims);
            shapes.elements.push(elements);
        }
        shapes
    }

    /// The dimensions of a value.
    pub(super) fn of(&self, value: Value) -> &[Dim] {
        &self.dims[value.node][value.output]
    }

    /// The elements of an integer scalar or vector, if they are known.
    fn vector(&self, value: Value) -> Option<&[Dim]> {
        if value.output > 0 { None } else { self.elements[value.node].as_deref() }
    }

    /// Integers that are always the same.
    fn fixed(&self, value: Value) -> Option<Vec<i64>> {
        let fixed = |dim: &Dim| match dim {
            Dim::Fixed(number) => Some(*number as i64),
            _ => None,
        };
        self.vector(value)?.iter().map(fixed).collect()
    }

    /// Axes that an input names, counted from the front.
    fn axes(&self, value: Value, rank: usize) -> Option<Vec<usize>> {
        self.fixed(value)?.into_iter().map(|axis| from_front(axis, rank)).collect()
    }

    fn elements_of(&self, basis: &Basis<'_>, node: &Node) -> Option<Vec<Dim>> {
        let input = |port: usize| self.vector(*node.inputs.get(port)?);
        match node.kind.as_str() {
            // Negative numbers wrap here and unwrap where they are used.
            "Const" => Some(integers(node, basis.weights)?.map(|n| Dim::Fixed(n as u64)).collect()),
            "ShapeOf" => Some(self.of(*node.inputs.first()?).to_vec()),
            "Convert" | "Unsqueeze" | "Squeeze" | "Reshape" => input(0).map(<[Dim]>::to_vec),
            "Concat" => {
                let parts = node.inputs.iter().map(|part| self.vector(*part));
                Some(parts.collect::<Option<Vec<_>>>()?.concat())
            }
            "Gather" => {
                let (from, indices) = (input(0)?, self.fixed(*node.inputs.get(1)?)?);
                let pick = |index| from.get(from_front(index, from.len())?).copied();
                indices.into_iter().map(pick).collect()
            }
            "Add" => match (input(0)?, input(1)?) {
                ([a], [b]) => Some(vec![sum(*a, *b)]),
                _ => None,
            },
            "Subtract" => match (input(0)?, input(1)?) {
                ([Dim::Slots], [Dim::Rows]) => Some(vec![Dim::Past]),
                ([Dim::Slots], [Dim::Past]) => Some(vec![Dim::Rows]),
                _ => None,
            },
            _ => None,
        }
    }

    fn dims_of(&self, basis: &Basis<'_>, index: usize, node: &Node) -> Option<Vec<Dim>> {
        let input = |port: usize| node.inputs.get(port).map(|value| self.of(*value));
        match node.kind.as_str() {
            "Parameter" => parameter(node),
            "ReadValue" => {
                let axes = basis.caches.get(&index)?;
                let mut dims = declared(node.outputs.first()?);
                *dims.get_mut(axes.batch)? = Dim::Batch;
                *dims.get_mut(axes.slots)? = Dim::Past;
                Some(dims)
            }
            kind if is_broadcasting(kind) => {
                let mut dims = input(0)?.to_vec();
                for port in 1..node.inputs.len() {
                    dims = broadcast(&dims, input(port)?);
                }
                Some(dims)
            }
            kind if keeps_shape(kind) => Some(input(0)?.to_vec()),
            "MatMul" => matmul(node, input(0)?, input(1)?),
            "Gather" => {
                let (from, indices) = (input(0)?, input(1)?);
                let axis = *self.axes(*node.inputs.get(2)?, from.len())?.first()?;
                Some([&from[..axis], indices, from.get(axis + 1..)?].concat())
            }
            "Concat" => {
                let mut dims = input(0)?.to_vec();
                let axis = from_front(node.attribute("axis")?.parse().ok()?, dims.len())?;
                for port in 1..node.inputs.len() {
                    dims[axis] = sum(dims[axis], *input(port)?.get(axis)?);
                }
                Some(dims)
            }
            "Transpose" => {
                let from = input(0)?;
                let order = self.axes(*node.inputs.get(1)?, from.len())?;
                order.into_iter().map(|axis| from.get(axis).copied()).collect()
            }
            "Slice" => self.without(node, 4),
            "Split" | "VariadicSplit" => self.without(node, 1),
            "Unsqueeze" => self.unsqueezed(node),
            "Reshape" => self.reshaped(node),
            "Broadcast" => {
                let target = self.vector(*node.inputs.get(1)?)?;
                Some(broadcast(input(0)?, target))
            }
            "ScaledDotProductAttention" => {
                let (queries, values) = (input(0)?, input(2)?);
                let (_, front) = queries.split_last()?;
                Some([front, &[*values.last()?]].concat())
            }
            _ => None,
        }
    }

    /// The dimensions of the first input, but for the axes that another input names.
    fn without(&self, node: &Node, port: usize) -> Option<Vec<Dim>> {
        let mut dims = self.of(*node.inputs.first()?).to_vec();
        for axis in self.axes(*node.inputs.get(port)?, dims.len())? {
            dims[axis] = Dim::Unknown;
        }
        Some(dims)
    }

    fn unsqueezed(&self, node: &Node) -> Option<Vec<Dim>> {
        let mut dims = self.of(*node.inputs.first()?).to_vec();
        let axes = self.fixed(*node.inputs.get(1)?)?;
        let rank = dims.len() + axes.len();
        let mut axes: Vec<usize> =
            axes.into_iter().map(|axis| from_front(axis, rank)).collect::<Option<_>>()?;
        axes.sort_unstable();
        for axis in axes {
            (axis <= dims.len()).then(|| dims.insert(axis, Dim::Fixed(1)))?;
        }
        Some(dims)
    }

    /// A dimension of -1 is known where everything else stays as it was.
    fn reshaped(&self, node: &Node) -> Option<Vec<Dim>> {
        const REST: Dim = Dim::Fixed(u64::MAX);
        let from = self.of(*node.inputs.first()?);
        let mut dims = self.vector(*node.inputs.get(1)?)?.to_vec();
        if node.attribute("special_zero") == Some("true") {
            for (axis, dim) in dims.iter_mut().enumerate() {
                if *dim == Dim::Fixed(0) {
                    *dim = *from.get(axis)?;
                }
            }
        }
        let Some(rest) = dims.iter().position(|dim| *dim == REST) else { return Some(dims) };
        let mut left = from.to_vec();
        for dim in dims.iter().filter(|dim| **dim != REST) {
            if let Some(place) = left.iter().position(|other| other == dim) {
                left.remove(place);
            } else if !matches!(dim, Dim::Fixed(_)) {
                return None;
            }
        }
        let left: Vec<Dim> = left.into_iter().filter(|dim| !matches!(dim, Dim::Fixed(_))).collect();
        // The one dimension that is left may still be multiplied by fixed ones: only where none
        // of those differ is it known.
        let product = |dims: &[Dim]| {
            let fixed = dims.iter().filter_map(|dim| match dim {
                Dim::Fixed(number) if *dim != REST => Some(*number),
                _ => None,
            });
            fixed.fold(1_u64, u64::saturating_mul)
        };
        dims[rest] = match left[..] {
            [dim] if product(&dims) == product(from) => dim,
            _ => Dim::Unknown,
        };
        Some(dims)
    }
}

/// The dimensions that the file declares.
fn declared(port: &Port) -> Vec<Dim> {
    port.dims.iter().map(|dim| dim.map_or(Dim::Unknown, Dim::Fixed)).collect()
}

/// The dimensions of an input of the model.
fn parameter(node: &Node) -> Option<Vec<Dim>> {
    let named = |name| node.is_named(name);
    if named("input_ids") || named("position_ids") {
        Some(vec![Dim::Batch, Dim::Rows])
    } else if named("attention_mask") {
        Some(vec![Dim::Batch, Dim::Slots])
    } else if named("beam_idx") {
        Some(vec![Dim::Batch])
    } else {
        None
    }
}

fn is_broadcasting(kind: &str) -> bool {
    const KINDS: [&str; 21] = [
        "Add",
        "Subtract",
        "Multiply",
        "Divide",
        "Power",
        "Maximum",
        "Minimum",
        "Mod",
        "FloorMod",
        "Equal",
        "NotEqual",
        "Less",
        "LessEqual",
        "Greater",
        "GreaterEqual",
        "LogicalAnd",
        "LogicalOr",
        "BitwiseAnd",
        "BitwiseOr",
        "Select",
        "SquaredDifference",
    ];
    KINDS.contains(&kind)
}

fn keeps_shape(kind: &str) -> bool {
    const KINDS: [&str; 23] = [
        "Convert",
        "Sqrt",
        "Cos",
        "Sin",
        "Tanh",
        "Swish",
        "Gelu",
        "ReLU",
        "Sigmoid",
        "Exp",
        "Log",
        "Negative",
        "Abs",
        "Erf",
        "SoftPlus",
        "SoftMax",
        "MVN",
        "LogicalNot",
        "Clamp",
        "Floor",
        "FakeQuantize",
        "CumSum",
        "NormalizeL2",
    ];
    KINDS.contains(&kind)
}

fn matmul(node: &Node, a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let transposed = |name: &str| node.attribute(name) == Some("true");
    let (a_rows, a_front) = match a {
        [front @ .., rows, columns] => {
            (if transposed("transpose_a") { *columns } else { *rows }, front)
        }
        _ => return None,
    };
    let (b_columns, b_front) = match b {
        [front @ .., rows, columns] => {
            (if transposed("transpose_b") { *rows } else { *columns }, front)
        }
        _ => return None,
    };
    let mut dims = broadcast(a_front, b_front);
    dims.extend([a_rows, b_columns]);
    Some(dims)
}

/// The dimensions of two values that are broadcast to each other, aligned at the end.
///
/// A dimension beside one that varies from step to step, or that is more than 1, can only be the
/// same or 1.
fn broadcast(a: &[Dim], b: &[Dim]) -> Vec<Dim> {
    let rank = a.len().max(b.len());
    let dim = |dims: &[Dim], axis: usize| {
        (axis + dims.len()).checked_sub(rank).map_or(Dim::Fixed(1), |axis| dims[axis])
    };
    let both = |axis| match (dim(a, axis), dim(b, axis)) {
        (Dim::Fixed(1), other) | (other, Dim::Fixed(1)) => other,
        (Dim::Unknown, other) | (other, Dim::Unknown) => other,
        (a, b) if a == b => a,
        _ => Dim::Unknown,
    };
    (0..rank).map(both).collect()
}

fn sum(a: Dim, b: Dim) -> Dim {
    match (a, b) {
        (Dim::Fixed(a), Dim::Fixed(b)) => Dim::Fixed(a.wrapping_add(b)),
        (Dim::Past, Dim::Rows) | (Dim::Rows, Dim::Past) => Dim::Slots,
        _ => Dim::Unknown,
    }
}

/// An axis counted from the front.
pub(super) fn from_front(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(axis).ok().filter(|axis| *axis < rank)
}

/// No shape and no list of axes has more numbers.
const MAX_ELEMENTS: usize = 32;

/// The numbers of a small integer constant.
pub(super) fn integers<'a>(
    node: &Node,
    weights: &'a [u8],
) -> Option<Box<dyn Iterator<Item = i64> + 'a>> {
    let most = (MAX_ELEMENTS * size_of::<i64>()) as u64;
    let place = node.place.filter(|place| place.bytes <= most)?;
    let start = usize::try_from(place.offset).ok()?;
    let bytes = weights.get(start..start.checked_add(place.bytes as usize)?)?;
    match node.attribute("element_type")? {
        "i64" => Some(Box::new(bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)))),
        "i32" => {
            let chunks = bytes.as_chunks::<4>().0.iter();
            Some(Box::new(chunks.map(|b| i64::from(i32::from_le_bytes(*b)))))
        }
        _ => None,
    }
}
