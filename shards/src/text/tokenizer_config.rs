//! `tokenizer_config.json` of model folders, as far as other files leave something out.

use std::io;
use std::path::Path;

use serde::Deserialize;

use super::TOKENIZER_CONFIG_FILE;
use super::error::TextError;
use super::write::SpecialTokens;
use crate::bounded;

/// The template that a chat uses if a model has several.
const DEFAULT_TEMPLATE: &str = "default";

/// What of the file counts.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerConfig {
    #[serde(default)]
    chat_template: Option<Templates>,
    #[serde(flatten)]
    special: SpecialTokens,
}

/// One template, or several by name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Template>),
}

#[derive(Debug, Deserialize)]
struct Template {
    name: String,
    template: String,
}

impl TokenizerConfig {
    /// Reads the file of a folder; none if there is none.
    ///
    /// # Errors
    /// [`TextError::Io`] or [`TextError::TokenizerConfig`].
    pub(super) fn read(dir: &Path) -> Result<Option<Self>, TextError> {
        let path = dir.join(TOKENIZER_CONFIG_FILE);
        let json = match bounded::read(&path, bounded::MAX_TEXT_BYTES) {
            Ok(json) => json,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TextError::Io { path, source }),
        };
        match serde_json::from_slice(&json) {
            Ok(config) => Ok(Some(config)),
            Err(source) => Err(TextError::TokenizerConfig { path, source }),
        }
    }

    /// The template for chats.
    pub(super) fn chat_template(&self) -> Option<&str> {
        match self.chat_template.as_ref()? {
            Templates::One(template) => Some(template),
            Templates::Named(templates) => {
                let found = templates.iter().find(|found| found.name == DEFAULT_TEMPLATE);
                found.map(|found| found.template.as_str())
            }
        }
    }

    /// The special tokens, if it names one.
    pub(super) fn special_tokens(&self) -> Option<&SpecialTokens> {
        let SpecialTokens { bos_token, eos_token } = &self.special;
        (bos_token.is_some() || eos_token.is_some()).then_some(&self.special)
    }
}
