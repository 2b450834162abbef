//! Models and requests that are refused, by error and with nothing left behind.

use stagebus_shards::gguf::{GgmlType, GgufErrorKind};
use stagebus_shards::split::SplitError;
use stagebus_shards::{ShardError, shard};

use crate::Workshop;
use crate::synthetic::{Synthetic, Wrong};

/// Shards a wrong model, which must fail and leave only the model.
fn refused(model: &Synthetic) -> ShardError {
    let workshop = Workshop::new(model);
    let error = workshop.shard(1).unwrap_err();
    assert_eq!(workshop.entries(), ["made-up.gguf"]);
    error
}

fn wrong(wrong: Wrong) -> ShardError {
    refused(&Synthetic { wrong: Some(wrong), ..Synthetic::default() })
}

#[test]
fn stage_counts_and_splits_that_do_not_fit() {
    let workshop = Workshop::new(&Synthetic::default());
    for n_stages in [0, 4, usize::MAX] {
        let error = workshop.shard(n_stages).unwrap_err();
        let expected = SplitError::StageCount { n_stages, n_layers: 3 };
        assert!(matches!(error, ShardError::Split(found) if found == expected));
    }
    let mut request = workshop.request(2);
    request.split = Some(vec![2, 2]);
    let error = shard(&request, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ShardError::Split(SplitError::Sum { found: 4, n_layers: 3 })));
    request.split = Some(vec![1, 2]);
    let manifest = shard(&request, &mut |_| {}).unwrap();
    let ends: Vec<_> = manifest.stages.iter().map(|stage| stage.end_layer).collect();
    assert_eq!(ends, [1, 3]);
}

#[test]
fn an_unknown_architecture() {
    let error = refused(&Synthetic { architecture: "mamba", ..Synthetic::default() });
    match error {
        ShardError::UnknownArchitecture { found, known } => {
            assert_eq!(found, "mamba");
            assert_eq!(known, ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3"]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_that_are_missing_or_of_another_kind() {
    let name = "blk.1.attn_k.weight";
    let error = wrong(Wrong::Missing(name));
    assert!(matches!(error, ShardError::MissingTensor { tensor } if tensor == name));
    let error = wrong(Wrong::Rows(name, 64));
    match error {
        ShardError::TensorShape { tensor, expected, found } => {
            assert_eq!((&*tensor, &*expected, &*found), (name, &[256, 128][..], &[256, 64][..]));
        }
        other => panic!("{other:?}"),
    }
    let error = wrong(Wrong::Type(name, GgmlType::Q2_K));
    assert!(matches!(
        error,
        ShardError::TensorType { tensor, found: GgmlType::Q2_K } if tensor == name
    ));
}

#[test]
fn sizes_that_no_graph_fits() {
    let error = refused(&Synthetic { n_heads: 4, n_kv_heads: 3, ..Synthetic::default() });
    match error {
        ShardError::Unsupported { key, found, .. } => {
            assert_eq!((&*key, &*found), ("llama.attention.head_count_kv", "3"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_that_no_subject_can_carry() {
    let workshop = Workshop::new(&Synthetic::default());
    let mut request = workshop.request(1);
    request.model_name = Some("two.tokens".to_owned());
    let error = shard(&request, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ShardError::ModelName(_)));
    assert_eq!(workshop.entries(), ["made-up.gguf"]);
}

#[test]
fn files_that_end_too_early_at_any_byte() {
    let workshop = Workshop::new(&Synthetic { n_layers: 1, ..Synthetic::default() });
    let bytes = std::fs::read(workshop.source()).unwrap();
    for keep in [0, 3, 24, 500, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(workshop.source(), &bytes[..keep]).unwrap();
        let error = workshop.shard(1).unwrap_err();
        let ShardError::Gguf(error) = error else { panic!("{error:?}") };
        assert!(
            matches!(
                error.kind(),
                GgufErrorKind::NotGguf { .. }
                    | GgufErrorKind::Truncated { .. }
                    | GgufErrorKind::TruncatedTensor { .. }
            ),
            "{keep}: {error:?}"
        );
        assert_eq!(workshop.entries(), ["made-up.gguf"]);
    }
}
