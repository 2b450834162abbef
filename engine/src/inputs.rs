//! The inputs of a compiled stage: their places by name, and the one that takes its rows.

use std::path::Path;

use crate::load::{GraphMismatch, LoadError};
use crate::openvino::{CompiledModel, InferenceError, Input, Placed};
use crate::stage::StageSpec;

/// Names of the inputs of a compiled stage, in their order.
#[derive(Debug)]
pub(crate) struct InputNames<'a> {
    xml: &'a Path,
    names: Vec<String>,
}

impl<'a> InputNames<'a> {
    /// Reads the names of `model`, compiled from `xml`.
    ///
    /// # Errors
    /// [`LoadError::Graph`] for an input that is not among `known`.
    pub(crate) fn read(
        model: &CompiledModel,
        xml: &'a Path,
        known: &[&str],
    ) -> Result<Self, LoadError> {
        let inspect = |source| LoadError::Inspect { xml: xml.to_owned(), source };
        let names = model.input_names().map_err(inspect)?;
        if let Some(name) = names.iter().find(|name| !known.contains(&name.as_str())) {
            let what = GraphMismatch::UnknownInput { name: name.clone() };
            return Err(LoadError::Graph { xml: xml.to_owned(), what });
        }
        Ok(Self { xml, names })
    }

    /// Place of the input `name`.
    ///
    /// # Errors
    /// [`LoadError::Graph`] if the stage has no such input.
    pub(crate) fn place(&self, name: &str) -> Result<usize, LoadError> {
        let index = self.names.iter().position(|found| found == name);
        index.ok_or_else(|| {
            let what = GraphMismatch::MissingInput { name: name.to_owned() };
            LoadError::Graph { xml: self.xml.to_owned(), what }
        })
    }
}

/// The input that takes the rows of a stage.
#[derive(Debug)]
pub(crate) enum RowInput {
    /// Token ids, on the first stage.
    Tokens(Placed<i64>),
    /// Hidden states, on later stages.
    Hidden(Placed<f32>),
}

impl RowInput {
    /// Name of the input.
    pub(crate) fn name(spec: &StageSpec) -> &'static str {
        if spec.is_first() { "input_ids" } else { "inputs_embeds" }
    }

    /// The input at `place`, with no rows.
    pub(crate) fn empty(spec: &StageSpec, place: usize) -> Result<Self, InferenceError> {
        match spec.is_first() {
            true => Placed::new(place).map(Self::Tokens),
            false => Placed::new(place).map(Self::Hidden),
        }
    }

    /// The input at `place` with `n_rows` rows of zeros.
    pub(crate) fn zeroed(
        spec: &StageSpec,
        place: usize,
        n_rows: usize,
    ) -> Result<Self, InferenceError> {
        match spec.is_first() {
            true => Placed::zeroed(place, &[1, n_rows]).map(Self::Tokens),
            false => Placed::zeroed(place, &[1, n_rows, spec.hidden_dim]).map(Self::Hidden),
        }
    }

    /// The tensor, for an inference.
    pub(crate) fn input(&self) -> Input<'_> {
        match self {
            Self::Tokens(placed) => placed.input(),
            Self::Hidden(placed) => placed.input(),
        }
    }
}
