//! Drafters against the test backend, whose tokens change with every lost, doubled or misplaced
//! row.

#![expect(clippy::cast_possible_truncation, reason = "texts and vocabularies of a test are short")]

mod edges;
mod properties;

use stagebus_draft::drafter::{DraftHead, DraftRequest, Drafter, ModelDrafter};
use stagebus_draft::sampling::{History, Sampler, SamplingParams};
use stagebus_engine::testing::{TestBackend, TestModel, TestOptions};
use stagebus_engine::{Backend, RowPath, SessionKey, StageOutput, StepRows};

const VOCAB_SIZE: usize = 40;

fn model() -> TestModel {
    TestModel { vocab_size: VOCAB_SIZE, context_length: 1500, ..TestModel::default() }
}

fn backend(options: TestOptions) -> TestBackend {
    let model = model();
    let stage = model.stage(0..model.n_layers);
    TestBackend::new(model, stage, options)
}

fn drafter_with(options: TestOptions) -> ModelDrafter {
    let context_length = model().context_length;
    ModelDrafter::new(Box::new(backend(options)), context_length, DraftHead::whole(VOCAB_SIZE))
}

fn drafter() -> ModelDrafter {
    drafter_with(TestOptions::default())
}

fn draft_one(
    drafter: &mut impl Drafter,
    session: u64,
    n: usize,
    params: &SamplingParams,
) -> Vec<u32> {
    let request = DraftRequest { session: SessionKey(session), assumed: &[], n, params };
    drafter.draft(&[request]).expect("drafts").remove(0)
}

/// What a head that keeps no state of its own chooses after `text`: every row is run anew.
fn head_token(text: &[u32], prompt_len: usize, params: &SamplingParams) -> u32 {
    let mut backend = backend(TestOptions::default());
    let session = SessionKey(1);
    backend.open(session, text, text.len()).expect("opens");
    let wanted = [text.len() as u32 - 1];
    let rows = StepRows {
        session,
        start_pos: 0,
        path: RowPath::Prefill,
        tokens: text,
        hidden: None,
        wanted: &wanted,
    };
    let mut history = History::new(prompt_len);
    text.iter().for_each(|token| history.push(*token));
    let mut chosen = None;
    backend.run(&[rows], &mut |done| {
        if let Ok(StageOutput::Logits(row)) = done.output {
            let choice = Sampler::default().choose(row, text.len() as u32, params, &mut history);
            chosen = choice.ok().map(|choice| choice.token);
        }
    });
    chosen.expect("a token")
}

/// Parameters of many kinds, by number.
fn params(kind: u64) -> SamplingParams {
    let greedy = SamplingParams { seed: kind, ..SamplingParams::default() };
    match kind % 5 {
        0 => greedy,
        1 => SamplingParams { temperature: 0.8, ..greedy },
        2 => SamplingParams {
            temperature: 1.3,
            repetition_penalty: 1.4,
            presence_penalty: 0.5,
            frequency_penalty: 0.3,
            ..greedy
        },
        3 => SamplingParams {
            temperature: 0.9,
            top_p: 0.9,
            top_k: 12,
            min_p: 0.01,
            logit_bias: vec![(3, 0.7), (7, f32::NEG_INFINITY)],
            top_logprobs: Some(3),
            ..greedy
        },
        _ => SamplingParams { repetition_penalty: 2.5, frequency_penalty: 0.9, ..greedy },
    }
}
