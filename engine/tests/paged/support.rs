//! A whole model in one process: the stages of a shard set, one behind the other.

use std::path::Path;

use serde_json::Value;
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, SessionKey, StageOutput, StageRequest,
    StepError, StepRows, argmax, open_backend,
};
use stagebus_shards::{Form, ShardRequest, ShardSet, shard};

/// A shard set of SmolLM2 in a folder of its own.
pub(crate) struct Model {
    shards: ShardSet,
    _folder: tempfile::TempDir,
}

impl Model {
    pub(crate) fn exact(n_stages: usize) -> Self {
        Self::of_form(n_stages, Form::Stateful)
    }

    pub(crate) fn of_form(n_stages: usize, form: Form) -> Self {
        let runtime_dir = stagebus_settings::runtime_dir().expect("run cargo xtask setup");
        let source = runtime_dir.join("models").join("SmolLM2-135M-Instruct.Q4_1.gguf");
        assert!(source.is_file(), "run cargo xtask setup");
        let folder = tempfile::tempdir().unwrap();
        let request = ShardRequest::new(source, folder.path().join("shards"), n_stages);
        let request = ShardRequest { form, ..request };
        shard(&request, &mut |_progress| {}).unwrap();
        let shards = ShardSet::open(&request.out_dir).unwrap();
        Self { shards, _folder: folder }
    }
}

/// One reference case.
pub(crate) struct Case {
    pub(crate) input_ids: Vec<u32>,
    pub(crate) output_ids: Vec<u32>,
}

impl Case {
    /// The end token, where the reference stopped at it.
    pub(crate) fn eos(&self) -> [u32; 1] {
        [2]
    }
}

/// Continuations by an independent implementation.
pub(crate) fn references() -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/smollm2-135m.json");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |case: &Value, key: &str| {
        case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    cases
        .iter()
        .map(|case| Case { input_ids: ids(case, "input_ids"), output_ids: ids(case, "output_ids") })
        .collect()
}

/// Token ids of a text without meaning that is the same every time.
pub(crate) fn prompt(n_tokens: usize) -> Vec<u32> {
    (0..n_tokens as u32).map(|i| 100 + i.wrapping_mul(2_654_435_761) % 40_000).collect()
}

/// Rows for the first stage, none wanted.
pub(crate) fn row(
    session: SessionKey,
    start_pos: usize,
    path: RowPath,
    tokens: &[u32],
) -> StepRows<'_> {
    StepRows { session, start_pos, path, tokens, hidden: None, wanted: &[] }
}

/// Runs a micro-batch on a first stage and returns the bits of each step's hidden states.
pub(crate) fn hidden(backend: &mut dyn Backend, batch: &[StepRows<'_>]) -> Vec<Vec<u32>> {
    let mut bits = vec![Vec::new(); batch.len()];
    backend.run(batch, &mut |done| match done.output.unwrap() {
        StageOutput::Hidden(rows) => bits[done.index] = rows.iter().map(|x| x.to_bits()).collect(),
        StageOutput::Logits(_) => panic!("not the first of several stages"),
    });
    bits
}

/// The stages of a model.
pub(crate) struct Chain {
    stages: Vec<Box<dyn Backend>>,
    vocab_size: usize,
}

/// One session's rows in a micro-batch.
type Rows = (SessionKey, usize, RowPath, Vec<u32>, Vec<u32>);

impl Chain {
    pub(crate) fn open(
        model: &Model,
        kind: EngineKind,
        profile: Profile,
        change: impl Fn(&mut EngineOptions),
    ) -> Self {
        let mut options = EngineOptions { profile, threads: Some(2), ..EngineOptions::default() };
        change(&mut options);
        let library = stagebus_settings::find_openvino().expect("run cargo xtask setup");
        let stages = (0..model.shards.manifest.n_stages())
            .map(|stage| {
                let request =
                    StageRequest { shards: &model.shards, stage, library: Some(library.path()) };
                open_backend(kind, &request, &options).unwrap()
            })
            .collect();
        Self { stages, vocab_size: model.shards.manifest.dims.vocab_size }
    }

    pub(crate) fn backend(&mut self, stage: usize) -> &mut dyn Backend {
        self.stages[stage].as_mut()
    }

    pub(crate) fn close(&mut self, key: SessionKey) {
        self.stages.iter_mut().for_each(|stage| stage.close(key));
    }

    /// Opens a session and returns its cached prefix.
    pub(crate) fn cached(&mut self, key: SessionKey, text: &[u32]) -> usize {
        let lens = self.stages.iter_mut().map(|stage| stage.open(key, text, 0).unwrap());
        lens.min().unwrap()
    }

    /// Runs one micro-batch through all stages; returns the chosen tokens of each step.
    fn run(&mut self, batch: &[Rows]) -> Vec<Result<Vec<u32>, StepError>> {
        let mut hidden: Vec<Option<Vec<f32>>> = vec![None; batch.len()];
        let mut chosen: Vec<_> = batch.iter().map(|_| Ok(Vec::new())).collect();
        for stage in &mut self.stages {
            let inputs = std::mem::replace(&mut hidden, vec![None; batch.len()]);
            let steps: Vec<StepRows<'_>> = batch
                .iter()
                .zip(&inputs)
                .map(|((session, start_pos, path, tokens, wanted), input)| StepRows {
                    session: *session,
                    start_pos: *start_pos,
                    path: *path,
                    tokens,
                    hidden: input.as_deref(),
                    wanted,
                })
                .collect();
            let vocab_size = self.vocab_size;
            stage.run(&steps, &mut |done| match done.output {
                Ok(StageOutput::Hidden(rows)) => hidden[done.index] = Some(rows.to_vec()),
                Ok(StageOutput::Logits(rows)) => {
                    let token = |row: &[f32]| argmax::greedy(row).unwrap();
                    chosen[done.index] = Ok(rows.chunks(vocab_size).map(token).collect());
                }
                Err(error) => chosen[done.index] = Err(error),
            });
        }
        chosen
    }

    /// Runs generated rows through both stages of a model of two; returns the bits of what each
    /// gives.
    pub(crate) fn bits(
        &mut self,
        key: SessionKey,
        start_pos: usize,
        tokens: &[u32],
        wanted: &[u32],
    ) -> (Vec<u32>, Vec<u32>) {
        let step = row(key, start_pos, RowPath::Decode, tokens);
        let hidden = hidden(self.backend(0), &[step]).remove(0);
        let numbers: Vec<f32> = hidden.iter().map(|bits| f32::from_bits(*bits)).collect();
        let mut logits = Vec::new();
        let step = StepRows { hidden: Some(&numbers), wanted, ..step };
        self.backend(1).run(&[step], &mut |done| match done.output.unwrap() {
            StageOutput::Logits(rows) => logits = rows.iter().map(|x| x.to_bits()).collect(),
            StageOutput::Hidden(_) => panic!("not the last stage"),
        });
        (hidden, logits)
    }

    /// Runs one step of one session.
    pub(crate) fn step(
        &mut self,
        key: SessionKey,
        start_pos: usize,
        path: RowPath,
        tokens: &[u32],
        wanted: &[u32],
    ) -> Result<Vec<u32>, StepError> {
        self.run(&[(key, start_pos, path, tokens.to_vec(), wanted.to_vec())]).remove(0)
    }

    /// Takes in the rows of a prompt from `start` on and returns the first generated token.
    pub(crate) fn prefill_from(
        &mut self,
        key: SessionKey,
        text: &[u32],
        start: usize,
        chunk: usize,
    ) -> u32 {
        let mut pos = start;
        let mut last = Vec::new();
        while pos < text.len() {
            // No chunk of one row: it would take the path of decoding.
            let left = text.len() - pos;
            let n_rows =
                if left.saturating_sub(chunk) == 1 { left.min(chunk + 1) } else { left.min(chunk) };
            let wanted = [n_rows as u32 - 1];
            last =
                self.step(key, pos, RowPath::Prefill, &text[pos..pos + n_rows], &wanted).unwrap();
            pos += n_rows;
        }
        last[0]
    }

    pub(crate) fn prefill(&mut self, key: SessionKey, text: &[u32], chunk: usize) -> u32 {
        // Opened with an empty prompt: nothing is taken from the prefix cache.
        self.cached(key, &[]);
        self.prefill_from(key, text, 0, chunk)
    }

    /// Decodes from the first generated token on.
    pub(crate) fn decode(&mut self, key: SessionKey, len: usize, first: u32, n: usize) -> Vec<u32> {
        let mut tokens = vec![first];
        while tokens.len() < n {
            let (pos, last) = (len + tokens.len() - 1, tokens[tokens.len() - 1]);
            tokens.extend(self.step(key, pos, RowPath::Decode, &[last], &[0]).unwrap());
        }
        tokens
    }

    /// Decodes in windows of `n_draft` drafted tokens of which the second half is wrong.
    pub(crate) fn decode_with_wrong_drafts(
        &mut self,
        key: SessionKey,
        len: usize,
        first: u32,
        n: usize,
        n_draft: usize,
    ) -> Vec<u32> {
        let truth = self.decode(key, len, first, n + n_draft);
        let mut tokens = vec![first];
        while tokens.len() < n {
            let done = tokens.len();
            let mut rows = vec![tokens[done - 1]];
            rows.extend((0..n_draft).map(|i| truth[done + i] + u32::from(i > n_draft / 2)));
            let wanted: Vec<u32> = (0..rows.len() as u32).collect();
            let chosen = self.step(key, len + done - 1, RowPath::Decode, &rows, &wanted).unwrap();
            let n_good = rows[1..].iter().zip(&chosen).take_while(|(a, b)| a == b).count();
            tokens.extend(&chosen[..=n_good]);
        }
        tokens.truncate(n);
        tokens
    }

    /// Generates alone, until `n` tokens or one of `eos`.
    pub(crate) fn generate(
        &mut self,
        key: SessionKey,
        text: &[u32],
        n: usize,
        eos: &[u32],
    ) -> Vec<u32> {
        let mut tokens = vec![self.prefill(key, text, 128)];
        while tokens.len() < n && !eos.contains(&tokens[tokens.len() - 1]) {
            let (pos, last) = (text.len() + tokens.len() - 1, tokens[tokens.len() - 1]);
            tokens.extend(self.step(key, pos, RowPath::Decode, &[last], &[0]).unwrap());
        }
        tokens
    }

    /// Generates while every micro-batch also holds a row of each neighbour.
    pub(crate) fn generate_among(
        &mut self,
        key: SessionKey,
        text: &[u32],
        n: usize,
        neighbours: &[SessionKey],
    ) -> Vec<u32> {
        let mut tokens = vec![self.prefill(key, text, 128)];
        while tokens.len() < n {
            let mine = (text.len() + tokens.len() - 1, tokens[tokens.len() - 1]);
            let row = |key: &SessionKey, pos: usize, token: u32| -> Rows {
                (*key, pos, RowPath::Decode, vec![token], vec![0])
            };
            // A neighbour rewrites rows behind its prompt: position 30 exists in each.
            let mut batch: Vec<Rows> = neighbours
                .iter()
                .enumerate()
                .map(|(idx, neighbour)| row(neighbour, 30 + idx % 8, 200 + idx as u32))
                .collect();
            batch.insert(neighbours.len() / 2, row(&key, mine.0, mine.1));
            let mut chosen = self.run(&batch);
            tokens.extend(chosen.remove(neighbours.len() / 2).unwrap());
        }
        tokens
    }
}
