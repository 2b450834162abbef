//! Tokens of hand-made rows: what a session's text and parameters do to them.

mod constrained;

use stagebus_schemas::ids::{CoordinatorId, Epoch, SessionId, StepNumber};
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::forward::Phase;

use super::*;
use crate::stage_fixture::{FINGERPRINT, worker};

const KEY: SessionKey = SessionKey(1);

/// Opens session 1 with a prompt of which `prompt_len` tokens are the client's.
fn open(prompt: &[u32], prompt_len: u32, sampling: Sampling) -> Open {
    Open {
        session: SessionId::from_u64(1),
        epoch: Epoch::FIRST,
        coordinator: CoordinatorId::new("c").expect("valid"),
        route: vec![worker(0)],
        fingerprint: FINGERPRINT.to_owned(),
        prompt: prompt.to_vec(),
        prompt_len,
        max_len: 64,
        sampling,
        head: HeadMode::Token,
        priority: Priority::Interactive,
    }
}

/// The tokens after every row of a step at `start_pos`; every row has the same `logits`.
fn choose(
    heads: &mut Heads,
    start_pos: u32,
    tokens: &[u32],
    logits: &[f32],
) -> Result<Vec<HeadRow>, HeadError> {
    let n_rows = u32::try_from(tokens.len()).expect("few");
    let step = Step {
        session: SessionId::from_u64(1),
        epoch: Epoch::FIRST,
        step: StepNumber::FIRST,
        start_pos,
        phase: Phase::Decode,
        tokens: tokens.to_vec(),
        wanted: (0..n_rows).collect(),
        held_from: None,
        trace: vec![],
    };
    match heads.choose(KEY, &step, &logits.repeat(tokens.len()), logits.len())? {
        Chosen::Rows(rows) => Ok(rows),
        Chosen::AllLogits => Ok(vec![]),
    }
}

fn tokens(rows: &[HeadRow]) -> Vec<u32> {
    rows.iter().map(|row| row.token).collect()
}

#[test]
fn penalties_follow_prompt_steps_and_rewinds() {
    let logits = [1.0, 0.9, 0.8, 0.7];
    let sampling = Sampling { presence_penalty: 0.5, ..Sampling::default() };
    let mut heads = Heads::default();
    // Position 2 was generated before a recovery, so it counts as output.
    heads.open(KEY, &open(&[0, 0, 1], 2, sampling), None);
    let rows = choose(&mut heads, 2, &[1], &logits).expect("a token");
    assert_eq!((rows[0].pos, rows[0].token), (2, 0), "a prompt token is not penalised");
    // A window of drafted tokens: every row sees the rows before it.
    let rows = choose(&mut heads, 3, &[0, 2], &logits).expect("tokens");
    assert_eq!(tokens(&rows), [2, 3]);
    // The second one is rejected.
    let rows = choose(&mut heads, 4, &[3], &logits).expect("a token");
    assert_eq!(tokens(&rows), [2]);
    let error = choose(&mut heads, 9, &[3], &logits).expect_err("a hole");
    assert!(matches!(error, HeadError::Gap { len: 5, start_pos: 9 }), "{error}");
    heads.close(KEY);
    let error = choose(&mut heads, 0, &[3], &logits).expect_err("it is gone");
    assert!(matches!(error, HeadError::UnknownSession), "{error}");
}

#[test]
fn windows_change_no_token() {
    let logits: Vec<f32> = (0..40_u8).map(|i| f32::from(i % 7) * 0.3).collect();
    let sampling = Sampling {
        temperature: 0.9,
        top_p: 0.95,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        seed: u64::MAX,
        top_logprobs: Some(2),
        ..Sampling::default()
    };
    let text = [5, 6, 5, 30, 31, 5];
    let mut heads = Heads::default();
    heads.open(KEY, &open(&text[..2], 2, sampling.clone()), None);
    let whole = choose(&mut heads, 1, &text[1..], &logits).expect("tokens");
    heads.open(KEY, &open(&text[..2], 2, sampling), None);
    let mut single = Vec::new();
    for (pos, token) in (0..).zip(text).skip(1) {
        single.extend(choose(&mut heads, pos, &[token], &logits).expect("a token"));
    }
    assert_eq!(single, whole);
    assert!(whole.iter().all(|row| row.logprob.is_some() && row.top.len() == 2));
}

#[test]
fn without_a_token_left_the_error_says_whose_fault_it_is() {
    let forbidding = |n: u32| Sampling {
        logit_bias: (0..n).map(|token| (token, -100.0)).collect(),
        ..Sampling::default()
    };
    let mut heads = Heads::default();
    heads.open(KEY, &open(&[0], 1, forbidding(3)), None);
    assert_eq!(tokens(&choose(&mut heads, 0, &[0], &[2.0, 1.0, 1.0, -3.0]).expect("one")), [3]);
    heads.open(KEY, &open(&[0], 1, forbidding(4)), None);
    let error = choose(&mut heads, 0, &[0], &[2.0; 4]).expect_err("all are forbidden");
    assert!(matches!(error, HeadError::AllForbidden(_)), "{error}");
    heads.open(KEY, &open(&[0], 1, Sampling::default()), None);
    let error = choose(&mut heads, 0, &[0], &[f32::NAN; 4]).expect_err("no number");
    assert!(matches!(error, HeadError::Logits(_)), "{error}");
}

#[test]
fn a_full_head_chooses_nothing() {
    let mut heads = Heads::default();
    let full = Open { head: HeadMode::Full, ..open(&[0], 1, Sampling::default()) };
    heads.open(KEY, &full, None);
    assert_eq!(choose(&mut heads, 0, &[0], &[2.0; 4]).expect("logits go out"), []);
}
