//! The stages of the model in one process, and the model itself.

use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use stagebus_engine::argmax::greedy;
use stagebus_engine::{
    Backend, EngineOptions, Profile, RowPath, Runtime, SessionKey, StageOutput, StageSpec,
    StatefulBackend, StepError, StepRows,
};
use stagebus_shards::{ShardRequest, ShardSet};

/// Prompt of a reference case (the capital of Japan), and the greedy tokens that an independent
/// f32 implementation gives.
pub(crate) const PROMPT: [u32; 37] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 3085, 47, 2, 198, 1, 520, 9531,
    198,
];
pub(crate) const ANSWER: [u32; 8] = [504, 3575, 282, 3085, 314, 19081, 30, 2];

/// Another reference case (a cup of coffee, in German).
pub(crate) const PROMPT_2: [u32; 44] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 8241, 12837, 288, 3697, 42, 339, 736, 702, 253, 7118, 282,
    6728, 30, 2, 198, 1, 520, 9531, 198, 57,
];
pub(crate) const ANSWER_2: [u32; 15] =
    [322, 2655, 85, 297, 462, 20962, 101, 28, 5437, 45202, 501, 603, 926, 30, 2];

/// Exact profile, one stage.
static WHOLE: LazyLock<Mutex<Chain>> = LazyLock::new(|| Mutex::new(Chain::load(&ONE, &exact())));

/// Exact profile, two stages.
static HALVES: LazyLock<Mutex<Chain>> = LazyLock::new(|| Mutex::new(Chain::load(&TWO, &exact())));

/// The model as one stage.
pub(crate) static ONE: LazyLock<ShardSet> = LazyLock::new(|| shard(1));

/// The model as two stages.
pub(crate) static TWO: LazyLock<ShardSet> = LazyLock::new(|| shard(2));

/// Stages in pipeline order.
pub(crate) struct Chain {
    pub(crate) stages: Vec<StatefulBackend>,
}

pub(crate) fn whole() -> MutexGuard<'static, Chain> {
    WHOLE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn halves() -> MutexGuard<'static, Chain> {
    HALVES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn exact() -> EngineOptions {
    EngineOptions { profile: Profile::Exact, threads: Some(1), ..EngineOptions::default() }
}

pub(crate) fn library() -> PathBuf {
    let found = stagebus_settings::find_openvino().unwrap();
    found.path().to_owned()
}

pub(crate) fn runtime() -> Runtime {
    Runtime::load(&library()).unwrap_or_else(|error| panic!("{error}"))
}

fn shard(n_stages: usize) -> ShardSet {
    let runtime_dir = stagebus_settings::runtime_dir();
    let model = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let source = runtime_dir.map(|dir| dir.join(model)).filter(|path| path.is_file());
    let source = source.unwrap_or_else(|| panic!("no {model}: run `cargo xtask setup`"));
    let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("engine-{n_stages}"));
    let request =
        ShardRequest { force: true, ..ShardRequest::new(source, out_dir.clone(), n_stages) };
    stagebus_shards::shard(&request, &mut |_| {}).unwrap();
    ShardSet::open(&out_dir).unwrap()
}

impl Chain {
    pub(crate) fn load(shards: &ShardSet, options: &EngineOptions) -> Self {
        let runtime = runtime();
        let load = |stage| {
            let spec = StageSpec::from_manifest(&shards.manifest, stage).unwrap();
            let files = shards.stage_files(stage).unwrap();
            StatefulBackend::load(&runtime, &files, spec, options).unwrap()
        };
        Self { stages: (0..shards.manifest.n_stages()).map(load).collect() }
    }

    pub(crate) fn open(&mut self, session: u64) {
        for stage in &mut self.stages {
            assert_eq!(stage.open(SessionKey(session), &[], 100).unwrap(), 0);
        }
    }

    pub(crate) fn close(&mut self, session: u64) {
        for stage in &mut self.stages {
            stage.close(SessionKey(session));
        }
    }

    /// Runs rows through all stages; returns the logits of the wanted ones.
    pub(crate) fn step(
        &mut self,
        session: u64,
        start_pos: usize,
        tokens: &[u32],
        wanted: &[u32],
    ) -> Result<Vec<f32>, StepError> {
        let (session, path) = (SessionKey(session), RowPath::Prefill);
        let mut output = Vec::new();
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let hidden = (index > 0).then_some(&output[..]);
            let rows = StepRows { session, start_pos, path, tokens, hidden, wanted };
            let mut result = None;
            stage.run(&[rows], &mut |done| {
                assert!(result.is_none() && done.index == 0);
                result = Some(done.output.map(|output| match output {
                    StageOutput::Hidden(rows) | StageOutput::Logits(rows) => rows.to_vec(),
                }));
            });
            output = result.unwrap()?;
        }
        Ok(output)
    }

    /// The greedy token after the rows.
    pub(crate) fn token(&mut self, session: u64, start_pos: usize, tokens: &[u32]) -> u32 {
        let last = u32::try_from(tokens.len()).unwrap() - 1;
        greedy(&self.step(session, start_pos, tokens, &[last]).unwrap()).unwrap()
    }

    /// Prompt in chunks, then `n` greedy tokens, in a session that is closed again.
    pub(crate) fn generate(
        &mut self,
        session: u64,
        prompt: &[u32],
        chunk: usize,
        n: usize,
    ) -> Vec<u32> {
        self.open(session);
        let (mut start_pos, mut token) = (0, 0);
        for rows in prompt.chunks(chunk) {
            token = self.token(session, start_pos, rows);
            start_pos += rows.len();
        }
        let mut tokens = vec![token];
        while tokens.len() < n {
            token = self.token(session, start_pos, &[token]);
            tokens.push(token);
            start_pos += 1;
        }
        self.close(session);
        tokens
    }
}
