//! Every family of models against what huggingface/transformers computes with the same weights:
//! as a Hugging Face folder and as a GGUF file, in one to three stages, paged, stateful and of
//! fixed shapes.
//!
//! The references in `tests/fixtures/families` are made by `tools/references/generate.py`.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test data is small and a failure names its place"
)]

mod chain;
#[path = "../../../shards/tests/gguf_made/writer.rs"]
#[expect(dead_code, reason = "only right files of a few types are written here")]
mod gguf_writer;
mod model;

use stagebus_engine::{
    EngineKind, EngineOptions, GraphMismatch, LoadError, OpenStageError, Runtime, StageRequest,
    StageSpec, StaticBackend, open_backend,
};
use stagebus_shards::{Form, StaticForm};

use chain::Chain;
use model::{Format, Reference};

/// Logits may differ by this: sums of 96 numbers around 1 in another order, through four layers.
const TOLERANCE: f32 = 2e-4;

/// No multiple of any length in the tests: prompts end within a call.
const SHAPES: StaticForm = StaticForm { window: 90, rows: 7, slots: 2 };

/// Feeds the prompt and the reference's tokens, and compares every choice and the kept logits.
fn compare(reference: &Reference, chain: &mut Chain, how: &str) {
    let n_prompt = reference.prompt.len();
    let wanted: Vec<u32> = (0..n_prompt as u32).collect();
    let mut rows = chain.step(0, &reference.prompt, &wanted);
    for (idx, token) in reference.tokens.iter().enumerate() {
        let pos = n_prompt + idx;
        assert_eq!(chain.greedy(&rows), *token, "{how}: token {idx}");
        if idx + 1 < reference.tokens.len() {
            rows.extend(chain.step(pos, &[*token], &[0]));
        }
    }
    for (row, expected) in &reference.logits {
        let found = &rows[row * expected.len()..][..expected.len()];
        for (idx, (a, b)) in found.iter().zip(expected).enumerate() {
            assert!((a - b).abs() < TOLERANCE, "{how}: logit {idx} of row {row} is {a}, not {b}");
        }
    }
    // Back to the middle of the prompt, behind a window's length of other tokens: what a rewind
    // leaves behind is not seen.
    let (from, n_other) = (20, 17);
    let other: Vec<u32> = (0..n_other).map(|idx| (idx * 5 + 3) % 128).collect();
    chain.step(from, &other, &[n_other - 1]);
    let rows = chain.step(from, &reference.prompt[from..], &[(n_prompt - from) as u32 - 1]);
    assert_eq!(chain.greedy(&rows), reference.tokens[0], "{how}: after a rewind");
}

fn check(name: &str) {
    let reference = Reference::read(name);
    let mut runs = vec![
        (Format::Folder, 1, EngineKind::Paged),
        (Format::Folder, 3.min(reference.n_layers()), EngineKind::Paged),
        (Format::Folder, 2, EngineKind::Stateful),
        (Format::Folder, 2, EngineKind::Static),
    ];
    if reference.has_gguf() {
        runs.push((Format::Gguf, 2, EngineKind::Paged));
        runs.push((Format::Gguf, 1, EngineKind::Stateful));
    }
    for (format, n_stages, kind) in runs {
        let how = format!("{name} from a {format:?} in {n_stages} stages, {kind}");
        let form = match kind {
            EngineKind::Static => Form::Static(SHAPES),
            _ => Form::Stateful,
        };
        let shards = reference.shard(format, n_stages, form);
        compare(&reference, &mut Chain::open(&shards.set, kind), &how);
    }
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn mistral() {
    check("mistral");
}

#[test]
fn mixtral() {
    check("mixtral");
}

#[test]
fn qwen2() {
    check("qwen2");
    check("qwen2-windows");
}

#[test]
fn qwen3() {
    check("qwen3");
}

#[test]
fn qwen3_moe() {
    check("qwen3moe");
}

#[test]
fn gemma3() {
    check("gemma3");
    check("gemma3-scaled");
}

#[test]
fn phi3() {
    check("phi3");
}

#[test]
fn an_engine_takes_graphs_of_its_own_form_only() {
    let reference = Reference::read("llama");
    let fixed = reference.shard(Format::Folder, 1, Form::Static(SHAPES));
    let usual = reference.shard(Format::Folder, 1, Form::Stateful);
    for (shards, kind, needed) in [
        (&fixed.set, EngineKind::Paged, "stateful"),
        (&fixed.set, EngineKind::Stateful, "stateful"),
        (&usual.set, EngineKind::Static, "static"),
    ] {
        let request = StageRequest { shards, stage: 0, library: None };
        let error = open_backend(kind, &request, &EngineOptions::default()).err();
        let Some(OpenStageError::Form { engine, needed: found, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!((engine, found), (kind, needed));
    }
    // Nor is a graph of another form taken for one of its shapes.
    let library = stagebus_settings::find_openvino().expect("run cargo xtask setup");
    let runtime = Runtime::load(library.path()).unwrap();
    let spec = StageSpec::from_manifest(&usual.set.manifest, 0).unwrap();
    let files = usual.set.stage_files(0).unwrap();
    let error = StaticBackend::load(&runtime, &files, spec, SHAPES, &EngineOptions::default());
    let Err(LoadError::Graph { what: GraphMismatch::UnknownInput { name }, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(["beam_idx", "logit_rows"].contains(&&*name), "{name}");
}
