//! Turns token ids into text, one at a time.
//!
//! Every token stands for a fixed string of bytes, which is looked up in a table made once per
//! model. A character may be spread over several tokens, so bytes wait until they make up whole
//! characters. Bytes that can never become a character are replaced by U+FFFD, in the same way
//! as [`String::from_utf8_lossy`] would replace them in the whole text: it never depends on how
//! the bytes arrive, because whether a sequence is valid, invalid or unfinished is decided by
//! its own first bytes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::error::TextError;

/// SentencePiece writes a space as this character.
const SPACE_MARK: char = '\u{2581}';

/// How a vocabulary writes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alphabet {
    /// Every byte is a printable character of its own.
    ByteLevel,
    /// Text, with a mark for the space, and `<0x0A>` for bytes.
    SentencePiece,
}

/// The bytes that each token stands for.
#[derive(Debug)]
pub(super) struct TokenBytes {
    /// The bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<usize>,
    /// A space at the beginning of a text is not part of it.
    strips_first_space: bool,
}

impl TokenBytes {
    /// Reads the table from a tokenizer; special tokens get no bytes.
    pub(super) fn new(tokenizer: &Tokenizer, path: &Path) -> Result<Self, TextError> {
        let decoder = match tokenizer.get_decoder() {
            Some(decoder) => serde_json::to_value(decoder).map_err(|source| {
                TextError::Tokenizer { path: path.to_path_buf(), source: Box::new(source) }
            })?,
            None => Value::Null,
        };
        let (alphabet, strips_first_space) = conventions(&decoder).ok_or_else(|| {
            let decoder = decoder["type"].as_str().unwrap_or_default().to_owned();
            TextError::UnknownDecoder { path: path.to_path_buf(), decoder }
        })?;
        let mut tokens: Vec<(u32, String)> =
            tokenizer.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        let added = tokenizer.get_added_tokens_decoder();
        let byte_of = byte_level_alphabet();
        let mut table = Self { bytes: Vec::new(), ends: Vec::new(), strips_first_space };
        for (id, token) in tokens {
            // Ids that the vocabulary leaves out stand for nothing.
            table.ends.resize(id as usize, table.bytes.len());
            match added.get(&id) {
                Some(added) if added.special => {}
                Some(_) => push_sentence_piece(&mut table.bytes, &token),
                None if alphabet == Alphabet::ByteLevel => {
                    push_byte_level(&mut table.bytes, &token, &byte_of);
                }
                None => push_sentence_piece(&mut table.bytes, &token),
            }
            table.ends.push(table.bytes.len());
        }
        Ok(table)
    }

    /// The bytes of a token; none for special tokens and ids outside the vocabulary.
    pub(super) fn of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }
}

/// The alphabet of a decoder, and whether it drops the first space.
fn conventions(decoder: &Value) -> Option<(Alphabet, bool)> {
    let steps: &[Value] = match decoder["decoders"].as_array() {
        Some(steps) => steps,
        None => std::slice::from_ref(decoder),
    };
    let find = |kind: &str| steps.iter().find(|step| step["type"] == kind);
    if find("ByteLevel").is_some() {
        return Some((Alphabet::ByteLevel, false));
    }
    if let Some(metaspace) = find("Metaspace") {
        return Some((Alphabet::SentencePiece, metaspace["prepend_scheme"] != "never"));
    }
    find("ByteFallback")?;
    let strips = find("Strip").is_some_and(|strip| strip["content"] == " " && strip["start"] != 0);
    Some((Alphabet::SentencePiece, strips))
}

fn push_byte_level(bytes: &mut Vec<u8>, token: &str, byte_of: &HashMap<char, u8>) {
    let start = bytes.len();
    for character in token.chars() {
        match byte_of.get(&character) {
            Some(&byte) => bytes.push(byte),
            None => {
                // A token outside the alphabet stands for its own text.
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

fn push_sentence_piece(bytes: &mut Vec<u8>, token: &str) {
    let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hex.filter(|hex| hex.len() == 2).map(|hex| u8::from_str_radix(hex, 16)) {
        Some(Ok(byte)) => bytes.push(byte),
        _ => {
            let mut utf8 = [0; 4];
            for character in token.chars() {
                let character = if character == SPACE_MARK { ' ' } else { character };
                bytes.extend_from_slice(character.encode_utf8(&mut utf8).as_bytes());
            }
        }
    }
}

/// The byte that each character of a byte-level vocabulary stands for.
///
/// **Source**: `bytes_to_unicode` of openai/gpt-2: printable Latin-1 characters stand for their
/// own code, and the other bytes, in order, are the characters from U+0100 on.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=u8::MAX)
        .filter_map(|byte| {
            let own = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if own { u32::from(byte) } else { next };
            next += u32::from(!own);
            Some((char::from_u32(code)?, byte))
        })
        .collect()
}

/// Collects the tokens of one session and gives out whole characters.
///
/// What all calls of [`Self::push`] and [`Self::finish`] give, joined, is what
/// `TextModel::decode` gives for the same ids. A token costs as much as it has bytes.
#[derive(Debug)]
pub struct Detokenizer {
    table: Arc<TokenBytes>,
    /// The beginning of a character that is not complete: at most 3 bytes between calls.
    pending: Vec<u8>,
    /// No byte has arrived, and a space in front is to be dropped.
    at_start: bool,
}

impl Detokenizer {
    pub(super) fn new(table: Arc<TokenBytes>, continues: bool) -> Self {
        let at_start = table.strips_first_space && !continues;
        Self { table, pending: Vec::new(), at_start }
    }

    /// Adds a token and gives the characters that are complete with it.
    ///
    /// Special tokens, and ids outside the vocabulary, have no text.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut bytes = self.table.of(id);
        if self.at_start && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            self.at_start = false;
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the text: a character that stayed incomplete becomes U+FFFD.
    pub fn finish(self) -> Option<String> {
        (!self.pending.is_empty()).then(|| char::REPLACEMENT_CHARACTER.to_string())
    }
}
