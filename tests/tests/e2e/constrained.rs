//! Output under a constraint from the real model: it fits, and nothing that may not change its tokens
//! does.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use stagebus_fleet::FleetSpec;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::FinishReason;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::{Fleet, with};

/// Requests under way at the same time.
const N_TOGETHER: usize = 10;

/// A schema whose values are bounded, so that every output ends, and soon.
fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "tags": { "type": "array", "items": { "enum": ["red", "blue"] }, "maxItems": 2 },
            "friend": { "anyOf": [{ "type": "null" }, { "type": "boolean" }] },
        },
        "required": ["name", "age", "tags", "friend"],
        "additionalProperties": false,
    })
}

/// Checks an output against that schema.
fn check_person(text: &str) -> Result<()> {
    let value: Value =
        serde_json::from_str(text).with_context(|| format!("{text:?} is no JSON"))?;
    let fields = value.as_object().context("no object")?;
    let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
    ensure!(keys == ["name", "age", "tags", "friend"], "{text}");
    let name = fields["name"].as_str().context("no name")?;
    ensure!((1..=12).contains(&name.chars().count()), "{text}");
    ensure!(fields["age"].as_u64().is_some_and(|age| age <= 120), "{text}");
    let tags = fields["tags"].as_array().context("no tags")?;
    ensure!(tags.len() <= 2 && tags.iter().all(|tag| tag == "red" || tag == "blue"), "{text}");
    ensure!(fields["friend"].is_null() || fields["friend"].is_boolean(), "{text}");
    Ok(())
}

/// A hundred questions, each with a seed of its own.
fn people() -> Vec<Value> {
    let names = ["a baker", "a pilot", "your neighbour", "a Roman emperor", "a robot"];
    let places = ["Lisbon", "a small village", "the moon", "\u{4eac}\u{90fd}"];
    let manners = ["Describe", "Invent", "Give me", "Write a poem about", "{\"name\":"];
    let mut requests = Vec::new();
    for manner in manners {
        for name in names {
            for place in places {
                let content = format!("{manner} {name} from {place}, as JSON.");
                requests.push(json!({
                    "messages": [{ "role": "user", "content": content }],
                    "constraint": { "type": "json_schema", "schema": person() },
                    "temperature": 1.0,
                    "seed": requests.len(),
                    "max_tokens": 200,
                }));
            }
        }
    }
    requests
}

#[tokio::test]
async fn a_hundred_outputs_fit_at_temperature_1_and_drafts_change_none() -> Result<()> {
    let fleet = Fleet::fast(2, "auto").await?;
    let requests = people();
    ensure!(requests.len() == 100);
    let mut answers = Vec::new();
    for group in requests.chunks(N_TOGETHER) {
        let mut streams = Vec::new();
        for request in group {
            let request = with(request, &json!({ "draft_tokens": 4 }));
            streams.push(fleet.send(serde_json::to_vec(&request)?).await?);
        }
        for stream in &mut streams {
            answers.push(Answer::default().rest(stream).await?);
        }
    }
    let (mut drafted, mut accepted) = (0, 0);
    for answer in &answers {
        ensure!(answer.reason()? == FinishReason::Stop, "{answer:?}");
        check_person(&answer.text)?;
        drafted += answer.usage()?.drafted_tokens;
        accepted += answer.usage()?.accepted_tokens;
    }
    ensure!(
        accepted > drafted / 10 && accepted > 500,
        "{accepted} of {drafted} drafted tokens stood"
    );
    for (request, answer) in requests.iter().zip(&answers).step_by(25) {
        for drafts in [
            json!({ "draft_tokens": 0 }),
            json!({ "draft_tokens": 2, "draft_windows": 4 }),
            json!({}),
        ] {
            let again = fleet.ask(&with(request, &drafts)).await?;
            ensure!(
                again.tokens == answer.tokens,
                "{drafts}: {:?} not {:?}",
                again.text,
                answer.text
            );
        }
    }
    fleet.idle().await?;
    fleet.end().await
}

/// Requests of every kind.
fn of_every_kind() -> Vec<Value> {
    let base = people().swap_remove(7);
    let of = |constraint: Value, fields: Value| {
        with(&with(&base, &json!({ "constraint": constraint })), &fields)
    };
    vec![
        base.clone(),
        with(&base, &json!({ "temperature": 0 })),
        of(json!({ "type": "json_object" }), json!({ "max_tokens": 40 })),
        of(
            json!({ "type": "regex", "pattern": "[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){3}\\." }),
            json!({}),
        ),
        of(
            json!({ "type": "choice", "options": ["yes", "no", "perhaps"] }),
            json!({ "logprobs": true, "top_logprobs": 3 }),
        ),
        of(
            json!({ "type": "lark", "grammar": "start: \"<\" WORD \">\" start? | WORD\nWORD: /[a-z]{1,8}/" }),
            json!({ "max_tokens": 40, "repetition_penalty": 1.2 }),
        ),
    ]
}

async fn answers(fleet: &Fleet) -> Result<Vec<Answer>> {
    let mut answers = Vec::new();
    for request in of_every_kind() {
        answers.push(fleet.ask(&request).await?);
    }
    Ok(answers)
}

fn check_every_kind(answers: &[Answer]) -> Result<()> {
    check_person(&answers[0].text)?;
    check_person(&answers[1].text)?;
    ensure!(answers[2].text.starts_with('{'), "{:?}", answers[2]);
    let words: Vec<&str> = answers[3].text.trim_end_matches('.').split(' ').collect();
    ensure!(words.len() == 4 && words.iter().all(|word| word.len() <= 10), "{words:?}");
    ensure!(["yes", "no", "perhaps"].contains(&answers[4].text.as_str()), "{:?}", answers[4]);
    ensure!(answers[4].logprobs.len() == answers[4].tokens.len(), "{:?}", answers[4]);
    let is_bracketed =
        |text: &str| text.chars().all(|c| "<>".contains(c) || c.is_ascii_lowercase());
    ensure!(is_bracketed(&answers[5].text), "{:?}", answers[5]);
    Ok(())
}

#[tokio::test]
async fn neither_stages_nor_the_head_nor_a_lost_worker_change_an_output() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| {
        spec.workers_per_stage = 2;
        spec.settings.push("coordinator.step_timeout_ms=3600000".to_owned());
    })
    .await?;
    let first = answers(&fleet).await?;
    check_every_kind(&first)?;
    refuses_what_cannot_be_honoured(&fleet).await?;
    goes_on_when_its_worker_dies(&mut fleet).await?;
    fleet.idle().await?;
    fleet.end().await?;

    let full = |spec: &mut FleetSpec| spec.settings.push("coordinator.head=full".to_owned());
    let fleet = Fleet::start(1, full).await?;
    for (found, first) in answers(&fleet).await?.iter().zip(&first) {
        ensure!(found.tokens == first.tokens, "{found:?} not {first:?}");
        ensure!(found.text == first.text && found.reason()? == first.reason()?);
    }
    fleet.idle().await?;
    fleet.end().await
}

async fn goes_on_when_its_worker_dies(fleet: &mut Fleet) -> Result<()> {
    let request = json!({
        "prompt": "Numbers:",
        "constraint": { "type": "regex", "pattern": "( [0-9]{1,4},){20} end" },
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 200,
    });
    let alone = fleet.ask(&request).await?;
    ensure!(alone.text.ends_with(", end") && alone.reason()? == FinishReason::Stop, "{alone:?}");
    let (answer, mut stream) = fleet.begin(&request, 5).await?;
    let sessions = fleet.sessions(1).await?;
    let busy = sessions.iter().position(|&n| n == 1).context("no worker holds the session")?;
    let name = fleet.workers(1)[busy].name.clone();
    fleet.processes.kill(&name).await?;
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == alone.tokens, "{:?} not {:?}", answer.text, alone.text);
    Ok(())
}

async fn refuses_what_cannot_be_honoured(fleet: &Fleet) -> Result<()> {
    for (constraint, part) in [
        (json!({ "type": "json_schema" }), "schema"),
        (json!({ "type": "json_schema", "schema": { "type": "text" } }), "text"),
        (json!({ "type": "json_schema", "schema": { "uniqueItems": true } }), "uniqueItems"),
        (json!({ "type": "json_object", "schema": {} }), "schema"),
        (json!({ "type": "regex", "pattern": "[" }), "constraint"),
        (json!({ "type": "grammar", "grammar": "start: \"a\"" }), "grammar"),
        (json!("json_object"), "cannot be read"),
    ] {
        let request = json!({ "prompt": "a", "max_tokens": 4, "constraint": constraint });
        let answer = fleet.ask(&request).await?;
        let (class, message) = answer.failure()?;
        ensure!(class == ErrorClass::InvalidRequest, "{constraint}: {class:?}: {message}");
        ensure!(message.contains(part), "{constraint}: {part:?} is not in {message:?}");
        ensure!(answer.accepted.is_none(), "it was accepted first");
    }
    Ok(())
}
