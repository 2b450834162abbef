//! Writes the text files of a shard set.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::TextError;
use super::tokenizer_config::TokenizerConfig;
use super::tokenizer_json;
use super::vocabulary::Vocabulary;
use super::{CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_FILE, TextModel};
use crate::bounded;
use crate::gguf::Gguf;

const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// What was written, and what the manifest has to say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFiles {
    /// Names of the files that were written into the folder.
    pub files: Vec<String>,
    /// The token that begins a text, if the model has one.
    pub bos_id: Option<u32>,
    /// The tokens after which generation is over (end of text, turn or message), ascending.
    pub eos_ids: Vec<u32>,
    /// Whether a raw prompt begins with the BOS token; `TextModel::encode` adds it.
    pub add_bos: bool,
    /// Number of tokens.
    pub n_tokens: usize,
}

/// The tokens that chat templates refer to, in the form of Hugging Face model folders.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SpecialTokens {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bos_token: Option<SpecialToken>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) eos_token: Option<SpecialToken>,
}

/// A special token: its text, or an object that has it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum SpecialToken {
    /// The text alone.
    Text(String),
    /// With matching rules, which templates do not need.
    Object {
        /// The text.
        content: String,
    },
}

impl SpecialToken {
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Text(content) | Self::Object { content } => content,
        }
    }
}

/// Writes `tokenizer.json`, `special_tokens_map.json` and, if the model has a chat template,
/// `chat_template.jinja` into `dir`, and checks that the result can be loaded.
///
/// # Errors
/// [`TextError`] if the model's tokenizer is of a kind that is not converted, if its metadata
/// contradict each other, or if a file cannot be written.
pub fn write_text_files(gguf: &Gguf, dir: &Path) -> Result<TextFiles, TextError> {
    let metadata = gguf.metadata();
    let vocabulary = Vocabulary::read(metadata)?;
    let (document, add_bos) = tokenizer_json::convert(metadata, &vocabulary)?;
    let mut files = vec![TOKENIZER_FILE.to_owned(), SPECIAL_TOKENS_FILE.to_owned()];
    write_json(&dir.join(TOKENIZER_FILE), &document)?;
    drop(document);
    let text = |id: Option<u32>| id.map(|id| SpecialToken::Text(vocabulary.token(id).to_owned()));
    let special =
        SpecialTokens { bos_token: text(vocabulary.bos), eos_token: text(vocabulary.eos) };
    write_json(&dir.join(SPECIAL_TOKENS_FILE), &special)?;
    if let Some(template) = metadata.get::<&str>(CHAT_TEMPLATE)? {
        let path = dir.join(CHAT_TEMPLATE_FILE);
        std::fs::write(&path, template).map_err(|source| TextError::Io { path, source })?;
        files.push(CHAT_TEMPLATE_FILE.to_owned());
    }
    // A vocabulary that the tokenizer library refuses is found here, not when a fleet starts.
    TextModel::load(dir)?;
    Ok(TextFiles {
        files,
        bos_id: vocabulary.bos,
        eos_ids: vocabulary.ends(),
        add_bos,
        n_tokens: vocabulary.tokens.len(),
    })
}

/// Copies the text files of a folder in the format of Hugging Face, such as a shard set, and
/// checks that they can be loaded. What has no file of its own is taken from
/// `tokenizer_config.json`. Beginning and end of texts are left for the caller to fill in.
///
/// # Errors
/// [`TextError`] if there is no `tokenizer.json`, a file cannot be read or written, or the
/// tokenizer is of no use.
pub fn copy_text_files(from: &Path, dir: &Path) -> Result<TextFiles, TextError> {
    let mut files = Vec::new();
    for name in [TOKENIZER_FILE, SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE] {
        let path = from.join(name);
        let bytes = match bounded::read(&path, bounded::MAX_TEXT_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound && name != TOKENIZER_FILE => {
                continue;
            }
            Err(source) => return Err(TextError::Io { path, source }),
        };
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(|source| TextError::Io { path, source })?;
        files.push(name.to_owned());
    }
    let missing = |name: &str| !files.iter().any(|found| found == name);
    let (no_special, no_template) = (missing(SPECIAL_TOKENS_FILE), missing(CHAT_TEMPLATE_FILE));
    if let Some(config) = TokenizerConfig::read(from)? {
        if no_special && let Some(special) = config.special_tokens() {
            write_json(&dir.join(SPECIAL_TOKENS_FILE), special)?;
            files.push(SPECIAL_TOKENS_FILE.to_owned());
        }
        if no_template && let Some(template) = config.chat_template() {
            let path = dir.join(CHAT_TEMPLATE_FILE);
            std::fs::write(&path, template).map_err(|source| TextError::Io { path, source })?;
            files.push(CHAT_TEMPLATE_FILE.to_owned());
        }
    }
    let text = TextModel::load(dir)?;
    let add_bos = !text.encode("", true)?.is_empty();
    Ok(TextFiles { files, bos_id: None, eos_ids: Vec::new(), add_bos, n_tokens: text.vocab_size() })
}

fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), TextError> {
    let failed = |source| TextError::Io { path: path.to_path_buf(), source };
    let mut writer = BufWriter::new(File::create(path).map_err(failed)?);
    serde_json::to_writer(&mut writer, value).map_err(|error| failed(error.into()))?;
    writer.flush().map_err(failed)
}
