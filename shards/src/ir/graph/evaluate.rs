//! Evaluates constant subgraphs in f64, for tests.

use std::path::Path;

use half::{bf16, f16};

use super::{Graph, Value};
use crate::ir::element::ElementType;

impl Graph {
    /// Closes the weight file and evaluates values that depend on constants only, in f64.
    pub(crate) fn evaluate_on_close(
        self,
        values: &[Option<Value>],
        bin: &Path,
    ) -> Vec<Option<Vec<f64>>> {
        let Self { nodes, bin: writer, .. } = self;
        writer.close().unwrap();
        let bytes = std::fs::read(bin).unwrap();
        let evaluation = Evaluation { nodes: &nodes, bytes: &bytes };
        values.iter().map(|value| value.map(|value| evaluation.value(value).1)).collect()
    }
}

struct Evaluation<'a> {
    nodes: &'a [super::Node],
    bytes: &'a [u8],
}

impl Evaluation<'_> {
    /// Dimensions and elements.
    fn value(&self, value: Value) -> (Vec<usize>, Vec<f64>) {
        let node = &self.nodes[value.node];
        let input = |index: usize| self.value(node.inputs[index]);
        match &*node.kind {
            "Const" => self.constant(value),
            "Convert" => input(0),
            "Reshape" => {
                let dims = input(1).1.iter().map(|dim| *dim as usize).collect();
                (dims, input(0).1)
            }
            "Subtract" => broadcast(input(0), input(1), |a, b| a - b),
            "Multiply" => broadcast(input(0), input(1), |a, b| a * b),
            kind => panic!("{kind} is not evaluated"),
        }
    }

    fn constant(&self, value: Value) -> (Vec<usize>, Vec<f64>) {
        let node = &self.nodes[value.node];
        let attribute = |name: &str| {
            let found = node.attributes.iter().find(|(key, _)| *key == name);
            found.unwrap().1.parse::<usize>().unwrap()
        };
        let dims: Vec<usize> = node.dims.iter().map(|dim| dim.unwrap() as usize).collect();
        let bytes = &self.bytes[attribute("offset")..][..attribute("size")];
        let n: usize = dims.iter().product();
        let element = |i: usize| match value.element {
            ElementType::F32 => f32::from_le_bytes(take(bytes, i)).into(),
            ElementType::F16 => f16::from_le_bytes(take(bytes, i)).into(),
            ElementType::Bf16 => bf16::from_le_bytes(take(bytes, i)).into(),
            ElementType::I64 => i64::from_le_bytes(take(bytes, i)) as f64,
            ElementType::I8 => i8::from_le_bytes(take(bytes, i)).into(),
            ElementType::U8 => bytes[i].into(),
            ElementType::U4 => f64::from(bytes[i / 2] >> (4 * (i % 2)) & 15),
            ElementType::I4 => {
                let nibble = bytes[i / 2] >> (4 * (i % 2)) & 15;
                f64::from((nibble << 4) as i8 >> 4)
            }
            element => panic!("{element:?} is not read"),
        };
        (dims, (0..n).map(element).collect())
    }
}

fn take<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
    bytes[index * N..][..N].try_into().unwrap()
}

/// Applies an operation where the second value's last dimension may be 1.
fn broadcast(
    (dims, a): (Vec<usize>, Vec<f64>),
    (b_dims, b): (Vec<usize>, Vec<f64>),
    operation: impl Fn(f64, f64) -> f64,
) -> (Vec<usize>, Vec<f64>) {
    let repeat = dims.last().unwrap() / b_dims.last().unwrap();
    assert_eq!(a.len(), b.len() * repeat);
    let values = a.iter().enumerate().map(|(i, a)| operation(*a, b[i / repeat])).collect();
    (dims, values)
}
