//! Writes a GGUF vocabulary as the `tokenizer.json` that the `tokenizers` library reads.
//!
//! Two kinds of tokenizers exist in GGUF files. **Byte-level BPE** ("gpt2") comes with its
//! merges; only the expressions that split text into words are missing and are found by name.
//! **SentencePiece** ("llama") comes with a score for each piece and no merges: a pair of pieces
//! is merged in the order of the score of what it becomes, so the merges follow from the scores.
//!
//! **Source**: the file format is that of huggingface/tokenizers 0.22; the conversion of
//! SentencePiece models follows the rules of `convert_slow_tokenizer` in huggingface/transformers.

use std::collections::HashMap;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Value, json};

use super::error::TextError;
use super::pre_tokenizers::PreTokenizer;
use super::vocabulary::{MODEL, TokenKind, Vocabulary};
use crate::gguf::Metadata;

const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
/// SentencePiece writes a space as this character.
const SPACE_MARK: &str = "\u{2581}";

/// The document.
#[derive(Debug, Serialize)]
pub(super) struct TokenizerJson<'a> {
    version: &'static str,
    truncation: Value,
    padding: Value,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Bpe<'a>,
}

#[expect(clippy::struct_excessive_bools, reason = "the fields of a file format")]
#[derive(Debug, Serialize)]
struct AddedToken<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "the fields of a file format")]
#[derive(Debug, Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<&'a str>,
    end_of_word_suffix: Option<&'a str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

/// Serialises tokens by id as a map from text to id.
#[derive(Debug)]
struct Vocab<'a>(&'a Vocabulary<'a>);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.tokens.len()))?;
        for (id, token) in (0u32..).zip(&self.0.tokens) {
            map.serialize_entry(token.as_ref(), &id)?;
        }
        map.end()
    }
}

/// The document for a model file, and whether text begins with the BOS token.
pub(super) fn convert<'a>(
    metadata: Metadata<'a>,
    vocabulary: &'a Vocabulary<'a>,
) -> Result<(TokenizerJson<'a>, bool), TextError> {
    match metadata.str(MODEL)? {
        "gpt2" => byte_level(metadata, vocabulary),
        "llama" => sentence_piece(metadata, vocabulary),
        other => Err(TextError::UnknownTokenizerModel { model: other.to_owned() }),
    }
}

fn byte_level<'a>(
    metadata: Metadata<'a>,
    vocabulary: &'a Vocabulary<'a>,
) -> Result<(TokenizerJson<'a>, bool), TextError> {
    let pre = metadata.get::<&str>(PRE)?.unwrap_or("default");
    let pre_tokenizer = PreTokenizer::by_name(pre)
        .ok_or_else(|| TextError::UnknownPreTokenizer { pre: pre.to_owned() })?;
    let by_text = vocabulary.by_text()?;
    let mut merges = Vec::new();
    for (index, merge) in metadata.strs(MERGES)?.into_iter().enumerate() {
        match pair(merge, &by_text) {
            Some(pair) => merges.push(pair),
            None => return Err(TextError::BadMerge { index, merge: merge.to_owned() }),
        }
    }
    let mut steps: Vec<Value> = pre_tokenizer
        .splits
        .iter()
        .map(|split| {
            json!({
                "type": "Split",
                "pattern": {"Regex": split},
                "behavior": "Isolated",
                "invert": false,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": false,
        "use_regex": false,
    });
    steps.push(byte_level.clone());
    let leading = vocabulary.leading(pre_tokenizer.add_bos);
    let document = TokenizerJson {
        version: "1.0",
        truncation: Value::Null,
        padding: Value::Null,
        added_tokens: added_tokens(vocabulary),
        normalizer: Value::Null,
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
        post_processor: post_processor(vocabulary, leading),
        decoder: byte_level,
        model: Bpe {
            kind: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: pre_tokenizer.ignore_merges,
            vocab: Vocab(vocabulary),
            merges,
        },
    };
    Ok((document, leading.is_some()))
}

/// The two tokens of a merge, if they and their union are tokens.
fn pair<'a>(merge: &'a str, by_text: &HashMap<&str, u32>) -> Option<(&'a str, &'a str)> {
    let (left, right) = merge.split_once(' ')?;
    let union = format!("{left}{right}");
    let known = [left, right, &union].iter().all(|token| by_text.contains_key(token));
    known.then_some((left, right))
}

fn sentence_piece<'a>(
    metadata: Metadata<'a>,
    vocabulary: &'a Vocabulary<'a>,
) -> Result<(TokenizerJson<'a>, bool), TextError> {
    let scores = metadata.f32s(SCORES)?;
    let expected = vocabulary.tokens.len();
    if scores.len() != expected {
        return Err(TextError::ArrayLength { key: SCORES, found: scores.len(), expected });
    }
    let prefix_space = metadata.get(ADD_SPACE_PREFIX)?.unwrap_or(true);
    let to_mark = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK});
    let mut normalizers = vec![to_mark];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix_space {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE_MARK}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let leading = vocabulary.leading(true);
    let document = TokenizerJson {
        version: "1.0",
        truncation: Value::Null,
        padding: Value::Null,
        added_tokens: added_tokens(vocabulary),
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        post_processor: post_processor(vocabulary, leading),
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: Bpe {
            kind: "BPE",
            dropout: None,
            unk_token: vocabulary.unknown.map(|id| vocabulary.token(id)),
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: Vocab(vocabulary),
            merges: merges_from_scores(vocabulary, &scores)?,
        },
    };
    Ok((document, leading.is_some()))
}

/// All pairs of pieces that make up a piece, best score of the union first.
fn merges_from_scores<'a>(
    vocabulary: &'a Vocabulary<'a>,
    scores: &[f32],
) -> Result<Vec<(&'a str, &'a str)>, TextError> {
    let by_text = vocabulary.by_text()?;
    let is_piece = |text: &str| {
        let id = by_text
            .get(text)
            .copied()
            .filter(|&id| vocabulary.kinds[id as usize] == TokenKind::Normal);
        id.is_some()
    };
    let mut merges = Vec::new();
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.kinds[id] != TokenKind::Normal {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if is_piece(left) && is_piece(right) {
                merges.push((scores[id], left, right));
            }
        }
    }
    // The sort is stable: of the ways to build one piece, the longest left part comes first.
    merges.sort_by(|(a_score, a_left, _), (b_score, b_left, _)| {
        b_score.total_cmp(a_score).then(b_left.chars().count().cmp(&a_left.chars().count()))
    });
    Ok(merges.into_iter().map(|(_, left, right)| (left, right)).collect())
}

/// The tokens that are found in text before anything else happens to it.
fn added_tokens<'a>(vocabulary: &'a Vocabulary<'a>) -> Vec<AddedToken<'a>> {
    let mut added = Vec::new();
    for (id, (token, kind)) in (0u32..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds)) {
        let special = match kind {
            TokenKind::Control | TokenKind::Unknown => true,
            TokenKind::UserDefined => false,
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => continue,
        };
        added.push(AddedToken {
            id,
            content: token,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special,
        });
    }
    added
}

/// Puts the BOS and EOS tokens around text.
fn post_processor(vocabulary: &Vocabulary<'_>, leading: Option<u32>) -> Value {
    let trailing = vocabulary.trailing();
    if leading.is_none() && trailing.is_none() {
        return Value::Null;
    }
    let special = |id: u32| json!({"SpecialToken": {"id": vocabulary.token(id), "type_id": 0}});
    let around = |sequence: &str| {
        let inner = json!({"Sequence": {"id": sequence, "type_id": 0}});
        let mut pieces: Vec<Value> = leading.map(special).into_iter().collect();
        pieces.push(inner);
        pieces.extend(trailing.map(special));
        pieces
    };
    let mut special_tokens = serde_json::Map::new();
    for id in leading.into_iter().chain(trailing) {
        let token = vocabulary.token(id);
        special_tokens
            .insert(token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}));
    }
    let pair: Vec<Value> = around("A").into_iter().chain(around("B")).collect();
    json!({
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": pair,
        "special_tokens": special_tokens,
    })
}
