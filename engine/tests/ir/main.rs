//! A model that optimum-intel exported, cut anywhere, gives what the uncut graph gives.
//!
//! The references beside the exported graph are of the uncut one, run by OpenVINO's own
//! interface (`tools/ir`). Needs the OpenVINO of `cargo xtask setup`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use stagebus_engine::argmax::greedy;
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, SessionKey, StageOutput, StageRequest,
    StepRows, open_backend,
};
use stagebus_shards::{ShardRequest, ShardSet, shard};

/// Largest difference of two logits rows of the exact profile that computed the same thing in
/// another order; the smallest gap between the best two of the references is twenty times that.
const TOLERANCE: f32 = 1e-3;

/// What the uncut graph answers.
struct Case {
    prompt: Vec<u32>,
    /// Behind the last token of the prompt.
    logits: Vec<f32>,
    tokens: Vec<u32>,
    /// Smallest gap between the two best logits on the way.
    min_margin: f64,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shards/tests/fixtures/ir").join(name)
}

fn references(name: &str) -> Vec<Case> {
    let json = std::fs::read(fixture(name).join("reference.json")).unwrap();
    let document: Value = serde_json::from_slice(&json).unwrap();
    let case = |case: &Value| Case {
        prompt: serde_json::from_value(case["prompt"].clone()).unwrap(),
        logits: serde_json::from_value(case["logits"].clone()).unwrap(),
        tokens: serde_json::from_value(case["tokens"].clone()).unwrap(),
        min_margin: case["min_margin"].as_f64().unwrap(),
    };
    document["cases"].as_array().unwrap().iter().map(case).collect()
}

/// The stages of a cut model in one process.
struct Chain {
    stages: Vec<Box<dyn Backend>>,
    _folder: tempfile::TempDir,
}

impl Chain {
    fn open(name: &str, split: &[usize], kind: EngineKind) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let request = ShardRequest {
            split: Some(split.to_vec()),
            ..ShardRequest::new(fixture(name), folder.path().join("set"), split.len())
        };
        shard(&request, &mut |_| {}).unwrap();
        let shards = ShardSet::open(&request.out_dir).unwrap();
        let library = stagebus_settings::find_openvino().unwrap();
        let options = EngineOptions {
            profile: Profile::Exact,
            threads: Some(1),
            kv_bytes: Some(64 << 20),
            ..EngineOptions::default()
        };
        let open = |stage| {
            let request = StageRequest { shards: &shards, stage, library: Some(library.path()) };
            open_backend(kind, &request, &options).unwrap_or_else(|error| {
                panic!("stage {stage} of {name} cut {split:?} on {kind:?}: {error:?}")
            })
        };
        Self { stages: (0..split.len()).map(open).collect(), _folder: folder }
    }

    /// Runs rows through all stages; returns the logits of the last one.
    fn step(&mut self, start_pos: usize, path: RowPath, tokens: &[u32]) -> Vec<f32> {
        let session = SessionKey(1);
        let wanted = [u32::try_from(tokens.len()).unwrap() - 1];
        let mut output = Vec::new();
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let hidden = (index > 0).then_some(&output[..]);
            let rows = StepRows { session, start_pos, path, tokens, hidden, wanted: &wanted };
            let mut result = None;
            stage.run(&[rows], &mut |done| {
                result = Some(done.output.map(|output| match output {
                    StageOutput::Hidden(rows) | StageOutput::Logits(rows) => rows.to_vec(),
                }));
            });
            output = result.unwrap().unwrap();
        }
        output
    }

    /// Answers a prompt, with a rewind on the way, and compares with the reference.
    fn check(&mut self, case: &Case) {
        for stage in &mut self.stages {
            assert_eq!(stage.open(SessionKey(1), &[], 64).unwrap(), 0);
        }
        let (first, rest) = case.prompt.split_at(case.prompt.len() / 2);
        self.step(0, RowPath::Prefill, first);
        let mut logits = self.step(first.len(), RowPath::Prefill, rest);
        assert_eq!(logits.len(), case.logits.len());
        let differences = logits.iter().zip(&case.logits).map(|(a, b)| (a - b).abs());
        let far = differences.fold(0.0, f32::max);
        assert!(far <= TOLERANCE, "logits differ by {far}");
        let mut tokens = Vec::new();
        let mut len = case.prompt.len();
        while tokens.len() < case.tokens.len() {
            let token = greedy(&logits).unwrap();
            tokens.push(token);
            if tokens.len() == case.tokens.len() / 2 {
                // Rows that turn out to be wrong are taken back.
                self.step(len, RowPath::Decode, &[token, 2, 3]);
            }
            logits = self.step(len, RowPath::Decode, &[token]);
            len += 1;
        }
        assert_eq!(tokens, case.tokens);
        self.stages.iter_mut().for_each(|stage| stage.close(SessionKey(1)));
    }
}

/// Runs all references on a model that is cut in some way.
fn check(name: &str, split: &[usize], kind: EngineKind) {
    let mut chain = Chain::open(name, split, kind);
    for case in references(name) {
        assert!(case.min_margin > 20.0 * f64::from(TOLERANCE), "{}", case.min_margin);
        chain.check(&case);
    }
}

/// Not at all, in the middle, and at every boundary.
const CUTS: [&[usize]; 3] = [&[4], &[2, 2], &[1, 1, 1, 1]];

#[test]
fn a_model_cut_anywhere_equals_the_uncut_one_session_by_session() {
    for split in CUTS {
        check("llama", split, EngineKind::Stateful);
    }
}

#[test]
fn a_model_cut_anywhere_equals_the_uncut_one_on_pages() {
    for split in CUTS {
        check("llama", split, EngineKind::Paged);
    }
}

/// The last two layers read the cache of the second, and each layer has embeddings of its own.
#[test]
fn what_crosses_a_cut_beside_the_residual_stream_travels_with_it() {
    for split in CUTS {
        check("gemma4", split, EngineKind::Stateful);
        check("gemma4", split, EngineKind::Paged);
    }
}
