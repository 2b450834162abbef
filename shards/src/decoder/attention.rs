//! Rotary positions and attention over a cache: one that the graph keeps as state, or one that
//! comes in with every call.

use std::io;

use super::mask::Visible;
use super::rope::Rope;
use super::stage::StageBuilder;
use super::tensors::HeadNorms;
use crate::form::{Form, StaticForm};
use crate::ir::element::ElementType;
use crate::ir::graph::Value;

/// What the layers of a stage need for their attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionContext {
    /// For layers that see all positions; none if the stage has no such layer.
    full: Option<View>,
    /// For layers with a window, likewise.
    window: Option<View>,
    cache: Cache,
}

/// Where the cache of a layer comes from.
#[derive(Clone, Copy, Debug)]
enum Cache {
    /// A state of the graph.
    State {
        /// Which row of the cache each row of the batch continues, i32 `[B]`.
        beam_idx: Value,
        /// An empty cache, f32 `[B, n_kv_heads, 0, head_dim]`.
        empty: Value,
    },
    /// An input of the graph.
    Input(StaticForm),
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

/// What masks are made from.
#[derive(Clone, Copy, Debug)]
enum Masks {
    /// Which slots of the cache are in use.
    Slots(Visible),
    /// The input is the mask of layers that see all positions.
    Given(StaticForm, Value),
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
        let (masks, position_ids, cache) = match self.form {
            Form::Stateful => self.state_inputs(input)?,
            Form::Static(form) => self.static_inputs(form),
        };
        let mut full = None;
        if layers.clone().any(|layer| config.window_of(layer).is_none()) {
            self.graph.scope("mask");
            let mask = match masks {
                Masks::Slots(visible) => self.causal_mask(visible)?,
                Masks::Given(_, mask) => mask,
            };
            self.graph.scope("rope");
            full = Some(self.view(position_ids, &config.rope, mask)?);
        }
        let mut window = None;
        if let Some(found) = layers.find_map(|layer| config.window_of(layer)) {
            self.graph.scope("window.mask");
            let mask = match masks {
                Masks::Slots(visible) => self.window_mask(visible, position_ids, found.len)?,
                Masks::Given(form, mask) => {
                    self.static_window_mask((form, mask), position_ids, found.len)?
                }
            };
            self.graph.scope("window.rope");
            window = Some(self.view(position_ids, &found.rope, mask)?);
        }
        Ok(AttentionContext { full, window, cache })
    }

    /// Inputs beside the rows, of a graph with states: what masks are made from, positions, and
    /// where caches come from.
    fn state_inputs(&mut self, input: Value) -> io::Result<(Masks, Value, Cache)> {
        let attention_mask =
            self.graph.parameter("attention_mask", ElementType::I64, &[None, None]);
        let position_ids = self.graph.parameter("position_ids", ElementType::I64, &[None, None]);
        let beam_idx = self.graph.parameter("beam_idx", ElementType::I32, &[None]);
        self.graph.scope("mask");
        let visible = self.visible(input, attention_mask)?;
        self.graph.scope("cache");
        let empty = self.empty_cache(input)?;
        Ok((Masks::Slots(visible), position_ids, Cache::State { beam_idx, empty }))
    }

    /// The same of a static graph.
    fn static_inputs(&mut self, form: StaticForm) -> (Masks, Value, Cache) {
        let dims = [1, 1, form.rows as u64, form.n_columns() as u64].map(Some);
        let mask = self.graph.parameter("attention_mask", ElementType::F32, &dims);
        let dims = self.row_dims();
        let position_ids = self.graph.parameter("position_ids", ElementType::I64, &dims);
        (Masks::Given(form, mask), position_ids, Cache::Input(form))
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
        let k = self.remember(context, k, (layer, "key"))?;
        let v = self.remember(context, v, (layer, "value"))?;
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

    /// Appends keys or values of the rows to a layer's cache; returns past and present together.
    fn remember(
        &mut self,
        context: &AttentionContext,
        value: Value,
        (layer, part): (usize, &str),
    ) -> io::Result<Value> {
        let dims = &self.config.dims;
        let (n_kv_heads, head_dim) = (Some(dims.n_kv_heads as u64), Some(dims.head_dim as u64));
        let (past_name, name) =
            (format!("past_key_values.{layer}.{part}"), format!("present.{layer}.{part}"));
        match context.cache {
            Cache::State { beam_idx, empty } => {
                let variable = past_name + &name;
                let past =
                    self.graph.read_value(empty, &variable, &[None, n_kv_heads, None, head_dim]);
                let past = self.graph.gather(past, beam_idx, 0)?;
                let all = self.graph.concat(&[past, value], 2);
                self.graph.assign(all, &variable);
                Ok(all)
            }
            Cache::Input(form) => {
                let shape = [Some(1), n_kv_heads, Some(form.n_cached() as u64), head_dim];
                let past = self.graph.parameter(&past_name, ElementType::F32, &shape);
                self.graph.result(&name, value);
                Ok(self.graph.concat(&[past, value], 2))
            }
        }
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
