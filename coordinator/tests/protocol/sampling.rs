//! Drawn tokens with real workers: what must not change them does not.

use stagebus_coordinator::{CoordinatorSettings, DraftChoice};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::control::HeadMode;
use stagebus_schemas::messages::public::{PromptRequest, TokenLogprobs};

use crate::harness::{Answer, Bed, tokens};
use crate::shard_set::VOCAB_SIZE;
use crate::workers::workers;

/// Requests that use every parameter, alone and together.
fn requests() -> Vec<PromptRequest> {
    // Repeats itself, so that a look-up finds something to draft.
    let prompt: Vec<u32> = (0..60).map(|i| i % 6).collect();
    let plain = || PromptRequest { seed: Some(5), ..tokens(&prompt, 30) };
    let warm = || PromptRequest { temperature: Some(0.3), ..plain() };
    vec![
        plain(),
        warm(),
        PromptRequest { seed: Some(u64::MAX), ..warm() },
        PromptRequest { top_p: Some(0.5), ..warm() },
        PromptRequest { top_k: Some(3), min_p: Some(0.1), ..warm() },
        PromptRequest {
            repetition_penalty: Some(3.0),
            presence_penalty: Some(0.5),
            frequency_penalty: Some(0.5),
            ..warm()
        },
        PromptRequest {
            repetition_penalty: Some(3.0),
            logit_bias: [(7, 1.5), (8, -100.0)].into(),
            logprobs: Some(true),
            top_logprobs: Some(3),
            ..plain()
        },
        // Two tokens only, so that look-up finds much to draft, right and wrong.
        PromptRequest {
            temperature: Some(1.0),
            frequency_penalty: Some(0.05),
            logit_bias: [(0, 20.0), (1, 20.0)].into(),
            max_tokens: Some(120),
            ..plain()
        },
    ]
}

/// Tokens and log-probabilities of a request.
type Chosen = (Vec<u32>, Vec<TokenLogprobs>);

/// What is chosen for all requests, each with a fixed number of drafted tokens per window and of
/// windows, and how many tokens were drafted and accepted.
async fn answers(
    bed: &Bed,
    head: HeadMode,
    (draft_tokens, draft_windows): (u32, u32),
) -> (Vec<Chosen>, [u32; 2]) {
    let settings = CoordinatorSettings {
        head,
        draft: DraftChoice::Ngram,
        prefill_chunk: 16,
        ..CoordinatorSettings::default()
    };
    let coordinator = bed.coordinator(settings).await;
    let mut answers = Vec::new();
    let (mut drafted, mut accepted) = (0, 0);
    for request in requests() {
        let request = PromptRequest {
            draft_tokens: Some(draft_tokens),
            draft_windows: Some(draft_windows),
            ..request
        };
        let Answer { tokens, logprobs, done, .. } = bed.ask(&request).await;
        let (_, usage) = done.unwrap();
        drafted += usage.drafted_tokens;
        accepted += usage.accepted_tokens;
        answers.push((tokens, logprobs));
    }
    coordinator.end().await.unwrap();
    (answers, [drafted, accepted])
}

#[tokio::test]
async fn neither_drafts_nor_the_place_of_the_choice_change_a_token() {
    for n_stages in 1..=3 {
        let bed = Bed::new(n_stages).await;
        let _workers = workers(&bed, 1).await;
        let (first, none) = answers(&bed, HeadMode::Token, (0, 1)).await;
        assert_eq!(none, [0, 0]);
        for (head, drafts) in [
            (HeadMode::Token, (5, 1)),
            (HeadMode::Token, (2, 2)),
            (HeadMode::Token, (3, 8)),
            (HeadMode::Full, (0, 1)),
            (HeadMode::Full, (5, 1)),
            (HeadMode::Full, (2, 4)),
        ] {
            let (found, [drafted, accepted]) = answers(&bed, head, drafts).await;
            assert!(found == first, "{n_stages} stages, {head:?}, {drafts:?} drafted");
            if drafts.0 > 0 {
                assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted} accepted");
            }
        }
        for (one, other) in [(0, 1), (1, 2), (1, 3), (1, 4), (0, 6)] {
            assert_ne!(first[one].0, first[other].0, "requests {one} and {other}");
        }
        let (tokens, logprobs) = &first[6];
        assert!(!tokens.contains(&8), "a forbidden token came");
        assert_eq!(tokens.len(), logprobs.len());
        assert!(logprobs.iter().all(|entry| entry.top.len() == 3));
    }
}

#[tokio::test]
async fn a_bias_against_every_token_is_a_typed_error() {
    let bed = Bed::new(2).await;
    let _workers = workers(&bed, 1).await;
    let _coordinator = bed.coordinator(CoordinatorSettings::default()).await;
    let all = u32::try_from(VOCAB_SIZE).unwrap();
    let request = |from: u32| PromptRequest {
        logit_bias: (from..all).map(|token| (token, -100.0)).collect(),
        ..tokens(&[1, 2], 4)
    };
    let (class, message, _) = bed.ask(&request(0)).await.error.unwrap();
    assert_eq!(class, ErrorClass::InvalidRequest);
    assert!(message.contains("forbids every one"), "{message}");
    // One token is left, so it comes every time.
    assert_eq!(bed.ask(&request(1)).await.tokens, [0; 4]);
}
