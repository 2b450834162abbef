//! Mixtures of experts: a router chooses a few feed-forwards for each row.
//!
//! All experts compute all rows, as one product with a batch of matrices, and the shares of those
//! that were not chosen are 0: the block costs what all experts cost.

use std::io;

use super::config::Experts;
use super::linear::Input;
use super::stage::StageBuilder;
use super::tensors::{ExpertTensors, Projection};
use crate::ir::graph::Value;
use crate::weights::store::{Correction, Stored};

impl StageBuilder<'_> {
    /// What the chosen experts make of a value `[B, T, hidden_dim]`.
    pub(super) fn mix_experts(
        &mut self,
        input: &mut Input,
        tensors: &ExpertTensors<'_>,
    ) -> io::Result<Value> {
        let Some(experts) = self.config.experts.clone() else {
            return Err(io::Error::other("only models with experts have their tensors"));
        };
        let hidden_dim = self.config.dims.hidden_dim;
        let shares = self.shares(input, tensors.router, &experts)?;
        // Each expert has rows of its own: the CPU's products do not repeat them.
        let rows = self.graph.reshape(input.value, &[-1, hidden_dim as i64])?;
        let rows = self.graph.tile(rows, &[experts.n as i64, 1])?;
        let rows = self.graph.reshape(rows, &[experts.n as i64, -1, hidden_dim as i64])?;
        let mut rows = Input::new(rows, hidden_dim);
        let gate = self.product_of_each(&mut rows, &tensors.gate, experts.n)?;
        let up = self.product_of_each(&mut rows, &tensors.up, experts.n)?;
        let product = self.gated(gate, up);
        let mut product = Input::new(product, self.config.ffn_dim);
        let outputs = self.product_of_each(&mut product, &tensors.down, experts.n)?;
        let outputs = self.graph.multiply(outputs, shares);
        let mixed = self.graph.reduce_sum(outputs, 0)?;
        Ok(self.graph.reshape_like(mixed, input.value))
    }

    /// The share of every expert in every row, `[n_experts, B * T, 1]`.
    fn shares(
        &mut self,
        input: &mut Input,
        router: Projection<'_>,
        experts: &Experts,
    ) -> io::Result<Value> {
        let logits = self.project(input, &[router])?[0];
        let graph = &mut self.graph;
        let shares = graph.softmax(logits, -1);
        let [mut chosen, places] = graph.top_k(shares, experts.n_used as i64, -1)?;
        if experts.normalised {
            let sum = graph.reduce_sum(chosen, -1)?;
            let sum = graph.unsqueeze(sum, &[-1])?;
            chosen = graph.divide(chosen, sum);
        }
        let places = graph.one_hot(places, experts.n as i64)?;
        let chosen = graph.unsqueeze(chosen, &[-1])?;
        let shares = graph.multiply(places, chosen);
        let shares = graph.reduce_sum(shares, -2)?;
        let shares = graph.reshape(shares, &[-1, experts.n as i64])?;
        let shares = graph.transpose(shares, &[1, 0])?;
        graph.unsqueeze(shares, &[-1])
    }

    /// The product of each expert's rows, `[n, rows, n_cols]`, with its matrix.
    fn product_of_each(
        &mut self,
        input: &mut Input,
        matrices: &[Projection<'_>],
        n: usize,
    ) -> io::Result<Value> {
        let Stored { weights, correction } = self.store(matrices)?;
        let (n, n_cols) = (n as i64, matrices[0].weight.n_cols as i64);
        let weights = self.graph.reshape(weights, &[n, -1, n_cols])?;
        let correction = match correction {
            Some(Correction { values, group_len }) => {
                let n_groups = n_cols / group_len as i64;
                let values = self.graph.reshape(values, &[n, -1, n_groups])?;
                Some(Correction { values, group_len })
            }
            None => None,
        };
        self.product_of(input, Stored { weights, correction }, None)
    }
}
