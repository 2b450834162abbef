//! A compiled static graph: its inputs, its outputs and the caches that go in.

use std::path::Path;
use std::time::{Duration, Instant};

use stagebus_shards::StaticForm;

use super::calls::{Piece, write_mask};
use crate::backend::StepRows;
use crate::inputs::{InputNames, RowInput};
use crate::load::{GraphMismatch, LoadError};
use crate::openvino::{CompiledModel, InferRequest, InferenceError, Placed};
use crate::stage::StageSpec;

/// Keys and values of every layer, for all slots of a call.
pub(super) type Caches = Vec<Placed<f32>>;

/// Tensors and places of inputs and outputs, and the only request.
#[derive(Debug)]
pub(super) struct Graph {
    rows: RowInput,
    mask: Placed<f32>,
    position_ids: Placed<i64>,
    /// Hidden states or logits of all rows.
    output: Placed<f32>,
    /// Keys and values of the rows, in the order of [`Self::cache_places`].
    present: Vec<Placed<f32>>,
    /// Places of the caches among the inputs.
    cache_places: Vec<usize>,
    form: StaticForm,
    n_kv_heads: usize,
    head_dim: usize,
    hidden_dim: usize,
    row_width: usize,
    request: InferRequest,
}

impl Graph {
    /// Finds the inputs and outputs of a compiled stage.
    pub(super) fn new(
        model: &CompiledModel,
        xml: &Path,
        spec: &StageSpec,
        form: StaticForm,
    ) -> Result<Self, LoadError> {
        let inspect = |source| LoadError::Inspect { xml: xml.to_owned(), source };
        let mismatch = |what| LoadError::Graph { xml: xml.to_owned(), what };
        let outputs = model.output_names().map_err(inspect)?;
        let rows_name = RowInput::name(spec);
        let output_name = if spec.is_last() { "logits" } else { "hidden_states" };
        let caches = cache_names(spec, "past_key_values");
        let present = cache_names(spec, "present");
        let mut known = vec![rows_name, "attention_mask", "position_ids"];
        known.extend(caches.iter().map(String::as_str));
        let inputs = InputNames::read(model, xml, &known)?;
        let (expected, found) = (present.len() + 1, outputs.len());
        if found != expected {
            return Err(mismatch(GraphMismatch::Outputs { expected, found }));
        }
        let output = |name: &str| {
            let index = outputs.iter().position(|found| found == name);
            index.ok_or_else(|| mismatch(GraphMismatch::MissingOutput { name: name.to_owned() }))
        };
        let StaticForm { rows: n_rows, .. } = form;
        let row_width = if spec.is_last() { spec.n_head_rows } else { spec.hidden_dim };
        let rows = RowInput::zeroed(spec, inputs.place(rows_name)?, n_rows);
        // Logits come as rows, hidden states as a batch of one sequence.
        let output_dims: &[usize] =
            if spec.is_last() { &[n_rows, row_width] } else { &[1, n_rows, row_width] };
        let present = present
            .iter()
            .map(|name| {
                let dims = [1, spec.n_kv_heads, n_rows, spec.head_dim];
                Placed::zeroed(output(name)?, &dims).map_err(inspect)
            })
            .collect::<Result<_, _>>()?;
        let mask_dims = [1, 1, n_rows, form.n_columns()];
        let position_ids = inputs.place("position_ids")?;
        Ok(Self {
            rows: rows.map_err(inspect)?,
            mask: Placed::zeroed(inputs.place("attention_mask")?, &mask_dims).map_err(inspect)?,
            position_ids: Placed::zeroed(position_ids, &[1, n_rows]).map_err(inspect)?,
            output: Placed::zeroed(output(output_name)?, output_dims).map_err(inspect)?,
            present,
            cache_places: caches.iter().map(|name| inputs.place(name)).collect::<Result<_, _>>()?,
            form,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            hidden_dim: spec.hidden_dim,
            row_width,
            request: model.request().map_err(inspect)?,
        })
    }

    /// Empty caches for all slots of a call.
    pub(super) fn caches(&self) -> Result<Caches, InferenceError> {
        let dims = [1, self.n_kv_heads, self.form.n_cached(), self.head_dim];
        self.cache_places.iter().map(|place| Placed::zeroed(*place, &dims)).collect()
    }

    /// Memory of [`Self::caches`], in bytes.
    pub(super) fn cache_bytes(&self) -> u64 {
        let n_values = self.n_kv_heads * self.form.n_cached() * self.head_dim;
        (self.cache_places.len() * n_values * size_of::<f32>()) as u64
    }

    /// Numbers of an output row.
    pub(super) fn row_width(&self) -> usize {
        self.row_width
    }

    /// The rows that the last call gave, row-major; those that nobody asked for too.
    pub(super) fn output(&self) -> Result<&[f32], InferenceError> {
        self.output.tensor.values()
    }

    /// Runs a call, puts the keys and values of its rows into the caches, and returns the time of
    /// the inference alone.
    pub(super) fn infer(
        &mut self,
        caches: &mut [Placed<f32>],
        pieces: &[Piece],
        steps: &[StepRows<'_>],
    ) -> Result<Duration, InferenceError> {
        self.write_rows(pieces, steps)?;
        write_mask(self.form, pieces, self.mask.tensor.values_mut()?);
        let mut inputs = vec![self.rows.input(), self.mask.input(), self.position_ids.input()];
        inputs.extend(caches.iter().map(Placed::input));
        let mut outputs = vec![self.output.output()];
        outputs.extend(self.present.iter_mut().map(Placed::output));
        let started = Instant::now();
        self.request.infer(&inputs, &mut outputs)?;
        let infer_time = started.elapsed();
        self.keep(caches, pieces)?;
        Ok(infer_time)
    }

    /// Puts the first rows of a slot behind `part`, from the cache of one layer and part.
    pub(super) fn read(
        &self,
        cache: &Placed<f32>,
        (slot, n_rows): (usize, usize),
        part: &mut Vec<f32>,
    ) -> Result<(), InferenceError> {
        let all = cache.tensor.values()?;
        for head in 0..self.n_kv_heads {
            part.extend_from_slice(&all[self.columns(head, slot, 0, n_rows)]);
        }
        Ok(())
    }

    /// Makes what [`Self::read`] read the first rows of a slot.
    pub(super) fn write(
        &self,
        cache: &mut Placed<f32>,
        (slot, n_rows): (usize, usize),
        part: &[f32],
    ) -> Result<(), InferenceError> {
        let all = cache.tensor.values_mut()?;
        for (head, values) in part.chunks_exact(n_rows * self.head_dim).enumerate() {
            all[self.columns(head, slot, 0, n_rows)].copy_from_slice(values);
        }
        Ok(())
    }

    fn write_rows(
        &mut self,
        pieces: &[Piece],
        steps: &[StepRows<'_>],
    ) -> Result<(), InferenceError> {
        let positions = self.position_ids.tensor.values_mut()?;
        positions.fill(0);
        for piece in pieces {
            let to = &mut positions[piece.row..][..piece.n_rows];
            to.iter_mut().zip(piece.position..).for_each(|(to, position)| *to = position as i64);
        }
        match &mut self.rows {
            RowInput::Tokens(rows) => {
                let ids = rows.tensor.values_mut()?;
                ids.fill(0);
                for piece in pieces {
                    let tokens = &steps[piece.step].tokens[piece.first..];
                    let to = &mut ids[piece.row..][..piece.n_rows];
                    to.iter_mut().zip(tokens).for_each(|(to, token)| *to = i64::from(*token));
                }
            }
            RowInput::Hidden(rows) => {
                let (width, all) = (self.hidden_dim, rows.tensor.values_mut()?);
                all.fill(0.0);
                for piece in pieces {
                    let hidden = steps[piece.step].hidden.unwrap_or_default();
                    let from = &hidden[piece.first * width..][..piece.n_rows * width];
                    all[piece.row * width..][..from.len()].copy_from_slice(from);
                }
            }
        }
        Ok(())
    }

    /// Copies keys and values of a call into the caches.
    fn keep(&self, caches: &mut [Placed<f32>], pieces: &[Piece]) -> Result<(), InferenceError> {
        for (cache, present) in caches.iter_mut().zip(&self.present) {
            let (all, new) = (cache.tensor.values_mut()?, present.tensor.values()?);
            for head in 0..self.n_kv_heads {
                for piece in pieces {
                    let from = (head * self.form.rows + piece.row) * self.head_dim;
                    let to = self.columns(head, piece.slot, piece.position, piece.n_rows);
                    let n_values = to.len();
                    all[to].copy_from_slice(&new[from..][..n_values]);
                }
            }
        }
        Ok(())
    }

    /// Where the numbers of positions of a slot are in the cache of one layer and part.
    fn columns(
        &self,
        head: usize,
        slot: usize,
        position: usize,
        n_rows: usize,
    ) -> std::ops::Range<usize> {
        let first = head * self.form.n_cached() + slot * self.form.window + position;
        first * self.head_dim..(first + n_rows) * self.head_dim
    }
}

/// Names of the caches of a stage: of each layer the keys, then the values.
fn cache_names(spec: &StageSpec, prefix: &str) -> Vec<String> {
    let parts = |layer| ["key", "value"].map(|part| format!("{prefix}.{layer}.{part}"));
    spec.layers.clone().flat_map(parts).collect()
}
