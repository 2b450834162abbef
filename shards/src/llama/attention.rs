//! Rotary positions, the causal mask, and attention over a cache that the graph keeps as state.

use std::io;

use super::stage::StageBuilder;
use crate::ir::element::ElementType;
use crate::ir::graph::Value;

/// What a masked position's score becomes: exp() of it is zero in every inference precision.
const MASKED: f32 = -65504.0;

/// What every layer of a stage needs for its attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionContext {
    /// Cosines of the rotary angles, f32 `[B, 1, T, rotary_dim]`.
    pub(crate) cos: Value,
    /// Sines, likewise.
    pub(crate) sin: Value,
    /// Added to the scores, f32 `[B, 1, T, past + T]`.
    pub(crate) mask: Value,
    /// Which row of the cache each row of the batch continues, i32 `[B]`.
    pub(crate) beam_idx: Value,
    /// An empty cache, f32 `[B, n_kv_heads, 0, head_dim]`.
    pub(crate) empty_cache: Value,
}

impl StageBuilder<'_> {
    /// Builds what the layers share.
    ///
    /// **Shape**: `input` is the stage's first input, `[B, T, ..]`.
    pub(crate) fn attention_context(&mut self, input: Value) -> io::Result<AttentionContext> {
        let mask = self.graph.parameter("attention_mask", ElementType::I64, &[None, None]);
        let position_ids = self.graph.parameter("position_ids", ElementType::I64, &[None, None]);
        let beam_idx = self.graph.parameter("beam_idx", ElementType::I32, &[None]);
        self.graph.scope("rope");
        let (cos, sin) = self.rotary_tables(position_ids)?;
        self.graph.scope("mask");
        let mask = self.causal_mask(input, mask)?;
        self.graph.scope("cache");
        let empty_cache = self.empty_cache(input)?;
        Ok(AttentionContext { cos, sin, mask, beam_idx, empty_cache })
    }

    /// Cosines and sines of `position * frequency`, the frequencies repeated for both halves.
    fn rotary_tables(&mut self, position_ids: Value) -> io::Result<(Value, Value)> {
        let frequencies = self.rotary_frequencies();
        let n_pairs = frequencies.len() as u64;
        let positions = self.graph.convert(position_ids, ElementType::F32);
        let positions = self.graph.unsqueeze(positions, &[-1])?;
        let frequencies = self.graph.f32s(&[1, 1, n_pairs], &frequencies)?;
        let angles = self.graph.multiply(positions, frequencies);
        let angles = self.graph.concat(&[angles, angles], -1);
        let (cos, sin) = (self.graph.cos(angles), self.graph.sin(angles));
        Ok((self.graph.unsqueeze(cos, &[1])?, self.graph.unsqueeze(sin, &[1])?))
    }

    fn rotary_frequencies(&self) -> Vec<f32> {
        let rotary_dim = self.config.rotary_dim;
        let divisors = self.tensors.rope_divisors.map(|tensor| tensor.floats());
        (0..rotary_dim / 2)
            .map(|pair| {
                let exponent = -2.0 * pair as f64 / rotary_dim as f64;
                let divisor = divisors.as_ref().map_or(1.0, |divisors| f64::from(divisors[pair]));
                let base = f64::from(self.config.rope_base);
                (base.powf(exponent) / divisor / f64::from(self.config.rope_factor)) as f32
            })
            .collect()
    }

    /// A row sees the cache slots that `attention_mask` names, up to its own.
    fn causal_mask(&mut self, input: Value, attention_mask: Value) -> io::Result<Value> {
        let graph = &mut self.graph;
        let one = graph.i64(1)?;
        let shape = graph.shape_of(input);
        let n_rows = graph.gather(shape, one, 0)?;
        let shape = graph.shape_of(attention_mask);
        let n_slots = graph.gather(shape, one, 0)?;
        let n_past = graph.subtract(n_slots, n_rows);
        let zero = graph.i64(0)?;
        let slots = graph.range(zero, n_slots)?;
        let slots = graph.unsqueeze(slots, &[0])?;
        let rows = graph.range(n_past, n_slots)?;
        let rows = graph.unsqueeze(rows, &[1])?;
        let causal = graph.less_equal(slots, rows);
        let causal = graph.unsqueeze(causal, &[0, 1])?;
        let named = graph.convert(attention_mask, ElementType::Boolean);
        let named = graph.unsqueeze(named, &[1, 2])?;
        let visible = graph.logical_and(causal, named);
        let yes = graph.f32s(&[], &[0.0])?;
        let no = graph.f32s(&[], &[MASKED])?;
        Ok(graph.select(visible, yes, no))
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
    ) -> io::Result<Value> {
        let (n_heads, n_kv_heads) = (self.config.dims.n_heads, self.config.dims.n_kv_heads);
        let q = self.heads(q, n_heads)?;
        let k = self.heads(k, n_kv_heads)?;
        let v = self.heads(v, n_kv_heads)?;
        let q = self.rotate(q, context)?;
        let k = self.rotate(k, context)?;
        let k =
            self.remember(context, k, &format!("past_key_values.{layer}.keypresent.{layer}.key"))?;
        let v = self.remember(
            context,
            v,
            &format!("past_key_values.{layer}.valuepresent.{layer}.value"),
        )?;
        let k = self.repeat_heads(k)?;
        let v = self.repeat_heads(v)?;
        let attended = self.graph.attention(q, k, v, context.mask);
        let attended = self.graph.transpose(attended, &[0, 2, 1, 3])?;
        self.graph.reshape(attended, &[0, 0, (n_heads * self.config.dims.head_dim) as i64])
    }

    /// `[B, T, heads * head_dim]` to `[B, heads, T, head_dim]`.
    fn heads(&mut self, value: Value, n_heads: usize) -> io::Result<Value> {
        let head_dim = self.config.dims.head_dim as i64;
        let value = self.graph.reshape(value, &[0, 0, n_heads as i64, head_dim])?;
        self.graph.transpose(value, &[0, 2, 1, 3])
    }

    /// Rotates the first `rotary_dim` dimensions of each head, the first half against the second.
    fn rotate(&mut self, value: Value, context: &AttentionContext) -> io::Result<Value> {
        let (rotary_dim, head_dim) =
            (self.config.rotary_dim as i64, self.config.dims.head_dim as i64);
        let graph = &mut self.graph;
        let rotary =
            if rotary_dim == head_dim { value } else { graph.slice(value, -1, 0..rotary_dim)? };
        let first = graph.slice(rotary, -1, 0..rotary_dim / 2)?;
        let second = graph.slice(rotary, -1, rotary_dim / 2..rotary_dim)?;
        let minus_one = graph.f32s(&[1, 1, 1, 1], &[-1.0])?;
        let second = graph.multiply(second, minus_one);
        let turned = graph.concat(&[second, first], -1);
        let straight = graph.multiply(rotary, context.cos);
        let turned = graph.multiply(turned, context.sin);
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
