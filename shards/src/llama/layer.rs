//! One transformer layer, and the normalisation that it and the head use.

use std::io;

use super::attention::AttentionContext;
use super::linear::Input;
use super::stage::StageBuilder;
use crate::ir::graph::Value;
use crate::tensor::Tensor;

impl StageBuilder<'_> {
    /// Adds one layer: residual stream `[B, T, hidden_dim]` in and out.
    pub(crate) fn layer(
        &mut self,
        layer: usize,
        context: &AttentionContext,
        hidden: Value,
    ) -> io::Result<Value> {
        let tensors = self.tensors.layers[layer].clone();
        let dims = &self.config.dims;
        let (hidden_dim, attended_dim) = (dims.hidden_dim, dims.n_heads * dims.head_dim);

        self.graph.scope(format!("layers.{layer}.attention"));
        let normed = self.rms_norm(hidden, tensors.attention_norm)?;
        let mut normed = Input::new(normed, hidden_dim);
        let qkv = self.project(&mut normed, &[tensors.q, tensors.k, tensors.v])?;
        let attended = self.attend(layer, context, [qkv[0], qkv[1], qkv[2]])?;
        let mut attended = Input::new(attended, attended_dim);
        let hidden = self.project_onto(hidden, &mut attended, tensors.output)?;

        self.graph.scope(format!("layers.{layer}.ffn"));
        let normed = self.rms_norm(hidden, tensors.ffn_norm)?;
        let mut normed = Input::new(normed, hidden_dim);
        let gate_up = self.project(&mut normed, &[tensors.gate, tensors.up])?;
        let gate = self.graph.swish(gate_up[0]);
        let product = self.graph.multiply(gate, gate_up[1]);
        let mut product = Input::new(product, self.config.ffn_dim);
        self.project_onto(hidden, &mut product, tensors.down)
    }

    /// x / sqrt(mean(x^2) + eps) * weight, over the last axis.
    pub(crate) fn rms_norm(&mut self, value: Value, weight: Tensor<'_>) -> io::Result<Value> {
        let weights = weight.floats();
        (self.on_converted)(weight.n_bytes() as u64);
        let graph = &mut self.graph;
        let two = graph.f32s(&[1, 1, 1], &[2.0])?;
        let square = graph.power(value, two);
        let mean = graph.reduce_mean(square, -1)?;
        let eps = graph.f32s(&[1, 1, 1], &[self.config.rms_eps])?;
        let mean = graph.add_values(mean, eps);
        let root = graph.sqrt(mean);
        let one = graph.f32s(&[1, 1, 1], &[1.0])?;
        let inverse = graph.divide(one, root);
        let normed = graph.multiply(inverse, value);
        let weights = graph.f32s(&[1, 1, weights.len() as u64], &weights)?;
        Ok(graph.multiply(normed, weights))
    }
}
