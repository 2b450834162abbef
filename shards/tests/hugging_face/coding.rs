//! What becomes of a folder's floats.

use std::fs;

use stagebus_shards::{
    CodedTensor, FloatCoding, FloatException, FloatPlan, Manifest, ShardError, shard,
};

use crate::model::{Folder, Workshop, contains};

/// Shards a folder with a plan; returns what was coded too.
fn coded(
    workshop: &Workshop,
    floats: FloatPlan,
) -> Result<(Manifest, Vec<CodedTensor>), ShardError> {
    let mut request = workshop.request(None);
    request.floats = floats;
    request.force = true;
    let mut coded = Vec::new();
    let manifest = shard(&request, &mut |progress| coded.extend_from_slice(progress.coded))?;
    Ok((manifest, coded))
}

fn except(pattern: &str, coding: FloatCoding) -> FloatException {
    FloatException { pattern: pattern.to_owned(), coding }
}

#[test]
fn matrices_of_floats_are_coded_by_name_and_all_others_stay() {
    let mut folder = Folder::default();
    // Tensors of one size have the same content otherwise.
    folder.tensor("model.layers.0.mlp.gate_proj.weight").bytes.rotate_left(2);
    let workshop = Workshop::new(&folder);
    let plan = FloatPlan {
        exceptions: vec![
            except("*.mlp.*", FloatCoding::Int8),
            except("model.layers.0.mlp.up_proj.weight", FloatCoding::Keep),
        ],
        ..FloatPlan::of(FloatCoding::Int4)
    };
    let (manifest, report) = coded(&workshop, plan).unwrap();
    assert_eq!(manifest.floats, Some(FloatCoding::Int4));
    let found: Vec<(&str, FloatCoding)> = report
        .iter()
        .map(|tensor| (tensor.name.strip_prefix("model.layers.0.").unwrap(), tensor.coding))
        .collect();
    // The second layer and the table are stored in integers.
    assert_eq!(
        found,
        [
            ("self_attn.q_proj.weight", FloatCoding::Int4),
            ("self_attn.k_proj.weight", FloatCoding::Int4),
            ("self_attn.v_proj.weight", FloatCoding::Int4),
            ("self_attn.o_proj.weight", FloatCoding::Int4),
            ("mlp.gate_proj.weight", FloatCoding::Int8),
            ("mlp.down_proj.weight", FloatCoding::Int8),
        ]
    );
    for tensor in &report {
        let most = if tensor.coding == FloatCoding::Int8 { 0.01 } else { 0.12 };
        assert!(tensor.relative_error > 0.0 && tensor.relative_error < most, "{tensor:?}");
    }
    let bin = fs::read(workshop.set().join("stage-0.bin")).unwrap();
    let mut is_there = |name: &str| contains(&bin, &folder.tensor(name).bytes);
    assert!(is_there("model.layers.0.mlp.up_proj.weight"));
    assert!(is_there("model.layers.1.mlp.up_proj.weight"));
    assert!(is_there("model.embed_tokens.weight"));
    assert!(!is_there("model.layers.0.mlp.gate_proj.weight"));
}

#[test]
fn tables_have_eight_bits_and_every_head_its_own_report() {
    let mut folder = Folder::default();
    let table = folder.tensor("model.layers.0.self_attn.q_proj.weight").clone();
    let rows = 6 * 32 * 2;
    let floats = folder.tensor("model.embed_tokens.weight");
    *floats = crate::model::Tensor { shape: vec![6, 32], ..table };
    floats.bytes.truncate(rows);
    folder.tensors.retain(|(name, _)| name != "model.embed_tokens.weight_scale");
    let workshop = Workshop::new(&folder);
    let mut request = workshop.request(None);
    request.n_stages = 2;
    request.floats = FloatPlan::of(FloatCoding::Int4Asym);
    let mut tables = Vec::new();
    shard(&request, &mut |progress| {
        let is_table = |tensor: &&CodedTensor| tensor.name == "model.embed_tokens.weight";
        tables.extend(progress.coded.iter().filter(is_table).map(|t| (progress.stage, t.coding)));
    })
    .unwrap();
    assert_eq!(tables, [(0, FloatCoding::Int8), (1, FloatCoding::Int8)]);
}

#[test]
fn a_plan_for_tensors_that_are_not_there_is_refused() {
    let workshop = Workshop::new(&Folder::default());
    // Norms are no matrices.
    for pattern in ["lm_haed.weight", "model.norm.weight"] {
        let exceptions =
            vec![except("*.q_proj.*", FloatCoding::F16), except(pattern, FloatCoding::Int8)];
        let plan = FloatPlan { exceptions, ..FloatPlan::default() };
        match coded(&workshop, plan) {
            Err(ShardError::NoSuchTensor { pattern: found }) => assert_eq!(found, pattern),
            other => panic!("{other:?}"),
        }
    }
}
