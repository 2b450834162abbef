//! Text to token ids and back, for any model of a shard set.
//!
//! [`write_text_files`] turns the tokenizer metadata of a GGUF file into the files that a shard
//! set carries; [`TextModel`] loads them and serves a coordinator: it encodes prompts and chats,
//! and its [`Detokenizer`] gives out the text of a session as tokens arrive. Folders in the
//! format of Hugging Face (`tokenizer.json`, `chat_template.jinja`, `special_tokens_map.json`)
//! load the same way.

mod chat_template;
mod detokenizer;
mod error;
mod fingerprint;
mod pre_tokenizers;
mod tokenizer_config;
mod tokenizer_json;
mod tool_chat;
mod vocabulary;
mod write;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

pub use chat_template::ChatTemplate;
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use fingerprint::tokenizer_fingerprint;
pub use tool_chat::{TOOL_CALL_CLOSE, TOOL_CALL_OPEN};
pub use write::{TextFiles, copy_text_files, write_text_files};

use detokenizer::TokenBytes;
use write::{SpecialToken, SpecialTokens};

use crate::bounded;

/// The file of the tokenizer in a shard set.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// The file of the chat template in a shard set; a model may have none.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";
/// The file that has both of these in model folders that do not have the files.
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// The file that names the tokens that the chat template refers to.
pub const SPECIAL_TOKENS_FILE: &str = "special_tokens_map.json";

/// The tokenizer and chat template of a model.
pub struct TextModel {
    tokenizer: Tokenizer,
    table: Arc<TokenBytes>,
    template: Option<ChatTemplate>,
}

impl fmt::Debug for TextModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextModel")
            .field("vocab_size", &self.vocab_size())
            .field("has_chat_template", &self.has_chat_template())
            .finish_non_exhaustive()
    }
}

/// Reads `tokenizer.json`. The library takes for granted that the decoder's part is JSON, and panics
/// where it is not: that part is read before.
fn parse(json: &[u8]) -> Result<Tokenizer, tokenizers::Error> {
    #[derive(Deserialize)]
    struct Decoder {
        #[serde(default, rename = "decoder")]
        _decoder: Option<serde_json::Value>,
    }
    serde_json::from_slice::<Decoder>(json)?;
    Tokenizer::from_bytes(json)
}

impl TextModel {
    /// Loads the text files of a shard set.
    ///
    /// # Errors
    /// [`TextError::Io`] and [`TextError::Tokenizer`] if `tokenizer.json` is missing or not
    /// usable, [`TextError::UnknownDecoder`] if its ids cannot be turned into text one by one,
    /// [`TextError::TemplateSyntax`] and [`TextError::SpecialTokens`] if the other files are bad.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join(TOKENIZER_FILE);
        let json = bounded::read(&path, bounded::MAX_TEXT_BYTES)
            .map_err(|source| TextError::Io { path: path.clone(), source })?;
        let tokenizer =
            parse(&json).map_err(|source| TextError::Tokenizer { path: path.clone(), source })?;
        let table = Arc::new(TokenBytes::new(&tokenizer, &path)?);
        Ok(Self { tokenizer, table, template: load_template(dir)? })
    }

    /// The ids of a text. Special tokens that are written out in it are recognised; with
    /// `add_special` the model's BOS and EOS tokens are put around it, if it wants them.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special)
            .map_err(|source| TextError::Encode { source })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of a chat up to where the model's answer begins; messages are anything that
    /// serialises with `role` and `content`.
    ///
    /// The template writes the special tokens itself, so none are added.
    ///
    /// # Errors
    /// Those of [`Self::render_chat`] and [`Self::encode`].
    pub fn encode_chat<M: Serialize>(&self, messages: &[M]) -> Result<Vec<u32>, TextError> {
        self.encode(&self.render_chat(messages)?, false)
    }

    /// The same with functions that the model may call.
    ///
    /// # Errors
    /// Those of [`Self::render_chat`] and [`Self::encode`].
    pub fn encode_tool_chat<M: Serialize, T: Serialize>(
        &self,
        messages: &[M],
        tools: &[T],
    ) -> Result<Vec<u32>, TextError> {
        self.encode(&self.template()?.render(messages, tools, true)?, false)
    }

    /// The text of a chat up to where the model's answer begins.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] if the model has no template, and those of
    /// [`ChatTemplate::render`].
    pub fn render_chat<M: Serialize>(&self, messages: &[M]) -> Result<String, TextError> {
        self.template()?.render::<M, ()>(messages, &[], true)
    }

    fn template(&self) -> Result<&ChatTemplate, TextError> {
        self.template.as_ref().ok_or(TextError::NoChatTemplate)
    }

    /// Tells whether the model has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The number of tokens, special ones included. Ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The bytes that a token adds to a text; none for special tokens and ids outside the
    /// vocabulary.
    pub fn text_bytes(&self, id: u32) -> &[u8] {
        self.table.of(id)
    }

    /// The bytes of a token's text, which may be part of a character; a special token's name.
    /// Empty for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.table.of(id) {
            [] => self.tokenizer.id_to_token(id).unwrap_or_default().into_bytes(),
            bytes => bytes.to_vec(),
        }
    }

    /// The text of ids, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut detokenizer = self.detokenizer();
        let mut text: String = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
        text.extend(detokenizer.finish());
        text
    }

    /// A detokenizer for a text of its own, such as the answer in a chat: where the model writes
    /// a space in front of every first word, that space is left out.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.table), false)
    }

    /// A detokenizer for text that continues other text, such as a raw prompt: a first space
    /// stays.
    pub fn continuing_detokenizer(&self) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.table), true)
    }
}

fn load_template(dir: &Path) -> Result<Option<ChatTemplate>, TextError> {
    let Some(source) = read_optional(&dir.join(CHAT_TEMPLATE_FILE))? else { return Ok(None) };
    let path = dir.join(SPECIAL_TOKENS_FILE);
    let special: SpecialTokens = match read_optional(&path)? {
        Some(json) => serde_json::from_str(&json)
            .map_err(|source| TextError::SpecialTokens { path, source })?,
        None => SpecialTokens::default(),
    };
    let bos = special.bos_token.map(SpecialToken::into_text);
    let eos = special.eos_token.map(SpecialToken::into_text);
    ChatTemplate::new(&source, bos.as_deref(), eos.as_deref()).map(Some)
}

fn read_optional(path: &Path) -> Result<Option<String>, TextError> {
    let text = bounded::read(path, bounded::MAX_TEXT_BYTES).and_then(|bytes| {
        String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    });
    match text {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Io { path: path.to_path_buf(), source }),
    }
}
