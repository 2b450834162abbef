//! What a folder becomes.

use std::fs;

use serde_json::json;
use stagebus_shards::{ShardSet, ShardSetError};

use crate::model::{Folder, VOCAB_SIZE, Workshop, contains};

#[test]
fn weights_stay_as_they_are_stored() {
    let mut folder = Folder::default();
    let workshop = Workshop::new(&folder);
    let manifest = workshop.shard(None).unwrap();
    assert_eq!(manifest.dims.vocab_size, VOCAB_SIZE);
    assert_eq!((manifest.dims.head_dim, manifest.dims.context_length), (16, 64));
    assert_eq!((manifest.bos_id, &*manifest.eos_ids), (Some(4), &[4, 5][..]));
    assert_eq!((manifest.head_tokens.as_ref(), manifest.n_head_rows()), (None, VOCAB_SIZE));
    let bin = fs::read(workshop.set().join("stage-0.bin")).unwrap();
    for name in [
        "model.embed_tokens.weight",
        "model.embed_tokens.weight_scale",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight_scale",
    ] {
        assert!(contains(&bin, &folder.tensor(name).bytes), "{name}");
    }
    ShardSet::open(&workshop.set()).unwrap().verify_stage(0).unwrap();
}

#[test]
fn weights_in_several_files_are_those_of_one() {
    let folder = Folder::default();
    let workshop = Workshop::new(&folder);
    let whole = workshop.shard(None).unwrap();
    fs::remove_dir_all(workshop.set()).unwrap();
    folder.write_parts(&workshop.model());
    let parts = workshop.shard(None).unwrap();
    assert_eq!(parts.fingerprint, whole.fingerprint);
    // Of both, the one file counts.
    fs::remove_dir_all(workshop.set()).unwrap();
    fs::write(workshop.model().join("model.safetensors"), "no weights").unwrap();
    assert!(workshop.shard(None).is_err());
}

#[test]
fn a_head_is_cut_to_the_first_tokens_of_the_rank() {
    let workshop = Workshop::new(&Folder::default());
    let manifest = workshop.shard(Some(3)).unwrap();
    assert_eq!(manifest.n_head_rows(), 3);
    let set = ShardSet::open(&workshop.set()).unwrap();
    assert_eq!(set.head_tokens().unwrap(), Some(vec![0, 3, 5]));
    // The rows of these tokens follow each other; the whole table is there for the inputs.
    let mut folder = Folder::default();
    let table = folder.tensor("model.embed_tokens.weight").bytes.clone();
    let rows: Vec<u8> = [0, 3, 5].iter().flat_map(|row| table[row * 32..][..32].to_vec()).collect();
    let bin = fs::read(workshop.set().join("stage-0.bin")).unwrap();
    assert!(contains(&bin, &rows) && contains(&bin, &table));

    let file = workshop.set().join("head_tokens.u32");
    fs::write(&file, [1, 0, 0, 0]).unwrap();
    assert!(matches!(set.head_tokens(), Err(ShardSetError::Size { .. })));
    fs::write(&file, [7; 12]).unwrap();
    assert!(matches!(set.head_tokens(), Err(ShardSetError::Hash { .. })));
}

#[test]
fn a_head_of_its_own_is_used() {
    let mut folder = Folder::default();
    let mut head = folder.tensor("model.embed_tokens.weight").clone();
    head.dtype = "F16";
    head.bytes = (0..VOCAB_SIZE * 32).flat_map(|idx| [idx as u8, 0x21]).collect();
    let bytes = head.bytes.clone();
    folder.tensors.push(("lm_head.weight".to_owned(), head));
    folder.config.insert("tie_word_embeddings".to_owned(), json!(false));
    let workshop = Workshop::new(&folder);
    workshop.shard(None).unwrap();
    assert!(contains(&fs::read(workshop.set().join("stage-0.bin")).unwrap(), &bytes));
}

#[test]
fn turns_templates_and_special_tokens_come_from_where_they_are() {
    let workshop = Workshop::new(&Folder::default());
    let write = |name: &str, json: serde_json::Value| {
        fs::write(workshop.model().join(name), json.to_string()).unwrap();
    };
    let read = |name: &str| fs::read_to_string(workshop.set().join(name)).unwrap();
    write("generation_config.json", json!({"eos_token_id": [5, 2]}));
    write(
        "tokenizer_config.json",
        json!({
            "bos_token": {"content": "<s>"}, "eos_token": "</s>", "model_max_length": 64,
            "chat_template": [{"name": "tools", "template": "T"},
                              {"name": "default", "template": "{{ bos_token }}D"}],
        }),
    );
    let manifest = workshop.shard(None).unwrap();
    assert_eq!(manifest.eos_ids, [2, 4, 5]);
    let set = ShardSet::open(&workshop.set()).unwrap();
    set.verify_text().unwrap();
    assert_eq!(read("chat_template.jinja"), "{{ bos_token }}D");
    let text = stagebus_shards::text::TextModel::load(&set.dir).unwrap();
    assert_eq!(text.render_chat(&[json!({"role": "user", "content": "a"})]).unwrap(), "<s>D");

    // A file of its own comes first.
    write("tokenizer_config.json", json!({"chat_template": "O"}));
    fs::write(workshop.model().join("chat_template.jinja"), "F").unwrap();
    fs::remove_dir_all(workshop.set()).unwrap();
    workshop.shard(None).unwrap();
    assert_eq!(read("chat_template.jinja"), "F");
    assert!(!workshop.set().join("special_tokens_map.json").is_file());
}
