//! The graph of one stage.

use std::io;
use std::ops::Range;

use super::config::DecoderConfig;
use super::linear::Input;
use super::tensors::{DecoderTensors, Projection};
use crate::floats::FloatPlan;
use crate::form::Form;
use crate::ir::bin::BinWriter;
use crate::ir::element::ElementType;
use crate::ir::graph::{Dim, Graph, Value};
use crate::manifest::WeightMode;
use crate::shard::OnConverted;
use crate::source::Source;
use crate::weights::store::Stored;

/// A stage graph under construction.
pub(crate) struct StageBuilder<'a> {
    pub(crate) source: &'a Source,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) tensors: &'a DecoderTensors<'a>,
    pub(crate) weights: WeightMode,
    pub(crate) floats: &'a FloatPlan,
    pub(crate) form: Form,
    pub(crate) graph: Graph,
    pub(crate) on_converted: &'a mut OnConverted<'a>,
}

/// What all stages of a model are built from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model<'a> {
    pub(crate) source: &'a Source,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) tensors: &'a DecoderTensors<'a>,
    pub(crate) weights: WeightMode,
    pub(crate) floats: &'a FloatPlan,
    pub(crate) form: Form,
}

/// Writes the weights of one stage and builds its graph.
///
/// **Shape**: inputs `input_ids` i64 `[B, T]` (first stage) or `inputs_embeds` f32
/// `[B, T, hidden_dim]`, `attention_mask` i64 `[B, past + T]`, `position_ids` i64 `[B, T]`,
/// `beam_idx` i32 `[B]`, and in the last stage `logit_rows` i64 `[R]`, which counts rows over the
/// whole batch (`B * T`). Output `hidden_states` f32 `[B, T, hidden_dim]`, or `logits` f32
/// `[R, vocab_size]` of the rows asked for.
///
/// In the static form `B` is 1 and `T` the form's `rows`; `attention_mask` is f32
/// `[1, 1, T, n_columns]` and is added to the scores as it is; there is neither `beam_idx` nor
/// `logit_rows`, and `logits` has all `T` rows. The caches of each layer are the inputs
/// `past_key_values.L.key` and `.value`, f32 `[1, n_kv_heads, n_cached, head_dim]`, and the outputs
/// `present.L.key` and `.value` of the rows of the call, f32 `[1, n_kv_heads, T, head_dim]`.
///
/// # Errors
/// The weight file cannot be written.
pub(crate) fn build_stage<'a>(
    model: Model<'a>,
    layers: Range<usize>,
    bin: BinWriter,
    on_converted: &'a mut OnConverted<'a>,
) -> io::Result<Graph> {
    let Model { source, config, tensors, weights, floats, form } = model;
    let graph = Graph::new(bin);
    let mut stage =
        StageBuilder { source, config, tensors, weights, floats, form, graph, on_converted };
    let is_first = layers.start == 0;
    let is_last = layers.end == config.dims.n_layers;
    let hidden_dim = config.dims.hidden_dim;

    let mut table = None;
    let input = if is_first {
        let dims = stage.row_dims();
        stage.graph.parameter("input_ids", ElementType::I64, &dims)
    } else {
        let [n_batch, n_rows] = stage.row_dims();
        let dims = [n_batch, n_rows, Some(hidden_dim as u64)];
        stage.graph.parameter("inputs_embeds", ElementType::F32, &dims)
    };
    let context = stage.attention_context(input, layers.clone())?;
    let mut hidden = input;
    if is_first {
        stage.graph.scope("embedding");
        let stored = stage.store(&[Projection::plain(tensors.embedding)])?;
        table = Some(stored);
        hidden = stage.embed(input, stored)?;
        if config.family.scaled_embedding {
            let scale = stage.graph.f32s(&[], &[(hidden_dim as f64).sqrt() as f32])?;
            hidden = stage.graph.multiply(hidden, scale);
        }
    }
    for layer in layers {
        hidden = stage.layer(layer, &context, hidden)?;
        stage.release_all();
    }
    if is_last {
        let logit_rows = match form {
            Form::Stateful => Some(stage.graph.parameter("logit_rows", ElementType::I64, &[None])),
            Form::Static(_) => None,
        };
        stage.graph.scope("head");
        let logits = stage.head(hidden, logit_rows, table)?;
        stage.graph.result("logits", logits);
    } else {
        stage.graph.result("hidden_states", hidden);
    }
    Ok(stage.graph)
}

impl StageBuilder<'_> {
    /// The dimensions of what has a number for each row: `[B, T]`.
    pub(super) fn row_dims(&self) -> [Dim; 2] {
        match self.form {
            Form::Stateful => [None, None],
            Form::Static(form) => [Some(1), Some(form.rows as u64)],
        }
    }

    /// Gives all mapped pages back to the system.
    ///
    /// A fault maps neighbouring pages too, so releasing tensor by tensor leaves some pages at
    /// every tensor's edge: about a megabyte a layer.
    fn release_all(&self) {
        self.source.release_all();
    }

    /// Looks tokens up in the embedding table.
    fn embed(&mut self, ids: Value, table: Stored) -> io::Result<Value> {
        let graph = &mut self.graph;
        let ids = graph.convert(ids, ElementType::I32);
        let rows = graph.gather(table.weights, ids, 0)?;
        let Some(correction) = table.correction else { return Ok(rows) };
        // The correction is constant in each group of columns: add it group by group.
        let hidden_dim = self.config.dims.hidden_dim;
        let n_groups = (hidden_dim / correction.group_len) as i64;
        let values = graph.gather(correction.values, ids, 0)?;
        let values = graph.unsqueeze(values, &[-1])?;
        let rows = graph.reshape(rows, &[0, 0, n_groups, correction.group_len as i64])?;
        let rows = graph.add_values(rows, values);
        graph.reshape(rows, &[0, 0, hidden_dim as i64])
    }

    /// The logits of the chosen rows, or of all, `[R, n_head_rows]`.
    fn head(
        &mut self,
        hidden: Value,
        logit_rows: Option<Value>,
        table: Option<Stored>,
    ) -> io::Result<Value> {
        let hidden_dim = self.config.dims.hidden_dim;
        let mut rows = self.graph.reshape(hidden, &[-1, hidden_dim as i64])?;
        if let Some(logit_rows) = logit_rows {
            rows = self.graph.gather(rows, logit_rows, 0)?;
        }
        let rows = self.graph.unsqueeze(rows, &[0])?;
        let normed = self.rms_norm(rows, self.tensors.output_norm)?;
        let mut normed = Input::new(normed, hidden_dim);
        let head = self.tensors.head;
        let logits = match table {
            // One stage and a tied head: the table is in the file already.
            Some(table) if self.tensors.head_is_embedding() => {
                self.product_of(&mut normed, table, None)?
            }
            _ => self.project(&mut normed, &[head])?[0],
        };
        let logits = self.capped(logits)?;
        self.graph.reshape(logits, &[-1, head.n_rows as i64])
    }

    /// Keeps logits below the model's cap, if it has one.
    fn capped(&mut self, logits: Value) -> io::Result<Value> {
        let Some(cap) = self.config.logit_cap else { return Ok(logits) };
        let cap = self.graph.f32s(&[], &[cap])?;
        let share = self.graph.divide(logits, cap);
        let share = self.graph.tanh(share);
        Ok(self.graph.multiply(share, cap))
    }
}
