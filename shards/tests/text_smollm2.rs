//! The tokenizer and chat template of a real model, against recorded results of other programs.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test ends at the first surprise")]

#[path = "support/runtime.rs"]
mod runtime;

use std::sync::OnceLock;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use stagebus_shards::gguf::Gguf;
use stagebus_shards::text::{TextFiles, TextModel, write_text_files};

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: &'a str,
}

/// A prompt as the reference pipeline rendered and encoded it.
#[derive(Deserialize)]
struct ChatCase {
    prompt: String,
    template_text: String,
    input_ids: Vec<u32>,
}

/// A text and the ids that the model's original tokenizer gives for it.
#[derive(Deserialize)]
struct TextCase {
    text: String,
    ids: Vec<u32>,
}

fn model() -> &'static (TextModel, TextFiles) {
    static MODEL: OnceLock<(TextModel, TextFiles)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let gguf = Gguf::open(runtime::smollm2()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let files = write_text_files(&gguf, dir.path()).unwrap();
        (TextModel::load(dir.path()).unwrap(), files)
    })
}

#[test]
fn special_tokens_are_those_of_the_model() {
    let (model, files) = model();
    assert_eq!(files.bos_id, Some(1));
    assert_eq!(files.eos_ids, [2]);
    assert!(!files.add_bos);
    assert_eq!(files.n_tokens, 49152);
    assert_eq!(model.vocab_size(), 49152);
}

#[test]
fn chats_equal_the_reference() {
    let (model, _) = model();
    let cases: Vec<ChatCase> =
        serde_json::from_str(include_str!("fixtures/smollm2_chats.json")).unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let messages = [Message { role: "user", content: &case.prompt }];
        assert_eq!(model.render_chat(&messages).unwrap(), case.template_text);
        assert_eq!(model.encode(&case.template_text, true).unwrap(), case.input_ids);
        assert_eq!(model.encode_chat(&messages).unwrap(), case.input_ids);
    }
}

#[test]
fn texts_equal_the_original_tokenizer() {
    let (model, _) = model();
    let cases: Vec<TextCase> =
        serde_json::from_str(include_str!("fixtures/smollm2_texts.json")).unwrap();
    for case in &cases {
        assert_eq!(model.encode(&case.text, true).unwrap(), case.ids, "{:?}", case.text);
        let plain = !case.ids.iter().any(|&id| id < 17);
        assert!(!plain || model.decode(&case.ids) == case.text, "{:?}", case.text);
    }
    assert!(cases.len() >= 30);
}

#[test]
fn an_emoji_is_given_out_when_it_is_complete() {
    let (model, _) = model();
    let ids = model.encode("🦀", false).unwrap();
    assert!(ids.len() > 1);
    let mut detokenizer = model.detokenizer();
    let pieces: Vec<_> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    let (last, before) = pieces.split_last().unwrap();
    assert!(before.iter().all(Option::is_none));
    assert_eq!(last.as_deref(), Some("🦀"));
    assert_eq!(detokenizer.finish(), None);
}

#[test]
fn a_text_that_ends_inside_a_character_ends_with_a_replacement() {
    let (model, _) = model();
    let ids = model.encode("🦀", false).unwrap();
    let mut detokenizer = model.detokenizer();
    assert_eq!(detokenizer.push(ids[0]), None);
    assert_eq!(detokenizer.finish().as_deref(), Some("\u{fffd}"));
}

#[test]
fn special_tokens_and_unknown_ids_have_no_text() {
    let (model, _) = model();
    assert_eq!(model.decode(&[1, 2, 49152, u32::MAX]), "");
}

/// Text with many scripts, symbols and control characters. The model has no token for the byte
/// that begins a character from U+40000 on, all of which are unassigned or private.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[^\\p{C}]{0,40}",
        "[ \\t\\r\\na-z0-9.,'é日本語🦀👨‍👩‍👧]{0,60}",
        prop::collection::vec(prop::char::range('\0', '\u{3ffff}'), 0..20)
            .prop_map(String::from_iter),
    ]
}

proptest! {
    #[test]
    fn pushes_join_to_the_library_decode(ids in prop::collection::vec(0u32..49152, 0..60)) {
        let (model, _) = model();
        let mut detokenizer = model.detokenizer();
        let mut joined = String::new();
        for &id in &ids {
            joined.extend(detokenizer.push(id));
        }
        joined.extend(detokenizer.finish());
        prop_assert_eq!(&joined, &library_decode(&ids));
        prop_assert_eq!(joined, model.decode(&ids));
    }

    #[test]
    fn text_survives_encoding_and_decoding(text in any_text()) {
        let (model, _) = model();
        let ids = model.encode(&text, false).unwrap();
        prop_assert_eq!(model.decode(&ids), text);
    }
}

/// What the tokenizer library gives for all ids at once.
fn library_decode(ids: &[u32]) -> String {
    static TOKENIZER: OnceLock<tokenizers::Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| {
        let gguf = Gguf::open(runtime::smollm2()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        write_text_files(&gguf, dir.path()).unwrap();
        tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap()
    });
    tokenizer.decode(ids, true).unwrap()
}
