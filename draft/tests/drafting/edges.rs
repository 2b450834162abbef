//! Ends of context, lack of room, failures, long texts.

use stagebus_draft::drafter::{
    DraftError, DraftHead, DraftRequest, Drafter, HybridDrafter, ModelDrafter,
};
use stagebus_draft::sampling::SamplingParams;
use stagebus_engine::testing::{Fault, TestBackend, TestOptions};
use stagebus_engine::{SessionKey, StepError};

use super::{VOCAB_SIZE, backend, draft_one, drafter, drafter_with, model, params};

const GREEDY: u64 = 0;

/// A text that does not repeat itself soon.
fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|idx| (idx * idx + idx / 7) % VOCAB_SIZE as u32).collect()
}

#[test]
fn a_draft_ends_where_the_context_ends() {
    let limit = model().context_length;
    for (left, n, want) in [(3, 8, 4), (1, 8, 2), (0, 8, 1), (3, 2, 2)] {
        let prompt = text(limit - left);
        let mut drafter = drafter();
        drafter.open(SessionKey(1), &prompt);
        // A long text is taken in over several calls.
        let drafts: Vec<_> =
            (0..4).map(|_| draft_one(&mut drafter, 1, n, &params(GREEDY))).collect();
        assert_eq!(drafts[3], model().expected(&prompt, want), "{left} left, {n} asked for");
    }
    let mut drafter = drafter();
    drafter.open(SessionKey(1), &text(limit + 1));
    assert!((0..4).all(|_| draft_one(&mut drafter, 1, 4, &params(GREEDY)).is_empty()));
}

#[test]
fn a_long_prompt_delays_others_by_one_bounded_intake() {
    let (long, short) = (text(1400), text(9));
    let params = params(GREEDY);
    let mut drafter = drafter();
    drafter.open(SessionKey(1), &long);
    drafter.open(SessionKey(2), &short);
    let requests = [1, 2].map(|session| DraftRequest {
        session: SessionKey(session),
        assumed: &[],
        n: 3,
        params: &params,
    });
    let mut calls = 0;
    loop {
        let drafts = drafter.draft(&requests).unwrap();
        assert_eq!(drafts[1], model().expected(&short, 3), "the short one never waits");
        calls += 1;
        if !drafts[0].is_empty() {
            assert_eq!(drafts[0], model().expected(&long, 3));
            break;
        }
        assert!(calls < 4, "the prompt is taken in piece by piece");
    }
    assert_eq!(calls, 3, "1400 rows, 512 a call");
}

#[test]
fn a_request_for_nothing_takes_text_in() {
    let prompt = text(700);
    let mut drafter = drafter();
    drafter.open(SessionKey(1), &prompt);
    for _ in 0..2 {
        assert!(draft_one(&mut drafter, 1, 0, &params(GREEDY)).is_empty());
    }
    assert_eq!(draft_one(&mut drafter, 1, 5, &params(GREEDY)), model().expected(&prompt, 5));
}

#[test]
fn sessions_without_room_are_not_drafted_for_until_one_ends() {
    let mut drafter = drafter_with(TestOptions { max_sessions: 1, ..TestOptions::default() });
    let params = params(GREEDY);
    let (a, b) = (text(5), text(6));
    drafter.open(SessionKey(1), &a);
    drafter.open(SessionKey(2), &b);
    let requests = [1, 2].map(|session| DraftRequest {
        session: SessionKey(session),
        assumed: &[],
        n: 2,
        params: &params,
    });
    let drafts = drafter.draft(&requests).unwrap();
    assert_eq!(drafts, [model().expected(&a, 2), vec![]]);
    drafter.close(SessionKey(1));
    assert_eq!(draft_one(&mut drafter, 2, 2, &params), model().expected(&b, 2));
}

#[test]
fn a_failure_is_told_and_the_session_replayed() {
    let faults = vec![Fault::FailAtStep { step: 3 }];
    let mut drafter = drafter_with(TestOptions { faults, ..TestOptions::default() });
    let params = params(GREEDY);
    let (a, b) = (text(5), text(6));
    drafter.open(SessionKey(1), &a);
    drafter.open(SessionKey(2), &b);
    let requests = [1, 2].map(|session| DraftRequest {
        session: SessionKey(session),
        assumed: &[],
        n: 3,
        params: &params,
    });
    // The second row of session 2 is step 3 of the backend.
    let error = drafter.draft(&requests).unwrap_err();
    assert!(matches!(
        error,
        DraftError::Step { session: SessionKey(2), source: StepError::Runtime(_) }
    ));
    let want = [model().expected(&a, 3), model().expected(&b, 3)];
    assert_eq!(drafter.draft(&requests).unwrap(), want);

    let faults = vec![Fault::FailAtOpen { open: 0 }];
    let mut drafter = drafter_with(TestOptions { faults, ..TestOptions::default() });
    drafter.open(SessionKey(1), &a);
    drafter.open(SessionKey(2), &b);
    let error = drafter.draft(&requests).unwrap_err();
    assert!(matches!(error, DraftError::Open { session: SessionKey(1), .. }));
    assert_eq!(drafter.draft(&requests).unwrap(), [vec![], want[1].clone()]);
    drafter.close(SessionKey(2));
    assert_eq!(drafter.draft(&requests).unwrap(), [want[0].clone(), vec![]]);
}

#[test]
fn a_part_of_a_model_and_a_wrong_head_are_no_draft_models() {
    let model = model();
    let first = TestBackend::new(model.clone(), model.stage(0..3), TestOptions::default());
    let mut drafter = ModelDrafter::new(Box::new(first), 100, DraftHead::whole(VOCAB_SIZE));
    drafter.open(SessionKey(1), &[1, 2]);
    let params = params(GREEDY);
    let request = DraftRequest { session: SessionKey(1), assumed: &[], n: 2, params: &params };
    assert!(matches!(drafter.draft(&[request]), Err(DraftError::NotLogits)));

    let whole = Box::new(backend(TestOptions::default()));
    let mut drafter = ModelDrafter::new(whole, 100, DraftHead::whole(VOCAB_SIZE + 1));
    drafter.open(SessionKey(1), &[1, 2]);
    let error = drafter.draft(&[request]).unwrap_err();
    assert!(matches!(error, DraftError::RowWidth { found: VOCAB_SIZE, .. }));
}

#[test]
fn a_bias_that_forbids_every_token_ends_the_draft() {
    let mut drafter = drafter();
    drafter.open(SessionKey(1), &[1, 2]);
    let logit_bias = (0..VOCAB_SIZE as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
    let nothing = SamplingParams { logit_bias, ..SamplingParams::default() };
    assert!(draft_one(&mut drafter, 1, 4, &nothing).is_empty());
    assert_eq!(draft_one(&mut drafter, 1, 2, &params(GREEDY)), model().expected(&[1, 2], 2));
}

#[test]
fn unknown_closed_and_empty_sessions_get_nothing() {
    let mut drafter = HybridDrafter::new(drafter());
    assert!(draft_one(&mut drafter, 1, 4, &params(GREEDY)).is_empty());
    drafter.open(SessionKey(1), &[]);
    assert!(draft_one(&mut drafter, 1, 4, &params(GREEDY)).is_empty());
    drafter.accept(SessionKey(1), &[4, 5]);
    assert_eq!(draft_one(&mut drafter, 1, 4, &params(GREEDY)), model().expected(&[4, 5], 4));
    drafter.close(SessionKey(1));
    drafter.close(SessionKey(1));
    assert!(draft_one(&mut drafter, 1, 4, &params(GREEDY)).is_empty());
    assert_eq!(drafter.draft(&[]).unwrap(), Vec::<Vec<u32>>::new());
}

#[test]
fn a_hybrid_trusts_a_long_match_and_else_the_model() {
    let mut drafter = HybridDrafter::new(drafter());
    let prompt = [1, 2, 3, 4, 30, 31, 1, 2, 3];
    drafter.open(SessionKey(1), &prompt);
    assert_eq!(draft_one(&mut drafter, 1, 2, &params(GREEDY)), model().expected(&prompt, 2));
    drafter.accept(SessionKey(1), &[4]);
    assert_eq!(draft_one(&mut drafter, 1, 2, &params(GREEDY)), [30, 31]);
}
