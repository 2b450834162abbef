//! Matrix products with stored weights, and the group-sum correction that makes them exact.
//!
//! A weight of a format with offsets is `scale * (code - shift) + correction`, where the
//! correction is the same for all columns of a group. Summed over a row, the second part is the
//! product of the corrections `[n_rows, n_groups]` with the sums of the input's groups
//! `[.., n_groups]`: one small product, added to the main one. Projections that read the same
//! input share the group sums and are stacked, so that they cost one product of each kind.

use std::io;

use super::stage::StageBuilder;
use super::tensors::Projection;
use crate::floats::FloatCoding;
use crate::ir::graph::Value;
use crate::weights::coded::{Code, store_coded};
use crate::weights::layout::layout;
use crate::weights::rows::Rows;
use crate::weights::store::{self, Stored};

/// A value that projections read, with its group sums once someone needs them.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) value: Value,
    n_cols: usize,
    sums: Option<(usize, Value)>,
}

impl Input {
    /// **Shape**: `value` is `[.., n_cols]`.
    pub(crate) fn new(value: Value, n_cols: usize) -> Self {
        Self { value, n_cols, sums: None }
    }
}

impl StageBuilder<'_> {
    /// Multiplies one input with several matrices; returns one value each.
    pub(crate) fn project(
        &mut self,
        input: &mut Input,
        projections: &[Projection<'_>],
    ) -> io::Result<Vec<Value>> {
        let mut values = Vec::with_capacity(projections.len());
        let key = |p: &Projection<'_>| (p.weight.encoding, self.coding(p));
        let stacks: Vec<_> = projections.chunk_by(|a, b| key(a) == key(b)).collect();
        for stack in stacks {
            let mut value = self.product(input, stack, None)?;
            value = self.with_bias(value, stack)?;
            if stack.len() == 1 {
                values.push(value);
            } else {
                let lengths: Vec<i64> = stack.iter().map(|p| p.n_rows as i64).collect();
                values.extend(self.graph.split(value, -1, &lengths)?);
            }
        }
        Ok(values)
    }

    /// Multiplies an input with a matrix and adds the result to the residual stream.
    pub(crate) fn project_onto(
        &mut self,
        residual: Value,
        input: &mut Input,
        projection: Projection<'_>,
    ) -> io::Result<Value> {
        let stack = [projection];
        let residual = self.with_bias(residual, &stack)?;
        self.product(input, &stack, Some(residual))
    }

    /// The product with stacked matrices, added to `onto` if given.
    fn product(
        &mut self,
        input: &mut Input,
        stack: &[Projection<'_>],
        onto: Option<Value>,
    ) -> io::Result<Value> {
        let stored = self.store(stack)?;
        self.product_of(input, stored, onto)
    }

    /// The product with a stored matrix, added to `onto` if given.
    pub(crate) fn product_of(
        &mut self,
        input: &mut Input,
        Stored { weights, correction }: Stored,
        onto: Option<Value>,
    ) -> io::Result<Value> {
        let mut sum = onto;
        if let Some(correction) = correction {
            let sums = self.group_sums(input, correction.group_len)?;
            let corrected = self.graph.matmul(sums, correction.values, true);
            sum = Some(match sum {
                Some(sum) => self.graph.add_values(sum, corrected),
                None => corrected,
            });
        }
        let main = self.graph.matmul(input.value, weights, true);
        Ok(match sum {
            Some(sum) => self.graph.add_values(sum, main),
            None => main,
        })
    }

    /// Writes stacked matrices, of one encoding and coding, into the weight file.
    pub(crate) fn store(&mut self, stack: &[Projection<'_>]) -> io::Result<Stored> {
        let tensors: Vec<_> = stack.iter().map(|p| (p.weight, p.order, p.n_rows)).collect();
        let rows = Rows::stack(&tensors);
        let mut coded = Vec::new();
        let stored = match self.coding(&stack[0]) {
            FloatCoding::Keep => {
                let Some(layout) = layout(rows.encoding(), self.weights) else {
                    let message = "tensor types are checked when tensors are found";
                    return Err(io::Error::new(io::ErrorKind::Unsupported, message));
                };
                store::store(&mut self.graph, &rows, layout)?
            }
            coding => {
                let code = Code { coding, search_scales: self.floats.search_scales };
                let (stored, report) = store_coded(&mut self.graph, &rows, code)?;
                coded = report;
                stored
            }
        };
        rows.release();
        for (idx, projection) in stack.iter().enumerate() {
            let coded = coded.get(idx..=idx).unwrap_or_default();
            (self.on_converted)(projection.n_bytes() as u64, coded);
        }
        Ok(stored)
    }

    /// What becomes of a matrix if it is stored in floats.
    fn coding(&self, projection: &Projection<'_>) -> FloatCoding {
        self.tensors.coding(projection, self.floats)
    }

    /// Sums of groups of neighbouring columns, `[.., n_cols / group_len]`.
    fn group_sums(&mut self, input: &mut Input, group_len: usize) -> io::Result<Value> {
        if let Some((len, sums)) = input.sums
            && len == group_len
        {
            return Ok(sums);
        }
        let n_groups = (input.n_cols / group_len) as i64;
        let groups = self.graph.reshape(input.value, &[0, 0, n_groups, group_len as i64])?;
        let sums = self.graph.reduce_sum(groups, -1)?;
        input.sums = Some((group_len, sums));
        Ok(sums)
    }

    /// Adds the biases of stacked projections, if any has one.
    fn with_bias(&mut self, value: Value, stack: &[Projection<'_>]) -> io::Result<Value> {
        if stack.iter().all(|p| p.bias.is_none()) {
            return Ok(value);
        }
        let mut biases = Vec::new();
        for projection in stack {
            match projection.bias {
                Some(bias) => {
                    let floats = bias.floats();
                    let rows = 0..projection.n_rows;
                    biases.extend(rows.map(|row| floats[projection.order.source_row(row)]));
                }
                None => biases.extend(std::iter::repeat_n(0.0, projection.n_rows)),
            }
        }
        let biases = self.graph.f32s(&[1, 1, biases.len() as u64], &biases)?;
        Ok(self.graph.add_values(value, biases))
    }
}
