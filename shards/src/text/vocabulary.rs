//! The vocabulary of a GGUF model, read from its metadata.

use std::borrow::Cow;
use std::collections::HashMap;

use super::error::TextError;
use crate::gguf::Metadata;

pub(super) const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";

/// Tokens that end a turn in widespread chat formats. Files that name only the token that ends a
/// document leave these out of their metadata, and a chat would never end.
const TURN_ENDS: [&str; 5] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"];

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// Part of text.
    Normal,
    /// Stands for what cannot be expressed.
    Unknown,
    /// Structure that is not text, such as the end of a turn.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// A place in the vocabulary that is not used.
    Unused,
    /// One byte.
    Byte,
}

impl TokenKind {
    /// **Source**: `enum llama_token_type` of llama.cpp.
    fn from_number(number: i32) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// Tokens by id, with their kinds and the special ones.
#[derive(Debug)]
pub(super) struct Vocabulary<'a> {
    pub(super) tokens: Vec<Cow<'a, str>>,
    pub(super) kinds: Vec<TokenKind>,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) unknown: Option<u32>,
    add_bos: Option<bool>,
    add_eos: bool,
    turn_ends: Vec<u32>,
}

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary and checks ids and lengths.
    pub(super) fn read(metadata: Metadata<'a>) -> Result<Self, TextError> {
        let tokens: Vec<Cow<'a, str>> = metadata
            .strs(TOKENS)?
            .into_iter()
            .enumerate()
            // Several empty tokens would be the same one; llama.cpp gives them this name too.
            .map(|(id, token)| match token {
                "" => Cow::Owned(format!("[EMPTY_{id}]")),
                _ => Cow::Borrowed(token),
            })
            .collect();
        let n_tokens = tokens.len();
        if u32::try_from(n_tokens).is_err() {
            return Err(TextError::VocabularySize { n_tokens });
        }
        let kinds = match metadata.get::<Vec<i32>>(TOKEN_TYPE)? {
            Some(numbers) if numbers.len() != n_tokens => {
                let found = numbers.len();
                return Err(TextError::ArrayLength { key: TOKEN_TYPE, found, expected: n_tokens });
            }
            Some(numbers) => numbers.into_iter().map(TokenKind::from_number).collect(),
            None => vec![TokenKind::Normal; n_tokens],
        };
        let special = |key: &'static str| -> Result<Option<u32>, TextError> {
            match metadata.get::<u32>(key)? {
                Some(id) if id as usize >= n_tokens => {
                    Err(TextError::TokenOutOfRange { key, id, n_tokens })
                }
                id => Ok(id),
            }
        };
        let mut turn_ends = Vec::new();
        turn_ends.extend(special(EOT)?);
        turn_ends.extend(special(EOM)?);
        for (id, (token, kind)) in (0u32..).zip(tokens.iter().zip(&kinds)) {
            if *kind == TokenKind::Control && TURN_ENDS.contains(&token.as_ref()) {
                turn_ends.push(id);
            }
        }
        Ok(Self {
            bos: special(BOS)?,
            eos: special(EOS)?,
            unknown: special(UNKNOWN)?,
            add_bos: metadata.get(ADD_BOS)?,
            add_eos: metadata.get(ADD_EOS)?.unwrap_or(false),
            turn_ends,
            tokens,
            kinds,
        })
    }

    /// Ids by text.
    pub(super) fn by_text(&self) -> Result<HashMap<&str, u32>, TextError> {
        let mut by_text = HashMap::with_capacity(self.tokens.len());
        for (second, token) in (0u32..).zip(&self.tokens) {
            if let Some(first) = by_text.insert(token.as_ref(), second) {
                return Err(TextError::DuplicateToken { token: token.to_string(), first, second });
            }
        }
        Ok(by_text)
    }

    /// The token that text begins with, if it does; `otherwise` decides where the file does not.
    pub(super) fn leading(&self, otherwise: bool) -> Option<u32> {
        self.bos.filter(|_| self.add_bos.unwrap_or(otherwise))
    }

    /// The token that text ends with, if it does.
    pub(super) fn trailing(&self) -> Option<u32> {
        self.eos.filter(|_| self.add_eos)
    }

    /// All tokens after which generation is over, in ascending order.
    pub(super) fn ends(&self) -> Vec<u32> {
        let mut ends: Vec<u32> =
            self.eos.into_iter().chain(self.turn_ends.iter().copied()).collect();
        ends.sort_unstable();
        ends.dedup();
        ends
    }

    /// The text of a token.
    pub(super) fn token(&self, id: u32) -> &str {
        &self.tokens[id as usize]
    }
}
