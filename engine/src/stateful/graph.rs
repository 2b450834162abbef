//! The inputs and the output of a stage graph, shared by all sessions.
//!
//! All tensors are the backend's own and are given to each request for the length of an
//! inference, so a session keeps nothing but its KV cache.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::inputs::{InputNames, RowInput};
use crate::load::{GraphMismatch, LoadError};
use crate::openvino::{CompiledModel, InferRequest, InferenceError, Placed, Tensor};
use crate::stage::StageSpec;
use crate::stateful::slots::Slots;

/// Rows of one session, checked.
#[derive(Debug)]
pub(super) struct Rows<'a> {
    /// Position of the first row.
    pub(super) start_pos: usize,
    /// Token of each row.
    pub(super) tokens: &'a [u32],
    /// Hidden states `[n_rows, hidden_dim]`; only for a stage that is not the first.
    pub(super) hidden: Option<&'a [f32]>,
    /// Rows whose logits are wanted; only for the last stage.
    pub(super) wanted: &'a [u32],
}

/// Tensors and places of the inputs, and the output.
#[derive(Debug)]
pub(super) struct Graph {
    rows: RowInput,
    attention_mask: Placed<i64>,
    position_ids: Placed<i64>,
    beam_idx: Placed<i32>,
    logit_rows: Option<Placed<i64>>,
    output: Tensor<f32>,
    hidden_dim: usize,
    row_width: usize,
}

impl Graph {
    /// Finds the inputs of a compiled stage.
    pub(super) fn new(
        model: &CompiledModel,
        xml: &Path,
        spec: &StageSpec,
    ) -> Result<Self, LoadError> {
        let inspect = |source| LoadError::Inspect { xml: xml.to_owned(), source };
        let found = model.n_outputs().map_err(inspect)?;
        if found != 1 {
            let what = GraphMismatch::Outputs { expected: 1, found };
            return Err(LoadError::Graph { xml: xml.to_owned(), what });
        }
        let rows_name = RowInput::name(spec);
        let mut known = vec![rows_name, "attention_mask", "position_ids", "beam_idx"];
        if spec.is_last() {
            known.push("logit_rows");
        }
        let names = InputNames::read(model, xml, &known)?;
        let mut beam_idx = Placed::new(names.place("beam_idx")?).map_err(inspect)?;
        beam_idx.tensor.reshape(&[1]).map_err(inspect)?[0] = 0;
        let logit_rows = match spec.is_last() {
            true => Some(Placed::new(names.place("logit_rows")?).map_err(inspect)?),
            false => None,
        };
        Ok(Self {
            rows: RowInput::empty(spec, names.place(rows_name)?).map_err(inspect)?,
            attention_mask: Placed::new(names.place("attention_mask")?).map_err(inspect)?,
            position_ids: Placed::new(names.place("position_ids")?).map_err(inspect)?,
            beam_idx,
            logit_rows,
            output: Tensor::new().map_err(inspect)?,
            hidden_dim: spec.hidden_dim,
            row_width: if spec.is_last() { spec.n_head_rows } else { spec.hidden_dim },
        })
    }

    /// Numbers of an output row.
    pub(super) fn row_width(&self) -> usize {
        self.row_width
    }

    /// The output of the last inference, row-major.
    pub(super) fn output(&self) -> Result<&[f32], InferenceError> {
        self.output.values()
    }

    /// Runs rows in a request and returns the time of the inference alone. `slots` must hold the
    /// rows already.
    pub(super) fn infer(
        &mut self,
        request: &mut InferRequest,
        slots: &Slots,
        rows: &Rows<'_>,
    ) -> Result<Duration, InferenceError> {
        let n_rows = rows.tokens.len();
        match &mut self.rows {
            RowInput::Tokens(placed) => {
                placed.write(&[1, n_rows], rows.tokens.iter().map(|&token| i64::from(token)))?;
            }
            RowInput::Hidden(placed) => {
                let to = placed.tensor.reshape(&[1, n_rows, self.hidden_dim])?;
                to.copy_from_slice(rows.hidden.unwrap_or_default());
            }
        }
        slots.write_mask(self.attention_mask.tensor.reshape(&[1, slots.physical()])?);
        let positions = rows.start_pos..rows.start_pos + n_rows;
        self.position_ids.write(&[1, n_rows], positions.map(|position| position as i64))?;
        let mut inputs = vec![
            self.rows.input(),
            self.attention_mask.input(),
            self.position_ids.input(),
            self.beam_idx.input(),
        ];
        if let Some(logit_rows) = &mut self.logit_rows {
            logit_rows
                .write(&[rows.wanted.len()], rows.wanted.iter().map(|&row| i64::from(row)))?;
            inputs.push(logit_rows.input());
        }
        let started = Instant::now();
        request.infer(&inputs, &mut [self.output.output(0)])?;
        Ok(started.elapsed())
    }
}
