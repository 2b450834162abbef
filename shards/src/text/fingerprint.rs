//! Whether two models mean the same by their token ids.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{TOKENIZER_FILE, TextError};
use crate::bounded;
use crate::manifest::hex;

/// What of a `tokenizer.json` counts.
#[derive(Debug, Deserialize)]
struct TokenizerJson {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Debug, Deserialize)]
struct Model {
    vocab: Vocab,
    #[serde(default)]
    merges: Vec<Merge>,
}

/// Tokens with their ids, or in the order of their ids with their scores.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Vocab {
    Ids(std::collections::HashMap<String, u32>),
    Scores(Vec<(String, Value)>),
}

/// A pair, in either spelling.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Text(String),
}

#[derive(Debug, Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// SHA-256, in lower-case hexadecimal, over the tokens by id and the merges in order of the
/// `tokenizer.json` of a folder. Models of the same fingerprint can draft for each other.
///
/// Formatting, special-token flags, normalisation and the chat template do not count: they decide
/// which ids a text becomes, not what an id means.
///
/// **Source** of the bytes, so that other programs can compute it: for each token in ascending
/// order of ids the id as u32 little-endian, the length of its text in bytes likewise, and the
/// text; then for each merge both parts as length and text.
///
/// # Errors
/// [`TextError::Io`] or [`TextError::TokenizerJson`].
pub fn tokenizer_fingerprint(dir: &Path) -> Result<String, TextError> {
    let path = dir.join(TOKENIZER_FILE);
    let json = match bounded::read(&path, bounded::MAX_TEXT_BYTES) {
        Ok(json) => json,
        Err(source) => return Err(TextError::Io { path, source }),
    };
    match serde_json::from_slice::<TokenizerJson>(&json) {
        Ok(tokenizer) => Ok(fingerprint(&tokenizer)),
        Err(source) => Err(TextError::TokenizerJson { path, source }),
    }
}

fn fingerprint(tokenizer: &TokenizerJson) -> String {
    let mut tokens: Vec<(u32, &str)> = match &tokenizer.model.vocab {
        Vocab::Ids(ids) => ids.iter().map(|(text, id)| (*id, text.as_str())).collect(),
        Vocab::Scores(scored) => (0..).zip(scored.iter().map(|(text, _)| text.as_str())).collect(),
    };
    // Added tokens may or may not be listed in the vocabulary too.
    tokens.extend(tokenizer.added_tokens.iter().map(|added| (added.id, added.content.as_str())));
    tokens.sort_unstable();
    tokens.dedup();
    let mut hash = Sha256::new();
    for (id, token) in tokens {
        hash.update(id.to_le_bytes());
        hash_text(&mut hash, token);
    }
    for merge in &tokenizer.model.merges {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Text(pair) => pair.split_once(' ').unwrap_or((pair, "")),
        };
        hash_text(&mut hash, left);
        hash_text(&mut hash, right);
    }
    hex(&hash.finalize())
}

fn hash_text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u32).to_le_bytes());
    hash.update(text);
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use std::fs;

    use super::*;

    fn of(json: &Value) -> String {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join(TOKENIZER_FILE), json.to_string()).unwrap();
        tokenizer_fingerprint(dir.path()).unwrap()
    }

    #[test]
    fn spelling_does_not_count_but_tokens_and_merges_do() {
        let json = serde_json::json!({
            "added_tokens": [{"id": 2, "content": "<e>", "special": true}],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<e>": 2, "ab": 3},
                      "merges": [["a", "b"], ["ab", "a"]]},
        });
        let expected = of(&json);
        let changed = |pointer: &str, value: Value| {
            let mut json = json.clone();
            *json.pointer_mut(pointer).unwrap() = value;
            of(&json)
        };
        assert_eq!(changed("/model/merges", serde_json::json!(["a b", "ab a"])), expected);
        assert_eq!(changed("/model/vocab", serde_json::json!({"ab": 3, "b": 1, "a": 0})), expected);
        assert_eq!(changed("/added_tokens/0/special", serde_json::json!(false)), expected);
        assert_ne!(changed("/model/merges", serde_json::json!(["ab a", "a b"])), expected);
        assert_ne!(changed("/model/vocab/b", serde_json::json!(7)), expected);
        assert_ne!(changed("/added_tokens/0/content", serde_json::json!("<f>")), expected);
    }

    #[test]
    fn scored_vocabularies_count_by_place() {
        let json = serde_json::json!({"model": {"vocab": [["a", -1.5], ["b", 0]]}});
        let same = serde_json::json!({"model": {"vocab": {"b": 1, "a": 0}, "merges": []}});
        assert_eq!(of(&json), of(&same));
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused() {
        let dir = TempDir::new().unwrap();
        let missing = tokenizer_fingerprint(dir.path());
        assert!(matches!(missing, Err(TextError::Io { .. })));
        fs::write(dir.path().join(TOKENIZER_FILE), "{\"model\": 3}").unwrap();
        let wrong = tokenizer_fingerprint(dir.path());
        assert!(matches!(wrong, Err(TextError::TokenizerJson { .. })));
    }
}
