//! What a folder becomes.

use std::fs;

use serde_json::json;
use stagebus_shards::{ShardSet, ShardSetError};

use crate::model::{Folder, VOCAB_SIZE, Workshop};

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

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
