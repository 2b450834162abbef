//! The configuration of a model folder, field by field, so that an error can name the field.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::{HfError, HfErrorKind};
use super::{CONFIG_FILE, GENERATION_CONFIG_FILE};
use crate::bounded;

/// What a model folder says beside its weights.
#[derive(Debug)]
pub(crate) struct FolderConfig {
    /// What the model is.
    pub(crate) model: ConfigJson,
    /// How to generate with it, if a file says so.
    generation: Option<ConfigJson>,
}

impl FolderConfig {
    /// Reads the files of a folder.
    ///
    /// # Errors
    /// [`HfErrorKind::Io`] or [`HfErrorKind::Json`].
    pub(crate) fn read(dir: &Path) -> Result<Self, HfError> {
        let model = ConfigJson::read(&dir.join(CONFIG_FILE))?;
        let generation = dir.join(GENERATION_CONFIG_FILE);
        let generation = generation.is_file().then(|| ConfigJson::read(&generation)).transpose()?;
        Ok(Self { model, generation })
    }

    /// The token that begins a text, if the model has one.
    pub(crate) fn bos_token(&self) -> Result<Option<u32>, HfError> {
        Ok(self.model.tokens("bos_token_id")?.first().copied())
    }

    /// All tokens after which generation is over, ascending. Instruction-tuned models tell the end
    /// of a turn in the second file only.
    pub(crate) fn eos_tokens(&self) -> Result<Vec<u32>, HfError> {
        let mut tokens = self.model.tokens("eos_token_id")?;
        if let Some(generation) = &self.generation {
            tokens.extend(generation.tokens("eos_token_id")?);
        }
        tokens.sort_unstable();
        tokens.dedup();
        Ok(tokens)
    }
}

/// The fields of a file in JSON.
#[derive(Debug)]
pub(crate) struct ConfigJson {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl ConfigJson {
    /// Reads the file.
    ///
    /// # Errors
    /// [`HfErrorKind::Io`] or [`HfErrorKind::Json`].
    pub(crate) fn read(path: &Path) -> Result<Self, HfError> {
        let failed = |kind| HfError::new(path, kind);
        let json = bounded::read(path, bounded::MAX_MANIFEST_BYTES)
            .map_err(|source| failed(HfErrorKind::Io { source }))?;
        let fields =
            serde_json::from_slice(&json).map_err(|source| failed(HfErrorKind::Json { source }))?;
        Ok(Self { path: path.to_owned(), fields })
    }

    /// A positive whole number.
    pub(crate) fn size(&self, field: &'static str) -> Result<usize, HfError> {
        match self.optional_size(field)? {
            Some(size) => Ok(size),
            None => Err(self.unsupported(field, "a positive number")),
        }
    }

    /// A positive whole number that may be absent.
    pub(crate) fn optional_size(&self, field: &'static str) -> Result<Option<usize>, HfError> {
        let Some(value) = self.present(field) else { return Ok(None) };
        // Sizes are dimensions of tensors: products of a few of them must not overflow.
        match value.as_u64() {
            Some(size @ 1..=0xffff_ffff) => Ok(Some(size as usize)),
            _ => Err(self.unsupported(field, "a positive number of at most 32 bits")),
        }
    }

    /// A finite number above zero; `default` if it is absent.
    pub(crate) fn float(&self, field: &'static str, default: f32) -> Result<f32, HfError> {
        let Some(value) = self.present(field) else { return Ok(default) };
        match value.as_f64() {
            Some(float) if float > 0.0 && (float as f32).is_finite() => Ok(float as f32),
            _ => Err(self.unsupported(field, "a number above 0")),
        }
    }

    /// A finite number above zero that may be absent.
    pub(crate) fn optional_float(&self, field: &'static str) -> Result<Option<f32>, HfError> {
        match self.present(field) {
            Some(_) => self.float(field, 0.0).map(Some),
            None => Ok(None),
        }
    }

    /// A whole number; `default` if it is absent.
    pub(crate) fn count(&self, field: &'static str, default: usize) -> Result<usize, HfError> {
        let Some(value) = self.present(field) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| self.unsupported(field, "a whole number"))
    }

    /// A text that may be absent.
    pub(crate) fn text(&self, field: &'static str) -> Result<Option<&str>, HfError> {
        let Some(value) = self.present(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.unsupported(field, "a text"))
    }

    /// Yes or no; `default` if it is absent.
    pub(crate) fn flag(&self, field: &'static str, default: bool) -> Result<bool, HfError> {
        let Some(value) = self.present(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.unsupported(field, "true or false"))
    }

    /// One token id or a list of them; none if it is absent.
    pub(crate) fn tokens(&self, field: &'static str) -> Result<Vec<u32>, HfError> {
        let Some(value) = self.present(field) else { return Ok(Vec::new()) };
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
        let tokens: Option<Vec<u32>> = values.iter().map(token).collect();
        tokens.ok_or_else(|| self.unsupported(field, "a token id or a list of them"))
    }

    /// The value of a field; `null` counts as absent.
    pub(crate) fn present(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// The error for a field that has another value than expected, or none.
    pub(crate) fn unsupported(&self, field: &'static str, expected: &'static str) -> HfError {
        let found = self.present(field).map_or_else(|| "absent".to_owned(), Value::to_string);
        HfError::new(&self.path, HfErrorKind::Field { field, found, expected })
    }
}
