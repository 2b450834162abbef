//! Output under a constraint with real workers: it fits, whatever is drafted and whoever chooses.

use serde_json::{Value, json};
use stagebus_coordinator::{CoordinatorSettings, DraftChoice};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::control::HeadMode;
use stagebus_schemas::messages::public::{Constraint, FinishReason, PromptRequest};

use crate::harness::{Answer, Bed, tokens};
use crate::workers::workers;

fn constraint(json: Value) -> Option<Constraint> {
    Some(serde_json::from_value(json).unwrap())
}

/// Requests whose outputs end by themselves, with a prompt that look-up finds much of them in.
fn requests() -> Vec<PromptRequest> {
    let schema = json!({
        "type": "object",
        "properties": {
            "kind": { "enum": ["true", "false", "truest"] },
            "list": { "type": "array", "items": { "enum": [true, false, null] }, "maxItems": 12 },
        },
        "required": ["kind", "list"],
        "additionalProperties": false,
    });
    let prompt: Vec<u32> = "{\"kind\":\"true\",\"list\":[true,true,false,null,true]}"
        .repeat(2)
        .bytes()
        .map(u32::from)
        .collect();
    let constraints = [
        json!({ "type": "json_schema", "schema": schema }),
        json!({ "type": "regex", "pattern": "(true,|null,|false,){10,20}\\." }),
        json!({ "type": "choice", "options": ["true,true,true,true", "null,null,null,true"] }),
    ];
    let request = |(seed, json): (u64, &Value)| PromptRequest {
        constraint: constraint(json.clone()),
        temperature: (seed > 0).then_some(1.0),
        seed: Some(seed),
        ..tokens(&prompt, 300)
    };
    (0..4).flat_map(|seed| constraints.iter().map(move |json| (seed, json))).map(request).collect()
}

/// What is chosen for all requests, and how many tokens were drafted and accepted.
async fn answers(
    bed: &Bed,
    head: HeadMode,
    (draft_tokens, draft_windows): (u32, u32),
) -> (Vec<(String, Vec<u32>)>, [u32; 2]) {
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
        let Answer { text, tokens, done, error, .. } = bed.ask(&request).await;
        assert_eq!(error, None);
        let (reason, usage) = done.unwrap();
        assert_eq!(reason, FinishReason::Stop, "{text}");
        drafted += usage.drafted_tokens;
        accepted += usage.accepted_tokens;
        answers.push((text, tokens));
    }
    coordinator.end().await.unwrap();
    (answers, [drafted, accepted])
}

#[tokio::test]
async fn output_fits_and_neither_drafts_nor_the_place_of_the_choice_change_it() {
    for n_stages in 1..=2 {
        let bed = Bed::new(n_stages).await;
        let _workers = workers(&bed, 1).await;
        let (first, none) = answers(&bed, HeadMode::Token, (0, 1)).await;
        assert_eq!(none, [0, 0]);
        for texts in first.chunks(3) {
            let parsed: Value = serde_json::from_str(&texts[0].0).unwrap();
            assert!(parsed["list"].as_array().is_some_and(|list| list.len() <= 12), "{parsed}");
            let words: Vec<&str> = texts[1].0.split(',').collect();
            assert!((11..=21).contains(&words.len()) && words.last() == Some(&"."), "{words:?}");
            assert!(["true,true,true,true", "null,null,null,true"].contains(&&*texts[2].0));
        }
        for (head, drafts) in [
            (HeadMode::Token, (5, 1)),
            (HeadMode::Token, (3, 4)),
            (HeadMode::Full, (0, 1)),
            (HeadMode::Full, (4, 2)),
        ] {
            let (found, [drafted, accepted]) = answers(&bed, head, drafts).await;
            assert!(found == first, "{n_stages} stages, {head:?}, {drafts:?} drafted");
            if drafts.0 > 0 {
                assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted} accepted");
            }
        }
    }
}

#[tokio::test]
async fn the_end_of_the_tokens_cuts_the_output_off() {
    let bed = Bed::new(1).await;
    let _workers = workers(&bed, 1).await;
    let _coordinator = bed.coordinator(CoordinatorSettings::default()).await;
    let request = |max_tokens| PromptRequest {
        constraint: constraint(json!({ "type": "regex", "pattern": "a{20}" })),
        ..tokens(&[1, 2], max_tokens)
    };
    let cut = bed.ask(&request(20)).await;
    assert_eq!((cut.finish_reason(), cut.text), (Some(FinishReason::Length), "a".repeat(20)));
    // The end is a token of its own.
    let whole = bed.ask(&request(21)).await;
    assert_eq!((whole.finish_reason(), whole.text), (Some(FinishReason::Stop), "a".repeat(20)));
    assert_eq!(whole.tokens.len(), 21);
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused_before_anything_runs() {
    let bed = Bed::new(1).await;
    let _workers = workers(&bed, 1).await;
    let _coordinator = bed.coordinator(CoordinatorSettings::default()).await;
    for (json, names) in [
        (json!({ "type": "json_schema", "schema": { "type": "sometimes" } }), "sometimes"),
        (json!({ "type": "regex", "pattern": "(a" }), "constraint"),
        (json!({ "type": "regex", "pattern": "" }), "constraint.pattern"),
        (json!({ "type": "choice", "options": [] }), "constraint.options"),
        (json!({ "type": "choice", "options": ["x".repeat(200_000)] }), "constraint has 2"),
        (json!({ "type": "lark", "grammar": "nothing" }), "constraint"),
    ] {
        let request = PromptRequest { constraint: constraint(json.clone()), ..tokens(&[1], 4) };
        let answer = bed.ask(&request).await;
        let (class, message, _) = answer.error.unwrap();
        assert_eq!((answer.n_accepted, class), (0, ErrorClass::InvalidRequest), "{json}");
        assert!(message.contains(names), "{message} does not name {names}");
    }
    // One that no token is left for is only found when it runs.
    let request = PromptRequest {
        constraint: constraint(json!({ "type": "choice", "options": ["ab"] })),
        logit_bias: [(u32::from(b'b'), -100.0)].into(),
        ..tokens(&[1], 4)
    };
    let answer = bed.ask(&request).await;
    assert_eq!(answer.text, "a");
    assert_eq!(answer.class(), Some(ErrorClass::InvalidRequest), "{:?}", answer.error);
}
