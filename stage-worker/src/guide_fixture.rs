//! Compiled constraints for the unit tests of this crate.

use std::sync::Arc;

use serde_json::json;
use stagebus_draft::constraint::{Constraint, Grammars, Guide};
use stagebus_shards::text::TextModel;

/// One letter a token, and then the end.
const LETTERS: [&str; 4] = ["a", "b", "c", "d"];

/// The end token.
pub(crate) const END: u32 = 4;

/// Number of tokens.
pub(crate) const VOCAB_SIZE: usize = 5;

/// What has a guide to texts that `pattern` matches.
pub(crate) fn guide(pattern: &str) -> Guide {
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                             "use_regex": false });
    let vocab: serde_json::Map<_, _> =
        (0_u32..).zip(LETTERS).map(|(id, letter)| (letter.to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "post_processor": null, "pre_tokenizer": byte_level, "decoder": byte_level,
        "added_tokens": [{ "id": END, "content": "</s>", "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false, "special": true }],
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    let text = Arc::new(TextModel::load(dir.path()).expect("a tokenizer"));
    let constraint = Constraint::Regex { pattern: pattern.to_owned() };
    Grammars::new(text, VOCAB_SIZE, &[END]).compile(&constraint).expect("a grammar")
}
