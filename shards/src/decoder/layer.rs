//! One transformer layer, and the normalisation that it and the head use.

use std::io;

use super::attention::AttentionContext;
use super::families::Activation;
use super::linear::Input;
use super::stage::StageBuilder;
use super::tensors::{FeedForward, Projection};
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
        let all = self.tensors;
        let (tensors, hidden_dim) = (&all.layers[layer], self.config.dims.hidden_dim);

        self.graph.scope(format!("layers.{layer}.attention"));
        let normed = self.rms_norm(hidden, tensors.attention_norm)?;
        let mut normed = Input::new(normed, hidden_dim);
        let qkv = self.project(&mut normed, &tensors.qkv)?;
        let qkv = [qkv[0], qkv[1], qkv[2]];
        let attended = self.attend(layer, context, qkv, tensors.head_norms)?;
        let mut attended = Input::new(attended, self.config.q_rows());
        let output_norm = tensors.attention_output_norm;
        let hidden = self.add_product(hidden, &mut attended, tensors.output, output_norm)?;

        self.graph.scope(format!("layers.{layer}.ffn"));
        let normed = self.rms_norm(hidden, tensors.ffn_norm)?;
        let mut normed = Input::new(normed, hidden_dim);
        match &tensors.ffn {
            FeedForward::Dense(dense) => {
                let gate_up = self.project(&mut normed, &dense.gate_up)?;
                let product = self.gated(gate_up[0], gate_up[1]);
                let mut product = Input::new(product, self.config.ffn_dim);
                self.add_product(hidden, &mut product, dense.down, tensors.ffn_output_norm)
            }
            FeedForward::Experts(experts) => {
                let mixed = self.mix_experts(&mut normed, experts)?;
                self.add_output(hidden, mixed, tensors.ffn_output_norm)
            }
        }
    }

    /// The gate's function times the other value.
    pub(super) fn gated(&mut self, gate: Value, up: Value) -> Value {
        let gate = match self.config.family.activation {
            Activation::Silu => self.graph.swish(gate),
            Activation::GeluTanh => self.graph.gelu_tanh(gate),
        };
        self.graph.multiply(gate, up)
    }

    /// Adds a product to the residual stream, normalised if there is a norm for it.
    fn add_product(
        &mut self,
        residual: Value,
        input: &mut Input,
        projection: Projection<'_>,
        norm: Option<Tensor<'_>>,
    ) -> io::Result<Value> {
        if norm.is_none() {
            return self.project_onto(residual, input, projection);
        }
        let product = self.project(input, &[projection])?[0];
        self.add_output(residual, product, norm)
    }

    /// Adds a value to the residual stream, normalised if there is a norm for it.
    fn add_output(
        &mut self,
        residual: Value,
        mut value: Value,
        norm: Option<Tensor<'_>>,
    ) -> io::Result<Value> {
        if let Some(norm) = norm {
            value = self.rms_norm(value, norm)?;
        }
        Ok(self.graph.add_values(residual, value))
    }

    /// x / sqrt(mean(x^2) + eps) * weight, over the last axis.
    pub(crate) fn rms_norm(&mut self, value: Value, weight: Tensor<'_>) -> io::Result<Value> {
        let offset = self.config.norm_offset;
        let weights: Vec<f32> = weight.floats().iter().map(|weight| weight + offset).collect();
        (self.on_converted)(weight.n_bytes() as u64, &[]);
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
