//! A tiny shard set: every byte is a token of its own, and two more end the text and start it.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use stagebus_shards::manifest::{
    FORMAT_VERSION, FileEntry, MANIFEST_FILE, ModelDims, StageEntry, WeightMode,
};
use stagebus_shards::text::{CHAT_TEMPLATE_FILE, TOKENIZER_FILE};
use stagebus_shards::{Form, Manifest};

/// The token that starts a message.
pub(crate) const START: u32 = 256;
/// The token that ends the text.
pub(crate) const END: u32 = 257;
/// Number of tokens.
pub(crate) const VOCAB_SIZE: usize = 258;
/// Longest sequence.
pub(crate) const CONTEXT: usize = 512;
/// Layers of the model.
const N_LAYERS: usize = 6;

/// Writes the files of a shard set with `n_stages` stages; the stage files are no graphs.
pub(crate) fn write(dir: &Path, n_stages: usize) -> Manifest {
    let template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}\
                    {% if tools %}<s>{{ tools | tojson }} <tool_call>{% endif %}<s>";
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        model: "tiny".to_owned(),
        architecture: "test".to_owned(),
        fingerprint: String::new(),
        source: "tiny".to_owned(),
        weights: WeightMode::Exact,
        floats: None,
        form: Form::Stateful,
        dims: ModelDims {
            n_layers: N_LAYERS,
            hidden_dim: 16,
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: 1,
            vocab_size: VOCAB_SIZE,
            context_length: CONTEXT,
        },
        bos_id: None,
        eos_ids: vec![END],
        stages: (0..n_stages).map(|stage| stage_entry(dir, stage, n_stages)).collect(),
        head_tokens: None,
        text_files: vec![
            file(dir, TOKENIZER_FILE, &tokenizer().to_string()),
            file(dir, CHAT_TEMPLATE_FILE, template),
        ],
    };
    manifest.fingerprint = manifest.content_fingerprint();
    fs::write(dir.join(MANIFEST_FILE), serde_json::to_vec(&manifest).unwrap()).unwrap();
    manifest
}

fn stage_entry(dir: &Path, index: usize, n_stages: usize) -> StageEntry {
    StageEntry {
        index,
        first_layer: index * N_LAYERS / n_stages,
        end_layer: (index + 1) * N_LAYERS / n_stages,
        cost_share: 1.0,
        xml: file(dir, &format!("stage-{index}.xml"), "no graph"),
        bin: file(dir, &format!("stage-{index}.bin"), "no weights"),
    }
}

fn file(dir: &Path, name: &str, content: &str) -> FileEntry {
    fs::write(dir.join(name), content).unwrap();
    let sha256 = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    FileEntry { name: name.to_owned(), bytes: content.len() as u64, sha256 }
}

/// A byte-level tokenizer without merges, in which a byte's token has the byte's number.
fn tokenizer() -> Value {
    let mut next = 0x100;
    let mut vocab = Map::new();
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { u32::from(byte) } else { next };
        next += u32::from(!printable);
        vocab.insert(char::from_u32(code).unwrap().to_string(), json!(byte));
    }
    let added = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added(START, "<s>"), added(END, "</s>")],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false,
        },
        "post_processor": null,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false,
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": [],
        },
    })
}
