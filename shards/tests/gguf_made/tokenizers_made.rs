//! Tokenizers made for the purpose, converted from GGUF metadata and used.

use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};
use stagebus_shards::text::{ChatTemplate, TextError, TextFiles, TextModel, write_text_files};
use tempfile::TempDir;

use crate::open;
use crate::writer::{GgufWriter, MetaValue};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: &'static str,
}

fn ints(numbers: &[i32]) -> MetaValue {
    MetaValue::Array(numbers.iter().copied().map(MetaValue::I32).collect())
}

fn with_tokens(model: &str, tokens: &[(String, i32)]) -> GgufWriter {
    let kinds: Vec<i32> = tokens.iter().map(|(_, kind)| *kind).collect();
    GgufWriter::default()
        .meta("tokenizer.ggml.model", MetaValue::str(model))
        .meta("tokenizer.ggml.tokens", MetaValue::strs(tokens.iter().map(|(token, _)| &**token)))
        .meta("tokenizer.ggml.token_type", ints(&kinds))
}

/// The printable characters that stand for the 256 bytes.
fn byte_characters() -> Vec<(String, i32)> {
    let own = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let codes = (0..256).filter(own).chain(256..256 + 68);
    codes.map(|code| (char::from_u32(code).unwrap().to_string(), NORMAL)).collect()
}

/// A byte-level vocabulary: `<s>`, `</s>`, `<tool>` (user-defined), the bytes, and some merges.
fn byte_level(pre: &str) -> GgufWriter {
    let mut tokens = vec![
        ("<s>".to_owned(), CONTROL),
        ("</s>".to_owned(), CONTROL),
        ("<tool> é".to_owned(), USER_DEFINED),
    ];
    tokens.extend(byte_characters());
    for merged in ["he", "ll", "hell", "hello", "Ġhello", "12", "123"] {
        tokens.push((merged.to_owned(), NORMAL));
    }
    with_tokens("gpt2", &tokens)
        .meta("tokenizer.ggml.pre", MetaValue::str(pre))
        .meta(
            "tokenizer.ggml.merges",
            MetaValue::strs(["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"]),
        )
        .meta("tokenizer.ggml.bos_token_id", MetaValue::U32(0))
        .meta("tokenizer.ggml.eos_token_id", MetaValue::U32(1))
}

/// A SentencePiece vocabulary with scores, as the "llama" model has it.
fn sentence_piece() -> GgufWriter {
    let mut tokens = vec![
        ("<unk>".to_owned(), UNKNOWN),
        ("<s>".to_owned(), CONTROL),
        ("</s>".to_owned(), CONTROL),
    ];
    tokens.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), BYTE)));
    let pieces = ["▁t", "he", "▁the", "▁a", "the", "▁", "t", "h", "e", "a", "b"];
    tokens.extend(pieces.iter().map(|&piece| (piece.to_owned(), NORMAL)));
    tokens.push(("[T]".to_owned(), USER_DEFINED));
    let mut scores = vec![0.0; 259];
    scores.extend((0..pieces.len()).map(|rank| -(rank as f32)));
    scores.push(0.0);
    with_tokens("llama", &tokens)
        .meta(
            "tokenizer.ggml.scores",
            MetaValue::Array(scores.into_iter().map(MetaValue::F32).collect()),
        )
        .meta("tokenizer.ggml.bos_token_id", MetaValue::U32(1))
        .meta("tokenizer.ggml.eos_token_id", MetaValue::U32(2))
        .meta("tokenizer.ggml.unknown_token_id", MetaValue::U32(0))
}

fn convert(written: &GgufWriter) -> Result<(TempDir, TextFiles), TextError> {
    let (_file, opened) = open(&written.bytes());
    let dir = tempfile::tempdir().unwrap();
    let files = write_text_files(&opened.unwrap(), dir.path())?;
    Ok((dir, files))
}

fn load(written: &GgufWriter) -> (TextModel, TextFiles) {
    let (dir, files) = convert(written).unwrap();
    (TextModel::load(dir.path()).unwrap(), files)
}

fn error(written: &GgufWriter) -> TextError {
    convert(written).expect_err("the metadata is wrong")
}

/// The tokens of a text, joined by `|`.
fn pieces(model: &TextModel, text: &str) -> String {
    let ids = model.encode(text, false).unwrap();
    ids.iter().map(|&id| model.decode(&[id])).collect::<Vec<_>>().join("|")
}

#[test]
fn every_known_pre_tokenizer_loads_and_keeps_the_text() {
    let text = "Hello hello123 4567 don't\n\n  x =\ty; 日本 ½é🦀 (a,b)...\r\n ";
    for pre in [
        "default",
        "llama-bpe",
        "gpt-2",
        "smollm",
        "qwen2",
        "qwen35",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "falcon",
        "gpt-4o",
        "tekken",
        "bloom",
        "viking",
        "bailingmoe",
        "seed-coder",
        "command-r",
        "starcoder",
        "stablelm2",
    ] {
        let (model, _) = load(&byte_level(pre));
        assert_eq!(model.decode(&model.encode(text, false).unwrap()), text, "{pre}");
    }
}

#[test]
fn digits_are_grouped_as_the_pre_tokenizer_says() {
    for (pre, expected) in [
        ("smollm", "h|1|2|3|1|2| hello"),
        ("qwen2", "h|1|2|3|1|2| hello"),
        ("llama-bpe", "h|123|12| hello"),
        ("gpt-2", "h|123|12| hello"),
        ("deepseek-v3", "h|123|12| hello"),
    ] {
        let (model, _) = load(&byte_level(pre));
        assert_eq!(pieces(&model, "h12312 hello"), expected, "{pre}");
    }
}

#[test]
fn user_defined_tokens_are_text_and_control_tokens_are_not() {
    let (model, files) = load(&byte_level("gpt-2"));
    let ids = model.encode("hello<tool> é</s>hello", false).unwrap();
    assert_eq!(ids.len(), 4);
    assert_eq!((ids[1], ids[2]), (2, 1));
    assert_eq!(model.decode(&ids), "hello<tool> éhello");
    assert_eq!((files.bos_id, files.eos_ids.as_slice()), (Some(0), [1].as_slice()));
}

#[test]
fn bos_and_eos_are_added_as_the_file_says() {
    for (pre, add_bos, add_eos, expected) in [
        ("gpt-2", None, None, (false, false)),
        ("llama-bpe", None, None, (true, false)),
        ("llama-bpe", Some(false), None, (false, false)),
        ("gpt-2", Some(true), Some(true), (true, true)),
    ] {
        let mut written = byte_level(pre);
        if let Some(add) = add_bos {
            written = written.meta("tokenizer.ggml.add_bos_token", MetaValue::Bool(add));
        }
        if let Some(add) = add_eos {
            written = written.meta("tokenizer.ggml.add_eos_token", MetaValue::Bool(add));
        }
        let (model, files) = load(&written);
        let ids = model.encode("hello", true).unwrap();
        assert_eq!((ids[0] == 0, ids.last() == Some(&1)), expected, "{pre}");
        assert_eq!(files.add_bos, expected.0);
        assert_eq!(model.encode("hello", false).unwrap().len(), 1);
    }
}

#[test]
fn turn_ends_are_found_by_metadata_and_by_name() {
    let mut tokens = byte_characters();
    tokens.extend(["<|eot_id|>", "<|eom_id|>", "<eot>"].map(|t| (t.to_owned(), CONTROL)));
    tokens.push(("<|im_end|>".to_owned(), NORMAL));
    let written = with_tokens("gpt2", &tokens)
        .meta("tokenizer.ggml.merges", MetaValue::strs(["a b"; 0]))
        .meta("tokenizer.ggml.eot_token_id", MetaValue::U32(258));
    let (_, files) = load(&written);
    assert_eq!(files.eos_ids, [256, 257, 258]);
    assert_eq!(files.bos_id, None);
}

#[test]
fn wrong_metadata_have_their_errors() {
    let pre = error(&byte_level("klingon"));
    assert!(matches!(&pre, TextError::UnknownPreTokenizer { pre } if pre == "klingon"), "{pre}");
    let model = error(&with_tokens("bert", &byte_characters()));
    assert!(matches!(&model, TextError::UnknownTokenizerModel { model } if model == "bert"));
    let none = error(&GgufWriter::default());
    assert!(matches!(none, TextError::Gguf(_)), "{none}");

    let replace = |key: &str, value: MetaValue| {
        let mut written = byte_level("gpt-2");
        let entry = written.metadata.iter_mut().find(|(found, _)| found == key).unwrap();
        entry.1 = value;
        error(&written)
    };
    let merge = replace("tokenizer.ggml.merges", MetaValue::strs(["h e", "z z"]));
    assert!(matches!(&merge, TextError::BadMerge { index: 1, merge } if merge == "z z"));
    let merge = replace("tokenizer.ggml.merges", MetaValue::strs(["he"]));
    assert!(matches!(merge, TextError::BadMerge { index: 0, .. }));
    let kinds = replace("tokenizer.ggml.token_type", ints(&[1, 1]));
    assert!(matches!(kinds, TextError::ArrayLength { found: 2, expected: 266, .. }), "{kinds}");
    let eos = replace("tokenizer.ggml.eos_token_id", MetaValue::U32(266));
    assert!(matches!(eos, TextError::TokenOutOfRange { id: 266, n_tokens: 266, .. }), "{eos}");

    let mut tokens = byte_characters();
    tokens.push(("a".to_owned(), NORMAL));
    let twice =
        with_tokens("gpt2", &tokens).meta("tokenizer.ggml.merges", MetaValue::strs(["a b"]));
    assert!(matches!(error(&twice), TextError::DuplicateToken { second: 256, .. }));
}

#[test]
fn sentence_pieces_merge_by_score() {
    let (model, files) = load(&sentence_piece());
    assert!(files.add_bos);
    // "▁t" has the best score, then "he", then "▁the".
    assert_eq!(model.encode("the", true).unwrap(), [1, 261]);
    assert_eq!(model.encode("athe", false).unwrap(), [262, 263]);
    // "é" is not a piece: its bytes are.
    assert_eq!(model.encode("é", false).unwrap(), [264, 3 + 0xc3, 3 + 0xa9]);
    // The space in front comes back after each added token, as in llama.cpp.
    assert_eq!(model.encode("a[T]a</s>", false).unwrap(), [262, 270, 262, 2]);
    assert_eq!(model.decode(&[1, 261, 262, 2]), "the a");
    assert_eq!(model.decode(&[264, 3 + 0xc3, 3 + 0xa9]), "é");
}

#[test]
fn a_first_space_stays_where_text_goes_on() {
    let (model, _) = load(&sentence_piece());
    let mut own = model.detokenizer();
    assert_eq!([own.push(261), own.push(261)], [Some("the".to_owned()), Some(" the".to_owned())]);
    let mut continuing = model.continuing_detokenizer();
    assert_eq!(continuing.push(261).as_deref(), Some(" the"));
}

#[test]
fn the_space_prefix_can_be_off() {
    let written = sentence_piece().meta("tokenizer.ggml.add_space_prefix", MetaValue::Bool(false));
    let (model, _) = load(&written);
    assert_eq!(model.encode("the", false).unwrap(), [263]);
    assert_eq!(model.decode(&[261]), " the");
}

/// The SentencePiece model, converted once.
fn shared_sentence_piece() -> &'static TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(|| load(&sentence_piece()).0)
}

proptest! {
    #[test]
    fn sentence_piece_pushes_join_to_the_decode(ids in prop::collection::vec(0u32..280, 0..40)) {
        let model = shared_sentence_piece();
        let mut detokenizer = model.detokenizer();
        let mut joined = String::new();
        for &id in &ids {
            joined.extend(detokenizer.push(id));
        }
        joined.extend(detokenizer.finish());
        prop_assert_eq!(joined, model.decode(&ids));
    }

    #[test]
    fn sentence_piece_text_comes_back(text in "[theab é🦀日\\n]{0,30}") {
        let model = shared_sentence_piece();
        let ids = model.encode(&text, true).unwrap();
        prop_assert_eq!(model.decode(&ids), text);
    }
}

fn render(template: &str, messages: &[Message]) -> Result<String, TextError> {
    ChatTemplate::new(template, Some("<s>"), Some("</s>"))?.render::<_, ()>(messages, &[], true)
}

const CHAT: [Message; 2] =
    [Message { role: "system", content: " be brief " }, Message { role: "user", content: "hi" }];

#[test]
fn templates_behave_as_in_python() {
    for (template, expected) in [
        // Lines of blocks alone leave no trace.
        (
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n",
            "system\nuser\n",
        ),
        ("{{ bos_token }}{{ messages[0]['content'].strip() }}{{ eos_token }}", "<s>be brief</s>"),
        ("{{ messages[0]['content'] | trim }}|{{ messages[-1].role.upper() }}", "be brief|USER"),
        ("{% if tools is none and not unheard_of %}plain{% endif %}", "plain"),
        ("{{ tools is iterable }} {{ messages is iterable }}", "False True"),
        ("{% generation %}{{ messages[1]['content'] }}{%- endgeneration -%} !", "hi!"),
        (
            "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
            "system",
        ),
        (
            "{{ {'a': [1, true, none], 'b': '<é>'} | tojson }}",
            "{\"a\": [1, true, null], \"b\": \"<é>\"}",
        ),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% if add_generation_prompt %}assistant{% endif %}", "assistant"),
    ] {
        assert_eq!(render(template, &CHAT).unwrap(), expected, "{template}");
    }
}

#[test]
fn a_template_that_knows_calls_gets_functions_and_others_get_text() {
    let messages = [
        json!({"role": "user", "content": "hi"}),
        json!({"role": "assistant", "content": "", "tool_calls":
            [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}]}),
    ];
    let tools = [json!({"name": "f"})];
    let render = |template: &str, tools: &[Value]| {
        ChatTemplate::new(template, None, None).unwrap().render(&messages, tools, true).unwrap()
    };
    let knows = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}\
        {% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    assert_eq!(render(knows, &tools), "[{\"name\": \"f\"}]hi<tool_call>{\"n\": 1}");
    assert_eq!(render(knows, &[]), "hi<tool_call>{\"n\": 1}", "no functions are none");
    // Another form of calls than the one that answers are read in.
    let other = knows.replace("<tool_call>", "[CALL]");
    let text = render(&other, &tools);
    assert!(text.starts_with("# Tools") && text.contains("<tools>\n{\"name\": \"f\"}\n"), "{text}");
    let call = "hi<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>";
    assert!(text.ends_with(call), "{text}");
    assert_eq!(render(&other, &[]), call);
}

#[test]
fn bad_templates_have_their_errors() {
    let refusal = render("{{ raise_exception('roles must alternate') }}", &CHAT).unwrap_err();
    assert!(
        matches!(&refusal, TextError::TemplateRefusal { reason } if reason == "roles must alternate")
    );
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let endless = render(endless, &CHAT).unwrap_err();
    assert!(matches!(endless, TextError::TemplateTooLong { .. }), "{endless}");
    let syntax = render("{% if %}", &CHAT).unwrap_err();
    assert!(matches!(syntax, TextError::TemplateSyntax { .. }), "{syntax}");
    let failing = render("{{ nothing.at.all }}", &CHAT).unwrap_err();
    assert!(matches!(failing, TextError::Template { .. }), "{failing}");
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(render(recursive, &CHAT).is_err());
}

#[test]
fn chats_need_a_template() {
    let (model, files) = load(&byte_level("gpt-2"));
    assert_eq!(files.files, ["tokenizer.json", "special_tokens_map.json"]);
    let error = model.encode_chat(&CHAT).unwrap_err();
    assert!(matches!(error, TextError::NoChatTemplate));
    assert!(error.to_string().contains("\"prompt\""));

    let template = "{{ bos_token }}{{ messages[1].content }}";
    let written = byte_level("gpt-2").meta("tokenizer.chat_template", MetaValue::str(template));
    let (model, files) = load(&written);
    assert_eq!(files.files.len(), 3);
    assert_eq!(model.render_chat(&CHAT).unwrap(), "<s>hi");
    assert_eq!(model.encode_chat(&CHAT).unwrap()[0], 0);
}

#[test]
fn a_folder_without_a_tokenizer_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let check = |dir: &Path, expected: fn(&TextError) -> bool| {
        let error = TextModel::load(dir).unwrap_err();
        assert!(expected(&error), "{error:?}");
    };
    check(dir.path(), |error| matches!(error, TextError::Io { .. }));
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, "{}").unwrap();
    check(dir.path(), |error| matches!(error, TextError::Tokenizer { .. }));
    let words = r#"{"version":"1.0","added_tokens":[],"decoder":{"type":"WordPiece","prefix":"x","cleanup":false},
        "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
    std::fs::write(&path, words).unwrap();
    check(
        dir.path(),
        |error| matches!(error, TextError::UnknownDecoder { decoder, .. } if decoder == "WordPiece"),
    );
}
