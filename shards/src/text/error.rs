//! What can go wrong between text and token ids.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use crate::gguf::GgufError;

/// A tokenizer or chat template that cannot be made, read or used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The model file lacks tokenizer metadata or has it in another form.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// `tokenizer.json` does not have the parts that make up a vocabulary.
    #[error("{} has no vocabulary that can be read", path.display())]
    TokenizerJson {
        /// The file.
        path: PathBuf,
        /// Where and what.
        #[source]
        source: serde_json::Error,
    },
    /// The model has a kind of tokenizer that is not converted.
    #[error(
        "tokenizer model {model:?} is not supported, expected \"gpt2\" (byte-level BPE) or \
         \"llama\" (SentencePiece BPE)"
    )]
    UnknownTokenizerModel {
        /// `tokenizer.ggml.model` of the model file.
        model: String,
    },
    /// The model splits text into words in a way that is not known.
    #[error("pre-tokenizer {pre:?} (tokenizer.ggml.pre) is not supported")]
    UnknownPreTokenizer {
        /// `tokenizer.ggml.pre` of the model file.
        pre: String,
    },
    /// Two arrays of the tokenizer's metadata differ in length.
    #[error(
        "metadata key {key:?} has {found} elements, expected one for each of {expected} tokens"
    )]
    ArrayLength {
        /// The key.
        key: &'static str,
        /// Its length.
        found: usize,
        /// The number of tokens.
        expected: usize,
    },
    /// Two tokens have the same text.
    #[error("tokens {first} and {second} have the same text {token:?}")]
    DuplicateToken {
        /// Their text.
        token: String,
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
    },
    /// An entry of `tokenizer.ggml.merges` is not two tokens whose union is a token.
    #[error("merge {index} ({merge:?}) is not a pair of tokens that make up a token")]
    BadMerge {
        /// Place in the array.
        index: usize,
        /// The entry.
        merge: String,
    },
    /// A special token's id is not in the vocabulary.
    #[error("metadata key {key:?} is {id}, but the vocabulary has {n_tokens} tokens")]
    TokenOutOfRange {
        /// The key.
        key: &'static str,
        /// The id.
        id: u32,
        /// The size of the vocabulary.
        n_tokens: usize,
    },
    /// The vocabulary is larger than token ids can count.
    #[error("the vocabulary has {n_tokens} tokens, more than 32-bit ids can name")]
    VocabularySize {
        /// The size of the vocabulary.
        n_tokens: usize,
    },
    /// A file cannot be read or written.
    #[error("{}: cannot be read or written", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// `tokenizer_config.json` is not what it should be.
    #[error("{}: not a tokenizer's configuration", path.display())]
    TokenizerConfig {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// `special_tokens_map.json` is not what it should be.
    #[error("{}: not a map of special tokens", path.display())]
    SpecialTokens {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// `tokenizer.json` does not make a tokenizer.
    #[error("{}: not a usable tokenizer", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the tokenizer library says.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// `tokenizer.json` turns ids into text in a way that cannot be done piece by piece.
    #[error(
        "{}: decoder {decoder:?} is not supported, expected ByteLevel, Metaspace or ByteFallback",
        path.display()
    )]
    UnknownDecoder {
        /// The file.
        path: PathBuf,
        /// The decoder's type, empty if there is none.
        decoder: String,
    },
    /// The text cannot be turned into ids.
    #[error("text cannot be tokenized")]
    Encode {
        /// What the tokenizer library says.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The model has no chat template.
    #[error("the model has no chat template: send \"prompt\" instead of \"messages\"")]
    NoChatTemplate,
    /// Messages or tools of a chat cannot be written as JSON.
    #[error("a message or tool of the chat is no JSON")]
    Chat {
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The chat template cannot be parsed.
    #[error("the chat template cannot be parsed")]
    TemplateSyntax {
        /// What the template engine says.
        #[source]
        source: minijinja::Error,
    },
    /// The chat template refuses these messages.
    #[error("the chat template refuses the messages: {reason}")]
    TemplateRefusal {
        /// What the template says.
        reason: String,
    },
    /// The chat template does not end in time.
    #[error("the chat template takes more than {steps} steps")]
    TemplateTooLong {
        /// The limit.
        steps: u64,
    },
    /// The chat template fails.
    #[error("the chat template fails")]
    Template {
        /// What the template engine says.
        #[source]
        source: minijinja::Error,
    },
}
