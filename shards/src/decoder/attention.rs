//! Rotary positions and attention over a cache that the graph keeps as state.

use std::io;

use super::rope::Rope;
use super::stage::StageBuilder;
use super::tensors::HeadNorms;
use crate::ir::element::ElementType;
use crate::ir::graph::Value;

/// What the layers of a stage need for their attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionContext {
    /// For layers that see all positions; none if the stage has no such layer.
    full: Option<View>,
    /// For layers with a window, likewise.
    window: Option<View>,
    /// Which row of the cache each row of the batch continues, i32 `[B]`.
    beam_idx: Value,
    /// An empty cache, f32 `[B, n_kv_heads, 0, head_dim]`.
    empty_cache: Value,
}

/// What layers that see the same positions share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// Cosines of the rotary angles, f32 `[B, 1, T, rotary_dim]`.
    cos: Value,
    /// Sines, likewise.
    sin: Value,
    /// Dimensions of a head that are rotated.
    rotary_dim: usize,
    /// Added to the scores, f32 `[B, 1, T, past + T]`.
    mask: Value,
}

impl StageBuilder<'_> {
    /// Builds what the layers share.
    ///
    /// **Shape**: `input` is the stage's first input, `[B, T, ..]`.
    pub(crate) fn attention_context(
        &mut self,
        input: Value,
        mut layers: std::ops::Range<usize>,
    ) -> io::Result<AttentionContext> {
        let config = self.config;
        let attention_mask =
            self.graph.parameter("attention_mask", ElementType::I64, &[None, None]);
        let position_ids = self.graph.parameter("position_ids", ElementType::I64, &[None, None]);
        let beam_idx = self.graph.parameter("beam_idx", ElementType::I32, &[None]);
        self.graph.scope("mask");
        let visible = self.visible(input, attention_mask)?;
        let mut full = None;
        if layers.clone().any(|layer| config.window_of(layer).is_none()) {
            let mask = self.causal_mask(visible)?;
            self.graph.scope("rope");
            full = Some(self.view(position_ids, &config.rope, mask)?);
        }
        let mut window = None;
        if let Some(found) = layers.find_map(|layer| config.window_of(layer)) {
            self.graph.scope("window.mask");
            let mask = self.window_mask(visible, position_ids, found.len)?;
            self.graph.scope("window.rope");
            window = Some(self.view(position_ids, &found.rope, mask)?);
        }
        self.graph.scope("cache");
        let empty_cache = self.empty_cache(input)?;
        Ok(AttentionContext { full, window, beam_idx, empty_cache })
    }

    /// Cosines and sines of `position * frequency`, the frequencies repeated for both halves.
    fn view(&mut self, position_ids: Value, rope: &Rope, mask: Value) -> io::Result<View> {
        let frequencies = rope.frequencies();
        let n_pairs = frequencies.len() as u64;
        let positions = self.graph.convert(position_ids, ElementType::F32);
        let positions = self.graph.unsqueeze(positions, &[-1])?;
        let frequencies = self.graph.f32s(&[1, 1, n_pairs], &frequencies)?;
        let angles = self.graph.multiply(positions, frequencies);
        let angles = self.graph.concat(&[angles, angles], -1);
        let (mut cos, mut sin) = (self.graph.cos(angles), self.graph.sin(angles));
        if rope.magnitude.to_bits() != 1.0_f32.to_bits() {
            let magnitude = self.graph.f32s(&[], &[rope.magnitude])?;
            cos = self.graph.multiply(cos, magnitude);
            sin = self.graph.multiply(sin, magnitude);
        }
        let (cos, sin) = (self.graph.unsqueeze(cos, &[1])?, self.graph.unsqueeze(sin, &[1])?);
        Ok(View { cos, sin, rotary_dim: rope.dim, mask })
    }

    fn empty_cache(&mut self, input: Value) -> io::Result<Value> {
        let dims = &self.config.dims;
        let graph = &mut self.graph;
        let shape = graph.shape_of(input);
        let first = graph.i64s(&[0])?;
        let n_batch = graph.gather(shape, first, 0)?;
        let rest = graph.i64s(&[dims.n_kv_heads as i64, 0, dims.head_dim as i64])?;
        let shape = graph.concat(&[n_batch, rest], 0);
        let zero = graph.f32s(&[], &[0.0])?;
        Ok(graph.broadcast(zero, shape))
    }

    /// Attention of one layer: queries, keys and values `[B, T, heads * head_dim]` in, the same
    /// shape as the queries out.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        context: &AttentionContext,
        [q, k, v]: [Value; 3],
        norms: Option<HeadNorms<'_>>,
    ) -> io::Result<Value> {
        let (n_heads, n_kv_heads) = (self.config.dims.n_heads, self.config.dims.n_kv_heads);
        let view = match self.config.window_of(layer) {
            Some(_) => context.window,
            None => context.full,
        };
        let view = view.ok_or_else(|| io::Error::other("the layer is not one of the stage's"))?;
        let mut q = self.split_heads(q, n_heads)?;
        let mut k = self.split_heads(k, n_kv_heads)?;
        let mut v = self.split_heads(v, n_kv_heads)?;
        if let Some(norms) = norms {
            q = self.rms_norm(q, norms.q)?;
            k = self.rms_norm(k, norms.k)?;
        }
        for value in [&mut q, &mut k, &mut v] {
            *value = self.graph.transpose(*value, &[0, 2, 1, 3])?;
        }
        let q = self.rotate(q, &view)?;
        let k = self.rotate(k, &view)?;
        let k =
            self.remember(context, k, &format!("past_key_values.{layer}.keypresent.{layer}.key"))?;
        let v = self.remember(
            context,
            v,
            &format!("past_key_values.{layer}.valuepresent.{layer}.value"),
        )?;
        let k = self.repeat_heads(k)?;
        let v = self.repeat_heads(v)?;
        let scale = match self.config.attention_scale {
            Some(scale) => Some(self.graph.f32s(&[], &[scale])?),
            None => None,
        };
        let attended = self.graph.attention(q, k, v, view.mask, scale);
        let attended = self.graph.transpose(attended, &[0, 2, 1, 3])?;
        self.graph.reshape(attended, &[0, 0, self.config.q_rows() as i64])
    }

    /// `[B, T, heads * head_dim]` to `[B, T, heads, head_dim]`.
    fn split_heads(&mut self, value: Value, n_heads: usize) -> io::Result<Value> {
        let head_dim = self.config.dims.head_dim as i64;
        self.graph.reshape(value, &[0, 0, n_heads as i64, head_dim])
    }

    /// Rotates the first dimensions of each head, the first half of them against the second.
    fn rotate(&mut self, value: Value, view: &View) -> io::Result<Value> {
        let (rotary_dim, head_dim) = (view.rotary_dim as i64, self.config.dims.head_dim as i64);
        let graph = &mut self.graph;
        let rotary =
            if rotary_dim == head_dim { value } else { graph.slice(value, -1, 0..rotary_dim)? };
        let first = graph.slice(rotary, -1, 0..rotary_dim / 2)?;
        let second = graph.slice(rotary, -1, rotary_dim / 2..rotary_dim)?;
        let minus_one = graph.f32s(&[1, 1, 1, 1], &[-1.0])?;
        let second = graph.multiply(second, minus_one);
        let turned = graph.concat(&[second, first], -1);
        let straight = graph.multiply(rotary, view.cos);
        let turned = graph.multiply(turned, view.sin);
        let rotated = graph.add_values(straight, turned);
        if rotary_dim == head_dim {
            return Ok(rotated);
        }
        let rest = graph.slice(value, -1, rotary_dim..head_dim)?;
        Ok(graph.concat(&[rotated, rest], -1))
    }

    /// Appends keys or values to the state of this name; returns past and present together.
    fn remember(
        &mut self,
        context: &AttentionContext,
        value: Value,
        variable: &str,
    ) -> io::Result<Value> {
        let dims = &self.config.dims;
        let shape = [None, Some(dims.n_kv_heads as u64), None, Some(dims.head_dim as u64)];
        let past = self.graph.read_value(context.empty_cache, variable, &shape);
        let past = self.graph.gather(past, context.beam_idx, 0)?;
        let all = self.graph.concat(&[past, value], 2);
        self.graph.assign(all, variable);
        Ok(all)
    }

    /// Repeats each key or value head for the query heads that share it.
    fn repeat_heads(&mut self, value: Value) -> io::Result<Value> {
        let dims = &self.config.dims;
        let n_repeats = (dims.n_heads / dims.n_kv_heads) as i64;
        if n_repeats == 1 {
            return Ok(value);
        }
        let value = self.graph.unsqueeze(value, &[2])?;
        let shape = self.graph.i64s(&[1, 1, n_repeats, 1, 1])?;
        let value = self.graph.broadcast_both(value, shape);
        let shape = [0, dims.n_heads as i64, -1, dims.head_dim as i64];
        self.graph.reshape(value, &shape)
    }
}
