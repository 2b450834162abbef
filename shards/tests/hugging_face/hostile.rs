//! Folders that are damaged or made to do harm: typed errors, never a panic.

use std::fs;

use serde_json::{Value, json};
use stagebus_shards::hugging_face::HfErrorKind;
use stagebus_shards::{ShardError, ShardRequest, shard};

use crate::model::{Folder, Workshop};

const QUERY: &str = "model.layers.0.self_attn.q_proj.weight";

/// The error of a folder that is wrong in one way.
fn wrong(change: impl FnOnce(&mut Folder)) -> ShardError {
    let mut folder = Folder::default();
    change(&mut folder);
    Workshop::new(&folder).refused()
}

/// The error of a folder with other weights, which is one about that file.
fn with_weights(weights: &[u8]) -> HfErrorKind {
    let workshop = Workshop::new(&Folder::default());
    fs::write(workshop.model().join("model.safetensors"), weights).unwrap();
    match workshop.refused() {
        ShardError::HuggingFace(error) => {
            assert!(error.file().ends_with("model.safetensors"));
            error.into_kind()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = Folder::default().weights(|_, offsets| offsets);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let cuts = (0..header).step_by(97).chain([0, 7, 8, header - 1, header, whole.len() - 1]);
    for cut in cuts {
        match with_weights(&whole[..cut]) {
            HfErrorKind::HeaderLength { .. } => assert!(cut < header, "{cut}"),
            HfErrorKind::DataLength { .. } => assert!(cut >= header, "{cut}"),
            // An empty file cannot be mapped everywhere.
            HfErrorKind::Io { .. } => assert_eq!(cut, 0),
            other => panic!("{cut}: {other:?}"),
        }
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(matches!(with_weights(&longer), HfErrorKind::DataLength { .. }));
}

#[test]
fn headers_that_lie_are_errors() {
    let with_header = |header: &str| {
        let length = (header.len() as u64).to_le_bytes();
        with_weights(&[&length[..], header.as_bytes()].concat())
    };
    for header in ["", "[]", "{", "{\"a\": 1}", "nonsense", "{\"a\":{\"dtype\":\"F7\"}}"] {
        assert!(matches!(with_header(header), HfErrorKind::Header { .. }), "{header:?}");
    }
    assert!(matches!(with_weights(&u64::MAX.to_le_bytes()), HfErrorKind::HeaderLength { .. }));
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    assert!(matches!(with_header(&deep), HfErrorKind::Header { .. }));
    // Tensors that together pass the largest number, and one that does alone.
    let side = 1_u64 << 60;
    let tensors: Vec<String> = (0..15)
        .map(|idx| {
            let (start, end) = (idx * side, (idx + 1) * side);
            format!("\"t{idx}\":{{\"dtype\":\"U8\",\"shape\":[{side}],\"data_offsets\":[{start},{end}]}}")
        })
        .collect();
    let huge = format!("{{{}}}", tensors.join(","));
    assert!(matches!(
        with_header(&huge),
        HfErrorKind::DataLength { .. } | HfErrorKind::Header { .. }
    ));
    let product =
        "{\"t\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}";
    assert!(matches!(with_header(product), HfErrorKind::Header { .. }));
}

#[test]
fn offsets_that_overlap_or_leave_gaps_are_errors() {
    let folder = Folder::default();
    for shift in [-1_i64, 1] {
        let moved = folder.weights(|name, [start, end]| {
            let shift = if name == QUERY { shift } else { 0 };
            [start.wrapping_add_signed(shift), end.wrapping_add_signed(shift)]
        });
        assert!(matches!(with_weights(&moved), HfErrorKind::Header { .. }), "{shift}");
    }
    let turned = folder
        .weights(|name, [start, end]| if name == QUERY { [end, start] } else { [start, end] });
    assert!(matches!(with_weights(&turned), HfErrorKind::Header { .. }));
}

#[test]
fn tensors_that_are_missing_or_of_another_kind_are_named() {
    let remove =
        |name: &'static str| wrong(move |folder| folder.tensors.retain(|(found, _)| found != name));
    for name in [QUERY, "model.norm.weight", "model.embed_tokens.weight_scale"] {
        match remove(name) {
            ShardError::MissingTensor { tensor } => assert_eq!(tensor, name),
            other => panic!("{other:?}"),
        }
    }
    let untied = wrong(|folder| {
        folder.config.insert("tie_word_embeddings".to_owned(), json!(false));
    });
    assert!(matches!(untied, ShardError::MissingTensor { tensor } if tensor == "lm_head.weight"));
    for shape in [vec![16, 64], vec![1024], vec![32, 32, 1]] {
        match wrong(|folder| folder.tensor(QUERY).shape = shape.clone()) {
            ShardError::TensorShape { tensor, expected, .. } => {
                assert_eq!((&*tensor, &*expected), (QUERY, &[32, 32][..]));
            }
            other => panic!("{shape:?}: {other:?}"),
        }
    }
    for (name, dtype) in [(QUERY, "I16"), ("model.embed_tokens.weight_scale", "I32")] {
        match wrong(|folder| folder.tensor(name).dtype = dtype) {
            ShardError::HuggingFace(error) => {
                let HfErrorKind::TensorType { tensor, .. } = error.into_kind() else {
                    panic!("{name}")
                };
                assert_eq!(tensor, name);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn configurations_are_refused_by_field() {
    for (field, value) in [
        ("model_type", Value::Null),
        ("hidden_act", json!("gelu")),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!("32")),
        ("hidden_size", json!(1_u64 << 40)),
        ("num_hidden_layers", Value::Null),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(15)),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 2.0})),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 0.5})),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0})),
        ("partial_rotary_factor", json!(0.35)),
        ("num_hidden_layers", json!(1_u64 << 31)),
        ("attn_logit_softcapping", json!(50.0)),
        ("rms_norm_eps", json!("small")),
        ("tie_word_embeddings", json!(1)),
        ("eos_token_id", json!("end")),
        ("rope_theta", json!(-3.0)),
    ] {
        let error = wrong(|folder| {
            folder.config.insert(field.to_owned(), value.clone());
        });
        match error {
            ShardError::HuggingFace(error) => {
                assert!(error.file().ends_with("config.json"));
                let HfErrorKind::Field { field: found, .. } = error.into_kind() else {
                    panic!("{field}")
                };
                assert_eq!(found, field, "{value}");
            }
            other => panic!("{field} {value}: {other:?}"),
        }
    }
    let workshop = Workshop::new(&Folder::default());
    fs::write(workshop.model().join("config.json"), "[1]").unwrap();
    assert!(matches!(workshop.refused(), ShardError::HuggingFace(_)));
    let unknown = wrong(|folder| {
        folder.config.insert("model_type".to_owned(), json!("mamba"));
    });
    match unknown {
        ShardError::UnknownArchitecture { found, known } => {
            assert_eq!(found, "mamba");
            assert!(known.contains(&"qwen3_moe"), "{known:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn fields_of_other_families_are_refused_too() {
    let check = |model_type: &str, field: &str, value: Value| {
        let error = wrong(|folder| {
            folder.config.insert("model_type".to_owned(), json!(model_type));
            for known in [
                "sliding_window",
                "num_experts",
                "num_experts_per_tok",
                "original_max_position_embeddings",
            ] {
                folder.config.insert(known.to_owned(), json!(4));
            }
            folder.config.insert(field.to_owned(), value.clone());
        });
        let ShardError::HuggingFace(error) = error else { panic!("{model_type} {field}: {error}") };
        let HfErrorKind::Field { field: found, .. } = error.into_kind() else { panic!("{field}") };
        assert_eq!(found, field, "{value}");
    };
    check("gemma3_text", "hidden_activation", json!("silu"));
    check("gemma3_text", "layer_types", json!(["full_attention"]));
    check("gemma3_text", "layer_types", json!(["full_attention", "chunked_attention"]));
    check("gemma3_text", "use_bidirectional_attention", json!(true));
    check("phi3", "rope_scaling", json!({"type": "longrope", "short_factor": [1.0]}));
    check("mistral", "sliding_window", json!(0));
    check("qwen3_moe", "num_experts_per_tok", json!(5));
    check("qwen3_moe", "decoder_sparse_step", json!(2));
    check("qwen3_moe", "mlp_only_layers", json!([0]));
}

#[test]
fn an_index_that_does_not_fit_is_named() {
    let check = |index: Value, fits: fn(&HfErrorKind) -> bool| {
        let workshop = Workshop::new(&Folder::default());
        let dir = workshop.model();
        fs::rename(dir.join("model.safetensors"), dir.join("a.safetensors")).unwrap();
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        let ShardError::HuggingFace(error) = workshop.refused() else { panic!("{index}") };
        assert!(error.file().ends_with("model.safetensors.index.json"));
        assert!(fits(error.kind()), "{index}: {error}");
    };
    check(json!([]), |kind| matches!(kind, HfErrorKind::Index));
    check(json!({"weight_map": {}}), |kind| matches!(kind, HfErrorKind::Index));
    check(json!({"weight_map": {QUERY: 1}}), |kind| matches!(kind, HfErrorKind::Index));
    check(
        json!({"weight_map": {QUERY: "b.safetensors"}}),
        |kind| matches!(kind, HfErrorKind::IndexFile { file } if file == "b.safetensors"),
    );
    for outside in ["../a.safetensors", "/a.safetensors", "x/a.safetensors", "..", ""] {
        check(json!({"weight_map": {QUERY: outside}}), |kind| {
            matches!(kind, HfErrorKind::IndexFileName { .. })
        });
    }
    check(
        json!({"weight_map": {"lost": "a.safetensors"}}),
        |kind| matches!(kind, HfErrorKind::IndexTensor { tensor, .. } if tensor == "lost"),
    );
}

#[test]
fn a_tensor_in_two_files_is_named() {
    let workshop = Workshop::new(&Folder::default());
    let dir = workshop.model();
    fs::rename(dir.join("model.safetensors"), dir.join("a.safetensors")).unwrap();
    fs::copy(dir.join("a.safetensors"), dir.join("b.safetensors")).unwrap();
    let map = json!({"weight_map": {QUERY: "a.safetensors", "model.norm.weight": "b.safetensors"}});
    fs::write(dir.join("model.safetensors.index.json"), map.to_string()).unwrap();
    let ShardError::HuggingFace(error) = workshop.refused() else { panic!() };
    assert!(error.file().ends_with("b.safetensors"));
    assert!(matches!(error.kind(), HfErrorKind::TwoTensors { .. }));
}

#[test]
fn more_tokens_than_rows_are_refused() {
    let error = wrong(|folder| {
        folder.tokenizer["model"]["vocab"]["ba"] = json!(6);
    });
    assert!(matches!(error, ShardError::Vocabulary { n_tokens: 7, vocab_size: 6 }));
    let workshop = Workshop::new(&Folder::default());
    fs::remove_file(workshop.model().join("tokenizer.json")).unwrap();
    assert!(matches!(workshop.refused(), ShardError::Text(_)));
}

#[test]
fn heads_that_cannot_be_cut_are_refused() {
    let cut = |rank: Option<Vec<u16>>, n: usize| {
        let workshop = Workshop::new(&Folder { rank, ..Folder::default() });
        match workshop.shard(Some(n)) {
            Err(ShardError::HuggingFace(error)) => error.into_kind(),
            other => panic!("{other:?}"),
        }
    };
    let rank = || Some(vec![3, 0, 5]);
    assert!(matches!(cut(None, 2), HfErrorKind::Io { .. }));
    assert!(matches!(cut(rank(), 0), HfErrorKind::RankLength { .. }));
    assert!(matches!(cut(rank(), 4), HfErrorKind::RankLength { expected: 4, found: 3 }));
    assert!(matches!(cut(Some(vec![3, 3]), 2), HfErrorKind::Rank { entry: 1, token: 3, .. }));
    assert!(matches!(cut(Some(vec![9, 3]), 2), HfErrorKind::Rank { entry: 0, token: 9, .. }));

    let workshop = Workshop::new(&Folder::default());
    let missing = ShardRequest {
        tokenizer_from: Some(workshop.dir.path().join("nothing")),
        ..ShardRequest::new(workshop.model(), workshop.set(), 1)
    };
    let error = shard(&missing, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ShardError::TokenizerFrom(_)));
}
