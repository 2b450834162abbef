//! The manifest of a shard set: what the model is, how it was cut, and the hash of every file.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::floats::FloatCoding;
use crate::form::{Form, FormError};

/// The manifest's file name inside a shard set.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The manifest version that this library writes and reads.
///
/// 1: the first version.
pub const FORMAT_VERSION: u32 = 1;

/// Bytes of an entry of [`Manifest::head_tokens`].
pub const HEAD_TOKEN_BYTES: u64 = 4;

/// The longest model name, in bytes: it is one token of every subject.
pub const MAX_MODEL_NAME_BYTES: usize = 64;

/// How the source's weights are mapped to OpenVINO's compressed weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightMode {
    /// Every weight keeps its exact value; fractional zero points go through a group-sum
    /// correction.
    #[default]
    Exact,
    /// Fractional zero points are re-quantised to eight bits per group of 32 or 16; everything
    /// else is exact.
    NearLossless,
    /// Zero points are rounded to an integer of four bits, as `openvino_genai` does: the smallest
    /// and fastest, but a noticeably different model when the source has fractional zero points.
    Compact,
}

impl WeightMode {
    /// All modes, most faithful first.
    pub const ALL: [Self; 3] = [Self::Exact, Self::NearLossless, Self::Compact];

    /// The name used on the command line and in the manifest.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::NearLossless => "near-lossless",
            Self::Compact => "compact",
        }
    }
}

impl fmt::Display for WeightMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for WeightMode {
    type Err = ManifestError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.as_str() == s)
            .ok_or_else(|| ManifestError::WeightMode { found: s.to_owned() })
    }
}

/// The sizes of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDims {
    /// Transformer layers of the whole model.
    pub n_layers: usize,
    /// Width of what travels between stages: of the residual stream, and of what accompanies it
    /// in models whose later layers read the caches of earlier ones.
    pub hidden_dim: usize,
    /// Query heads of a layer.
    pub n_heads: usize,
    /// Key and value heads of a layer.
    pub n_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rows of the embedding table and of the logits.
    pub vocab_size: usize,
    /// The longest sequence, in tokens: what the model was made for, and in the static form no
    /// longer than its window.
    pub context_length: usize,
}

/// One file of a shard set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// A plain file name, relative to the shard set's folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
}

/// One stage: a contiguous layer range and its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageEntry {
    /// Position in the pipeline, from 0.
    pub index: usize,
    /// The first layer, counted over the whole model.
    pub first_layer: usize,
    /// One past the last layer.
    pub end_layer: usize,
    /// This stage's estimated part of the decode time of the whole model, 0 to 1.
    pub cost_share: f64,
    /// The graph (OpenVINO IR).
    pub xml: FileEntry,
    /// The weights.
    pub bin: FileEntry,
}

/// What `manifest.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// See [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The model's name on the wire: one subject token of `[a-z0-9_-]`.
    pub model: String,
    /// The architecture as the source names it, for example `llama`.
    pub architecture: String,
    /// SHA-256 over everything below and the architecture, see [`Manifest::content_fingerprint`].
    pub fingerprint: String,
    /// File name of the source, for people.
    pub source: String,
    /// How weights that the source stores in integers were mapped.
    pub weights: WeightMode,
    /// How the layers' matrices that the source stores in floats were coded; absent if they stayed
    /// as they were. Older programs refuse the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floats: Option<FloatCoding>,
    /// The form of the graphs; absent for the usual one. Older programs refuse the field.
    #[serde(default, skip_serializing_if = "Form::is_stateful")]
    pub form: Form,
    /// The model's sizes.
    pub dims: ModelDims,
    /// The token that starts a sequence, if the model uses one.
    pub bos_id: Option<u32>,
    /// The tokens that end generation (end of sequence, end of turn).
    pub eos_ids: Vec<u32>,
    /// The stages in pipeline order.
    pub stages: Vec<StageEntry>,
    /// The files that turn text into tokens and back: tokenizer, special tokens, chat template.
    pub text_files: Vec<FileEntry>,
    /// The token of each logits row, if the head has rows for some tokens only: u32 little-endian,
    /// ascending. Such a model can draft but not generate. Older programs refuse the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_tokens: Option<FileEntry>,
}

/// Why a manifest is not valid.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Another format version.
    #[error("format_version is {found}, this program reads version {expected}")]
    Version {
        /// What the manifest says.
        found: u32,
        /// What this library reads.
        expected: u32,
    },
    /// The name cannot be a subject token.
    #[error(
        "model name {name:?} is not a subject token: use 1 to {MAX_MODEL_NAME_BYTES} \
         characters of a-z, 0-9, '-' and '_'"
    )]
    ModelName {
        /// The refused name.
        name: String,
    },
    /// No such weight mode.
    #[error("weight mode {found:?} is none of exact, near-lossless, compact")]
    WeightMode {
        /// The refused value.
        found: String,
    },
    /// The stages do not cover the layers one after the other.
    #[error(
        "stage {stage} covers layers {first_layer}..{end_layer}, expected a non-empty range \
         from layer {expected_first} within {n_layers} layers"
    )]
    Stages {
        /// Position in the list.
        stage: usize,
        /// First layer found.
        first_layer: usize,
        /// End layer found.
        end_layer: usize,
        /// The end of the previous stage.
        expected_first: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// The stages end before the last layer, or there is none.
    #[error("the {n_stages} stages end at layer {end_layer} of {n_layers}")]
    StagesIncomplete {
        /// Stages found.
        n_stages: usize,
        /// Where they end.
        end_layer: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// Shapes that no static graph has.
    #[error(transparent)]
    Form(#[from] FormError),
    /// A static form whose window is not the context length.
    #[error(
        "the static form has a window of {window} positions, context_length is {context_length}"
    )]
    Window {
        /// Positions of the window.
        window: usize,
        /// The context length that the dimensions name.
        context_length: usize,
    },
    /// A file name that leaves the shard set's folder.
    #[error("file name {name:?} is not a plain file name")]
    FileName {
        /// The refused name.
        name: String,
    },
    /// The fingerprint does not belong to this content.
    #[error("fingerprint is {found}, the content gives {expected}")]
    Fingerprint {
        /// What the manifest says.
        found: String,
        /// What its content gives.
        expected: String,
    },
}

impl Manifest {
    /// Number of stages.
    #[must_use]
    pub fn n_stages(&self) -> usize {
        self.stages.len()
    }

    /// Numbers in a row of logits: the vocabulary, or the tokens that a cut head has.
    #[must_use]
    pub fn n_head_rows(&self) -> usize {
        let cut = self.head_tokens.as_ref().map(|file| (file.bytes / HEAD_TOKEN_BYTES) as usize);
        cut.unwrap_or(self.dims.vocab_size)
    }

    /// The fingerprint that this content gives: SHA-256 over the compact JSON of format version,
    /// architecture, weight mode, dimensions, token ids, stages, text files and, if there is one,
    /// the list of head tokens, and the form if it is static.
    ///
    /// The model's name and the source's file name do not count: a renamed model stays the same
    /// model. How floats were coded shows in the stages' files.
    #[must_use]
    pub fn content_fingerprint(&self) -> String {
        let mut content = serde_json::json!([
            self.format_version,
            self.architecture,
            self.weights,
            self.dims,
            self.bos_id,
            self.eos_ids,
            self.stages
                .iter()
                .map(|s| serde_json::json!([s.first_layer, s.end_layer, s.xml, s.bin]))
                .collect::<Vec<_>>(),
            self.text_files,
        ]);
        if let (Some(file), Some(content)) = (&self.head_tokens, content.as_array_mut()) {
            content.push(serde_json::json!(file));
        }
        if let (Form::Static(form), Some(content)) = (self.form, content.as_array_mut()) {
            content.push(serde_json::json!(form));
        }
        hex(&Sha256::digest(content.to_string().as_bytes()))
    }

    /// Checks version, name, layer ranges, file names and fingerprint.
    ///
    /// # Errors
    /// The first [`ManifestError`] found.
    pub fn validate(&self) -> Result<(), ManifestError> {
        if self.format_version != FORMAT_VERSION {
            return Err(ManifestError::Version {
                found: self.format_version,
                expected: FORMAT_VERSION,
            });
        }
        check_model_name(&self.model)?;
        self.validate_stages()?;
        self.validate_form()?;
        let stage_files = self.stages.iter().flat_map(|s| [&s.xml, &s.bin]);
        for file in stage_files.chain(&self.text_files).chain(&self.head_tokens) {
            check_file_name(&file.name)?;
        }
        let expected = self.content_fingerprint();
        if self.fingerprint != expected {
            return Err(ManifestError::Fingerprint { found: self.fingerprint.clone(), expected });
        }
        Ok(())
    }

    fn validate_form(&self) -> Result<(), ManifestError> {
        let Form::Static(form) = self.form else { return Ok(()) };
        form.check()?;
        let (window, context_length) = (form.window, self.dims.context_length);
        if window != context_length {
            return Err(ManifestError::Window { window, context_length });
        }
        Ok(())
    }

    fn validate_stages(&self) -> Result<(), ManifestError> {
        let n_layers = self.dims.n_layers;
        let mut expected_first = 0;
        for (stage, entry) in self.stages.iter().enumerate() {
            let (first_layer, end_layer) = (entry.first_layer, entry.end_layer);
            if entry.index != stage
                || first_layer != expected_first
                || end_layer <= first_layer
                || end_layer > n_layers
            {
                return Err(ManifestError::Stages {
                    stage,
                    first_layer,
                    end_layer,
                    expected_first,
                    n_layers,
                });
            }
            expected_first = end_layer;
        }
        if self.stages.is_empty() || expected_first != n_layers {
            return Err(ManifestError::StagesIncomplete {
                n_stages: self.stages.len(),
                end_layer: expected_first,
                n_layers,
            });
        }
        Ok(())
    }
}

/// Checks that a model name is one subject token of `[a-z0-9_-]`.
///
/// # Errors
/// [`ManifestError::ModelName`] if it is not.
pub fn check_model_name(name: &str) -> Result<(), ManifestError> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    if name.is_empty() || name.len() > MAX_MODEL_NAME_BYTES || !name.bytes().all(legal) {
        return Err(ManifestError::ModelName { name: name.to_owned() });
    }
    Ok(())
}

/// Turns any text, such as a file's stem, into a legal model name.
///
/// Letters become lower case, every run of other characters becomes one `-`. Text without a
/// single legal character becomes `model`.
#[must_use]
pub fn model_name_from(text: &str) -> String {
    let mut name = String::new();
    for c in text.chars() {
        let c = c.to_ascii_lowercase();
        if c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' {
            name.push(c);
        } else if !name.ends_with('-') && !name.is_empty() {
            name.push('-');
        }
    }
    name.truncate(MAX_MODEL_NAME_BYTES);
    let name = name.trim_end_matches('-');
    if name.is_empty() { "model".to_owned() } else { name.to_owned() }
}

fn check_file_name(name: &str) -> Result<(), ManifestError> {
    let plain = !name.is_empty()
        && name != "."
        && name != ".."
        && !name.contains(['/', '\\', ':', '\0'])
        && name != MANIFEST_FILE;
    if plain { Ok(()) } else { Err(ManifestError::FileName { name: name.to_owned() }) }
}

/// Lower-case hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::StaticForm;

    fn file(name: &str) -> FileEntry {
        FileEntry { name: name.to_owned(), bytes: 1, sha256: "00".repeat(32) }
    }

    fn manifest() -> Manifest {
        let stage = |index, first_layer, end_layer| StageEntry {
            index,
            first_layer,
            end_layer,
            cost_share: 0.5,
            xml: file(&format!("stage-{index}.xml")),
            bin: file(&format!("stage-{index}.bin")),
        };
        let mut manifest = Manifest {
            format_version: FORMAT_VERSION,
            model: "tiny".to_owned(),
            architecture: "llama".to_owned(),
            fingerprint: String::new(),
            source: "tiny.gguf".to_owned(),
            weights: WeightMode::Exact,
            floats: None,
            form: Form::Stateful,
            dims: ModelDims {
                n_layers: 3,
                hidden_dim: 64,
                n_heads: 2,
                n_kv_heads: 1,
                head_dim: 32,
                vocab_size: 100,
                context_length: 128,
            },
            bos_id: Some(1),
            eos_ids: vec![2],
            stages: vec![stage(0, 0, 1), stage(1, 1, 3)],
            text_files: vec![file("tokenizer.json")],
            head_tokens: None,
        };
        manifest.fingerprint = manifest.content_fingerprint();
        manifest
    }

    /// Changes a valid manifest, keeps its fingerprint right, and validates it.
    fn changed(change: impl FnOnce(&mut Manifest)) -> Result<(), ManifestError> {
        let mut manifest = manifest();
        change(&mut manifest);
        manifest.fingerprint = manifest.content_fingerprint();
        manifest.validate()
    }

    #[test]
    fn json_gives_the_same_manifest_back_and_refuses_unknown_fields() {
        let manifest = manifest();
        manifest.validate().unwrap();
        let json = serde_json::to_string(&manifest).unwrap();
        assert_eq!(serde_json::from_str::<Manifest>(&json).unwrap(), manifest);
        assert!(!json.contains("form\":"), "older programs read the usual form: {json}");
        let more = json.replacen('{', "{\"extra\":1,", 1);
        assert!(serde_json::from_str::<Manifest>(&more).is_err());
    }

    #[test]
    fn wrong_manifests_are_refused_by_field() {
        use ManifestError as E;
        assert!(matches!(changed(|m| m.format_version = 2), Err(E::Version { found: 2, .. })));
        assert!(matches!(changed(|m| m.model = "a.b".to_owned()), Err(E::ModelName { .. })));
        assert!(matches!(changed(|m| m.stages.clear()), Err(E::StagesIncomplete { .. })));
        let gap = changed(|m| m.stages[1].first_layer = 2);
        assert!(matches!(gap, Err(E::Stages { stage: 1, .. })));
        let empty = changed(|m| m.stages[0].end_layer = 0);
        assert!(matches!(empty, Err(E::Stages { stage: 0, .. })));
        let short = changed(|m| m.stages[1].end_layer = 2);
        assert!(matches!(short, Err(E::StagesIncomplete { end_layer: 2, .. })));
        let form = StaticForm { window: 128, rows: 4, slots: 2 };
        assert!(matches!(changed(|m| m.form = Form::Static(form)), Ok(())));
        let flat = StaticForm { rows: 0, ..form };
        assert!(matches!(changed(|m| m.form = Form::Static(flat)), Err(E::Form(_))));
        let short = StaticForm { window: 64, ..form };
        let short = changed(|m| m.form = Form::Static(short));
        assert!(matches!(short, Err(E::Window { window: 64, context_length: 128 })));
        for name in ["../x", "a/b", "", ".", "..", "a\\b", "C:x", MANIFEST_FILE] {
            let escaping = changed(|m| m.stages[0].bin.name = name.to_owned());
            assert!(matches!(escaping, Err(E::FileName { .. })), "{name}");
        }
    }

    #[test]
    fn fingerprints_follow_content_but_not_names() {
        let same = |change: fn(&mut Manifest)| {
            let (before, mut after) = (manifest(), manifest());
            change(&mut after);
            before.content_fingerprint() == after.content_fingerprint()
        };
        assert!(same(|m| m.model = "other".to_owned()));
        assert!(same(|m| m.source = "other.gguf".to_owned()));
        assert!(!same(|m| m.stages[0].bin.sha256 = "11".repeat(32)));
        assert!(!same(|m| m.weights = WeightMode::Compact));
        assert!(!same(|m| m.dims.context_length += 1));
        assert!(!same(|m| m.eos_ids.push(3)));
        assert!(!same(|m| m.form = Form::Static(StaticForm::default())));
        assert!(!same(|m| m.head_tokens = Some(file("head_tokens.u32"))));
        let mut manifest = manifest();
        manifest.fingerprint = "00".repeat(32);
        assert!(matches!(manifest.validate(), Err(ManifestError::Fingerprint { .. })));
    }

    #[test]
    fn names_become_subject_tokens() {
        let check = |text: &str, expected: &str| {
            let name = model_name_from(text);
            assert_eq!(name, expected);
            check_model_name(&name).unwrap();
        };
        check("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct-q4_1");
        check("Meta Llama 3.1 (8B)", "meta-llama-3-1-8b");
        check("模型", "model");
        check("--a--", "a");
        check(&"x".repeat(200), &"x".repeat(MAX_MODEL_NAME_BYTES));
        check("", "model");
        for bad in ["", "a.b", "A", "a b", "a*", "é"] {
            assert!(check_model_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn weight_modes_have_one_spelling() {
        for mode in WeightMode::ALL {
            assert_eq!(mode.as_str().parse::<WeightMode>().unwrap(), mode);
            assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{mode}\""));
        }
        assert!(matches!("Exact".parse::<WeightMode>(), Err(ManifestError::WeightMode { .. })));
    }
}
