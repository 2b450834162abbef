//! The stages of a model in one process, with one session.

use stagebus_engine::argmax::greedy;
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, SessionKey, StageOutput, StageRequest,
    StepRows, open_backend,
};
use stagebus_shards::ShardSet;

const SESSION: SessionKey = SessionKey(1);

/// Stages in pipeline order.
pub(crate) struct Chain {
    stages: Vec<Box<dyn Backend>>,
    vocab_size: usize,
}

impl Chain {
    /// Opens every stage in the exact profile.
    pub(crate) fn open(shards: &ShardSet, kind: EngineKind) -> Self {
        let library = stagebus_settings::find_openvino().expect("run cargo xtask setup");
        let options = EngineOptions {
            profile: Profile::Exact,
            threads: Some(1),
            max_sessions: 2,
            ..EngineOptions::default()
        };
        let open = |stage| {
            let request = StageRequest { shards, stage, library: Some(library.path()) };
            let mut backend = open_backend(kind, &request, &options)
                .unwrap_or_else(|error| panic!("{}: {error}", shards.manifest.architecture));
            backend.open(SESSION, &[], 0).unwrap();
            backend
        };
        let stages = (0..shards.manifest.n_stages()).map(open).collect();
        Self { stages, vocab_size: shards.manifest.dims.vocab_size }
    }

    /// Runs rows from a position on; returns the logits of the wanted ones.
    pub(crate) fn step(&mut self, start_pos: usize, tokens: &[u32], wanted: &[u32]) -> Vec<f32> {
        let path = if tokens.len() == 1 { RowPath::Decode } else { RowPath::Prefill };
        let mut output = Vec::new();
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let hidden = (index > 0).then_some(&output[..]);
            let rows = StepRows { session: SESSION, start_pos, path, tokens, hidden, wanted };
            let mut result = Vec::new();
            stage.run(&[rows], &mut |done| match done.output.unwrap() {
                StageOutput::Hidden(rows) | StageOutput::Logits(rows) => result = rows.to_vec(),
            });
            output = result;
        }
        output
    }

    /// The greedy token of the last of these logits rows.
    pub(crate) fn greedy(&self, rows: &[f32]) -> u32 {
        greedy(&rows[rows.len() - self.vocab_size..]).unwrap()
    }
}
