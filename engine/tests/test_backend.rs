//! Properties of the test backend that other crates' tests rely on.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use stagebus_engine::argmax::greedy;
use stagebus_engine::testing::{Fault, TestBackend, TestModel, TestOptions};
use stagebus_engine::{Backend, OpenError, RowPath, SessionKey, StageOutput, StepError, StepRows};

const A: SessionKey = SessionKey(1);
const B: SessionKey = SessionKey(2);

/// Runs rows of one session through all stages; returns the token after the last row.
fn step(
    stages: &mut [TestBackend],
    session: SessionKey,
    start_pos: usize,
    tokens: &[u32],
) -> Result<u32, StepError> {
    let last = [u32::try_from(tokens.len()).unwrap() - 1];
    let mut hidden = Vec::new();
    let mut token = Err(StepError::UnknownSession { session });
    for (stage, backend) in stages.iter_mut().enumerate() {
        let hidden_in = (stage > 0).then_some(&hidden[..]);
        let path = RowPath::Decode;
        let rows = StepRows { session, start_pos, path, tokens, hidden: hidden_in, wanted: &last };
        let mut next = Vec::new();
        let mut failed = None;
        backend.run(&[rows], &mut |done| match done.output {
            Ok(StageOutput::Hidden(rows)) => next = rows.to_vec(),
            Ok(StageOutput::Logits(row)) => token = Ok(greedy(row).unwrap()),
            Err(error) => failed = Some(error),
        });
        if let Some(error) = failed {
            return Err(error);
        }
        hidden = next;
    }
    token
}

fn open(stages: &mut [TestBackend], session: SessionKey) {
    for stage in stages {
        assert_eq!(stage.open(session, &[1], 100).unwrap(), 0);
    }
}

/// Prompt in chunks, then `n` greedy tokens.
fn generate(
    stages: &mut [TestBackend],
    session: SessionKey,
    prompt: &[u32],
    chunk: usize,
    n: usize,
) -> Vec<u32> {
    open(stages, session);
    let mut start_pos = 0;
    let mut token = 0;
    for rows in prompt.chunks(chunk) {
        token = step(stages, session, start_pos, rows).unwrap();
        start_pos += rows.len();
    }
    let mut tokens = vec![token];
    while tokens.len() < n {
        token = step(stages, session, start_pos, &[token]).unwrap();
        tokens.push(token);
        start_pos += 1;
    }
    tokens
}

fn pipeline(n_stages: usize) -> (TestModel, Vec<TestBackend>) {
    let model = TestModel::default();
    let stages = TestBackend::pipeline(&model, n_stages, &TestOptions::default());
    (model, stages)
}

#[test]
fn every_split_and_chunk_size_gives_the_expected_tokens() {
    let prompt = [5, 6, 7, 8, 9, 5, 6];
    let expected = TestModel::default().expected(&prompt, 20);
    for n_stages in 1..=6 {
        for chunk in 1..=prompt.len() {
            let (_, mut stages) = pipeline(n_stages);
            let tokens = generate(&mut stages, A, &prompt, chunk, 20);
            assert_eq!(tokens, expected, "{n_stages} stages, chunks of {chunk}");
        }
    }
}

#[test]
fn answers_differ_by_prompt_order_and_seed() {
    let model = TestModel::default();
    let base = model.expected(&[1, 2, 3], 20);
    assert_ne!(base, model.expected(&[1, 3, 2], 20));
    assert_ne!(base, model.expected(&[1, 2], 20));
    assert_ne!(base, model.expected(&[1, 2, 3, 3], 20));
    assert_ne!(base, TestModel { seed: 2, ..model }.expected(&[1, 2, 3], 20));
}

#[test]
fn interleaved_sessions_stay_apart() {
    let (model, mut stages) = pipeline(3);
    open(&mut stages, A);
    open(&mut stages, B);
    let mut of_a = vec![step(&mut stages, A, 0, &[1, 2, 3]).unwrap()];
    let mut of_b = vec![step(&mut stages, B, 0, &[9, 8]).unwrap()];
    for i in 0..15 {
        of_a.push(step(&mut stages, A, 3 + i, &of_a[i..=i]).unwrap());
        of_b.push(step(&mut stages, B, 2 + i, &of_b[i..=i]).unwrap());
    }
    assert_eq!(of_a, model.expected(&[1, 2, 3], 16));
    assert_eq!(of_b, model.expected(&[9, 8], 16));
}

#[test]
fn rewind_equals_never_having_gone_there() {
    let (model, mut stages) = pipeline(2);
    open(&mut stages, A);
    step(&mut stages, A, 0, &[1, 2, 3, 4, 5]).unwrap();
    step(&mut stages, A, 5, &[99, 98, 97]).unwrap();
    let token = step(&mut stages, A, 3, &[7]).unwrap();
    assert_eq!(token, model.expected(&[1, 2, 3, 7], 1)[0]);
    // The same step again gives the same result.
    assert_eq!(step(&mut stages, A, 3, &[7]).unwrap(), token);
}

#[test]
fn mistakes_of_the_caller_change_the_tokens() {
    let expected = TestModel::default().expected(&[1, 2, 3, 4], 1)[0];
    let run = |steps: &[(usize, &[u32])]| {
        let (_, mut stages) = pipeline(2);
        open(&mut stages, A);
        let mut last = 0;
        for &(start_pos, tokens) in steps {
            last = step(&mut stages, A, start_pos, tokens).unwrap();
        }
        last
    };
    assert_eq!(run(&[(0, &[1, 2]), (2, &[3, 4])]), expected);
    assert_ne!(run(&[(0, &[1, 2]), (1, &[3, 4])]), expected, "a wrong start position");
    assert_ne!(run(&[(0, &[1]), (1, &[3, 4])]), expected, "a lost row");
    assert_ne!(run(&[(0, &[1, 2, 2]), (3, &[3, 4])]), expected, "a doubled row");
    assert_ne!(run(&[(0, &[2, 1]), (2, &[3, 4])]), expected, "swapped rows");
}

#[test]
fn a_damaged_number_changes_the_tokens() {
    let model = TestModel::default();
    for place in 0..model.hidden_dim {
        let mut stages = TestBackend::pipeline(&model, 2, &TestOptions::default());
        open(&mut stages, A);
        let mut hidden = Vec::new();
        let first = StepRows {
            session: A,
            start_pos: 0,
            path: RowPath::Prefill,
            tokens: &[4],
            hidden: None,
            wanted: &[],
        };
        stages[0].run(&[first], &mut |done| {
            if let StageOutput::Hidden(rows) = done.output.unwrap() {
                hidden = rows.to_vec();
            }
        });
        let mut last_stage = |hidden: &[f32], tokens: &[u32]| {
            let mut token = None;
            let rows = StepRows { hidden: Some(hidden), tokens, wanted: &[0], ..first };
            stages[1].run(&[rows], &mut |done| {
                if let StageOutput::Logits(row) = done.output.unwrap() {
                    token = Some(greedy(row).unwrap());
                }
            });
            token
        };
        let expected = Some(model.expected(&[4], 1)[0]);
        assert_eq!(last_stage(&hidden, &[4]), expected);
        assert_ne!(last_stage(&hidden, &[5]), expected, "another token on the later stage");
        hidden[place] += 1.0;
        assert_ne!(last_stage(&hidden, &[4]), expected, "number {place}");
    }
}

#[test]
fn bad_steps_are_refused_and_change_nothing() {
    let (model, mut stages) = pipeline(1);
    open(&mut stages, A);
    step(&mut stages, A, 0, &[1, 2]).unwrap();
    let gap = step(&mut stages, A, 3, &[1]);
    assert!(matches!(gap, Err(StepError::Gap { kv_len: 2, start_pos: 3, .. })), "{gap:?}");
    let unknown = step(&mut stages, B, 0, &[1]);
    assert!(matches!(unknown, Err(StepError::UnknownSession { session: B })), "{unknown:?}");
    let token = step(&mut stages, A, 2, &[258]);
    assert!(matches!(token, Err(StepError::Token { token: 258, vocab_size: 258 })), "{token:?}");
    let full = step(&mut stages, A, 2, &vec![1; 4095]);
    assert!(matches!(full, Err(StepError::ContextFull { len: 4097, limit: 4096, .. })), "{full:?}");
    assert_eq!(step(&mut stages, A, 2, &[3]).unwrap(), model.expected(&[1, 2, 3], 1)[0]);
}

#[test]
fn rows_and_wanted_rows_are_checked() {
    let (_, mut stages) = pipeline(1);
    open(&mut stages, A);
    let good = StepRows {
        session: A,
        start_pos: 0,
        path: RowPath::Prefill,
        tokens: &[1, 2],
        hidden: None,
        wanted: &[0, 1],
    };
    let mut refused = |rows: StepRows<'_>| {
        let mut refused = false;
        stages[0].run(&[rows], &mut |done| {
            refused = matches!(done.output, Err(StepError::Shape { .. }));
        });
        refused
    };
    assert!(!refused(good));
    assert!(refused(StepRows { tokens: &[], wanted: &[], ..good }));
    assert!(refused(StepRows { hidden: Some(&[0.0; 32]), ..good }));
    assert!(refused(StepRows { wanted: &[1, 1], ..good }));
    assert!(refused(StepRows { wanted: &[1, 0], ..good }));
    assert!(refused(StepRows { wanted: &[2], ..good }));
}

#[test]
fn a_micro_batch_holds_a_session_once() {
    let (_, mut stages) = pipeline(1);
    open(&mut stages, A);
    open(&mut stages, B);
    let rows = |session| StepRows {
        session,
        start_pos: 0,
        path: RowPath::Decode,
        tokens: &[1],
        hidden: None,
        wanted: &[0],
    };
    let mut results = Vec::new();
    stages[0].run(&[rows(A), rows(B), rows(A)], &mut |done| {
        results.push((done.index, done.output.is_ok()));
    });
    assert_eq!(results, [(0, true), (1, true), (2, false)]);
}

#[test]
fn sessions_are_counted_limited_and_freed() {
    let model = TestModel::default();
    let options = TestOptions { max_sessions: 2, ..TestOptions::default() };
    let mut stages = TestBackend::pipeline(&model, 1, &options);
    open(&mut stages, A);
    open(&mut stages, B);
    let third = stages[0].open(SessionKey(3), &[1], 10);
    assert!(matches!(third, Err(OpenError::Full { n_sessions: 2, max_sessions: 2 })));
    step(&mut stages, A, 0, &[1, 2, 3]).unwrap();
    for (prompt, kept) in [(&[1, 2, 3, 4][..], 3), (&[1, 2, 9, 4], 2), (&[9], 0)] {
        let cached = stages[0].open(A, prompt, 10).unwrap();
        assert_eq!(cached, kept, "an open session keeps the rows of {prompt:?}");
    }
    let used = stages[0].kv_use();
    assert_eq!((used.n_sessions, used.tokens), (2, 3));
    assert!(used.bytes > 0);
    stages[0].close(A);
    stages[0].close(A);
    assert_eq!((stages[0].kv_use().n_sessions, stages[0].kv_use().tokens), (1, 0));
    assert_eq!(stages[0].open(SessionKey(3), &[1], 10).unwrap(), 0);
}

#[test]
fn faults_strike_when_asked_for() {
    let model = TestModel::default();
    let hold = Duration::from_millis(30);
    let faults = vec![
        Fault::FailAtOpen { open: 1 },
        Fault::HangAtStep { step: 1, hold },
        Fault::CorruptAtStep { step: 2 },
        Fault::FailAtStep { step: 3 },
    ];
    let options = TestOptions { faults, ..TestOptions::default() };
    let mut stages = TestBackend::pipeline(&model, 1, &options);
    open(&mut stages, A);
    assert!(matches!(stages[0].open(B, &[1], 10), Err(OpenError::Runtime(_))));
    assert_eq!(step(&mut stages, A, 0, &[1]).unwrap(), model.expected(&[1], 1)[0]);
    let started = Instant::now();
    assert_eq!(step(&mut stages, A, 1, &[2]).unwrap(), model.expected(&[1, 2], 1)[0]);
    assert!(started.elapsed() >= hold);
    assert_ne!(step(&mut stages, A, 2, &[3]).unwrap(), model.expected(&[1, 2, 3], 1)[0]);
    assert!(matches!(step(&mut stages, A, 3, &[4]), Err(StepError::Runtime(_))));
    let closed = step(&mut stages, A, 0, &[1]);
    assert!(matches!(closed, Err(StepError::UnknownSession { .. })), "{closed:?}");
}

#[test]
fn a_panic_can_be_asked_for() {
    let options =
        TestOptions { faults: vec![Fault::PanicAtStep { step: 0 }], ..TestOptions::default() };
    let mut stages = TestBackend::pipeline(&TestModel::default(), 1, &options);
    open(&mut stages, A);
    let run = std::panic::AssertUnwindSafe(|| step(&mut stages, A, 0, &[1]));
    assert!(std::panic::catch_unwind(run).is_err());
}
