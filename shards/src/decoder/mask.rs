//! Which cached positions a row sees.
//!
//! SDPAToPagedAttention drops these masks and lets the kernel find them: causality always holds
//! there, and the length of a window is read from the mask's own subgraph. Static graphs get the
//! mask of layers without a window as an input.

use std::io;

use super::stage::StageBuilder;
use crate::form::StaticForm;
use crate::ir::element::ElementType;
use crate::ir::graph::Value;

/// What a masked position's score becomes: exp() of it is zero in every inference precision.
const MASKED: f32 = -65504.0;

/// What masks are made of, boolean and broadcastable to `[B, 1, T, past + T]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Visible {
    /// Slots up to a row's own.
    causal: Value,
    /// Slots that `attention_mask` names.
    named: Value,
    /// The input `attention_mask` itself, i64 `[B, past + T]`.
    attention_mask: Value,
}

impl StageBuilder<'_> {
    /// **Shape**: `input` is the stage's first input, `[B, T, ..]`.
    pub(super) fn visible(&mut self, input: Value, attention_mask: Value) -> io::Result<Visible> {
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
        Ok(Visible { causal, named, attention_mask })
    }

    /// A row sees the slots that `attention_mask` names, up to its own.
    pub(super) fn causal_mask(&mut self, visible: Visible) -> io::Result<Value> {
        let seen = self.graph.logical_and(visible.causal, visible.named);
        self.scores_of(seen)
    }

    /// Of those, a row sees the ones whose position is one of the last `len`, its own among them.
    ///
    /// A slot's position is the number of named slots before it, so that slots which a rewind left
    /// behind do not count. Four conjunctions in this order, then a broadcast, a selection and a
    /// slice, are the form in which SDPAToPagedAttention looks for the number `-len`.
    ///
    /// **Source**: `gpt_oss_sliding_window_pattern` in openvinotoolkit/openvino,
    /// `state_management_pattern.cpp`.
    pub(super) fn window_mask(
        &mut self,
        visible: Visible,
        position_ids: Value,
        len: usize,
    ) -> io::Result<Value> {
        let Visible { causal, named, attention_mask } = visible;
        let graph = &mut self.graph;
        let slot_positions = graph.count_before(attention_mask, 1)?;
        let slot_positions = graph.unsqueeze(slot_positions, &[1, 2])?;
        let positions = graph.unsqueeze(position_ids, &[1, 3])?;
        let len = graph.i64(-(len as i64))?;
        let last_unseen = graph.add_values(positions, len);
        let within = graph.greater(slot_positions, last_unseen);
        let mut seen = graph.bitwise_and(causal, within);
        seen = graph.bitwise_and(seen, named);
        seen = graph.bitwise_and(causal, seen);
        seen = graph.bitwise_and(seen, named);
        let same_shape = graph.i64s(&[1, 1, 1, 1])?;
        let seen = graph.broadcast_both(seen, same_shape);
        let mask = self.scores_of(seen)?;
        self.graph.slice(mask, -1, 0..i64::MAX)
    }

    /// The mask of a static graph, without the columns whose position is not one of the last
    /// `len`.
    ///
    /// **Shape**: `mask` and what is returned are f32 `[1, 1, T, n_columns]`.
    pub(super) fn static_window_mask(
        &mut self,
        (form, mask): (StaticForm, Value),
        position_ids: Value,
        len: usize,
    ) -> io::Result<Value> {
        let graph = &mut self.graph;
        // The form says which position is in which column of a slot.
        let cached: Vec<i64> = (0..form.n_cached()).map(|at| (at % form.window) as i64).collect();
        let cached = graph.i64s(&cached)?;
        let cached = graph.unsqueeze(cached, &[0])?;
        let columns = graph.concat(&[cached, position_ids], -1);
        let columns = graph.unsqueeze(columns, &[1, 2])?;
        let positions = graph.unsqueeze(position_ids, &[1, 3])?;
        let len = graph.i64(-(len as i64))?;
        let last_unseen = graph.add_values(positions, len);
        let within = graph.greater(columns, last_unseen);
        let no = graph.f32s(&[], &[MASKED])?;
        Ok(graph.select(within, mask, no))
    }

    /// What is added to scores: nothing where a slot is seen.
    fn scores_of(&mut self, seen: Value) -> io::Result<Value> {
        let yes = self.graph.f32s(&[], &[0.0])?;
        let no = self.graph.f32s(&[], &[MASKED])?;
        Ok(self.graph.select(seen, yes, no))
    }
}
