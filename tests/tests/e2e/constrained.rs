//! Output under a constraint from the real model: it fits, and nothing that may not change its tokens
//! does.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use stagebus_fleet::FleetSpec;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::FinishReason;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::shard_sets;

/// Requests under way at the same time.
const N_TOGETHER: usize = 10;

/// A schema whose values are bounded, so that every output ends.
fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": 24 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "score": { "type": "number", "minimum": 0, "maximum": 1 },
            "tags": { "type": "array", "items": { "enum": ["red", "green", "blue"] }, "maxItems": 3 },
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
    let known = ["name", "age", "score", "tags", "friend"];
    ensure!(fields.keys().all(|key| known.contains(&key.as_str())), "{text}");
    let name = fields.get("name").and_then(Value::as_str).context("no name")?;
    ensure!((1..=24).contains(&name.chars().count()), "{text}");
    ensure!(fields.get("age").and_then(Value::as_u64).is_some_and(|age| age <= 120), "{text}");
    let score = fields.get("score").map_or(Some(0.0), Value::as_f64);
    ensure!(score.is_some_and(|score| (0.0..=1.0).contains(&score)), "{text}");
    let tags = fields.get("tags").and_then(Value::as_array).context("no tags")?;
    let is_tag = |tag: &Value| ["red", "green", "blue"].iter().any(|known| tag == known);
    ensure!(tags.len() <= 3 && tags.iter().all(is_tag), "{text}");
    ensure!(fields.get("friend").is_some_and(|friend| friend.is_null() || friend.is_boolean()));
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
                    "max_tokens": 256,
                }));
            }
        }
    }
    requests
}

/// A fleet in the fast profile whose coordinator drafts with prompt look-up and the draft model.
async fn fast_fleet(n_stages: usize) -> Result<Fleet> {
    let draft = shard_sets::draft().await?;
    let settings = [
        "worker.profile=fast".to_owned(),
        "coordinator.draft=hybrid".to_owned(),
        format!("coordinator.draft_shards={}", draft.display()),
    ];
    Fleet::start(n_stages, |spec: &mut FleetSpec| spec.settings.extend(settings)).await
}

fn with(request: &Value, fields: &Value) -> Value {
    let mut request = request.clone();
    for (name, value) in fields.as_object().into_iter().flatten() {
        request[name] = value.clone();
    }
    request
}

#[tokio::test]
async fn a_hundred_outputs_fit_at_temperature_1_and_drafts_change_none() -> Result<()> {
    let fleet = fast_fleet(2).await?;
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
    for (request, answer) in requests.iter().zip(&answers).step_by(9) {
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

#[tokio::test]
async fn tokens_do_not_depend_on_stages_or_on_where_they_are_chosen() -> Result<()> {
    let mut first: Vec<Answer> = Vec::new();
    for (n_stages, head) in [(1, "token"), (2, "token"), (2, "full")] {
        let set = |spec: &mut FleetSpec| spec.settings.push(format!("coordinator.head={head}"));
        let fleet = Fleet::start(n_stages, set).await?;
        let mut found = Vec::new();
        for request in of_every_kind() {
            found.push(fleet.ask(&request).await?);
        }
        fleet.idle().await?;
        fleet.end().await?;
        if first.is_empty() {
            first = found;
            continue;
        }
        for (found, first) in found.iter().zip(&first) {
            ensure!(found.tokens == first.tokens, "{head} of {n_stages}: {found:?} not {first:?}");
            ensure!(found.text == first.text && found.reason()? == first.reason()?);
        }
    }
    check_person(&first[0].text)?;
    check_person(&first[1].text)?;
    ensure!(first[2].text.starts_with('{'), "{:?}", first[2]);
    let words: Vec<&str> = first[3].text.trim_end_matches('.').split(' ').collect();
    ensure!(words.len() == 4 && words.iter().all(|word| word.len() <= 10), "{words:?}");
    ensure!(["yes", "no", "perhaps"].contains(&first[4].text.as_str()), "{:?}", first[4]);
    ensure!(first[4].logprobs.len() == first[4].tokens.len(), "{:?}", first[4]);
    let is_bracketed =
        |text: &str| text.chars().all(|c| "<>".contains(c) || c.is_ascii_lowercase());
    ensure!(is_bracketed(&first[5].text), "{:?}", first[5]);
    Ok(())
}

#[tokio::test]
async fn an_output_goes_on_fitting_when_its_worker_dies() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| {
        spec.workers_per_stage = 2;
        spec.settings.push("coordinator.step_timeout_ms=3600000".to_owned());
    })
    .await?;
    let request = json!({
        "prompt": "Numbers:",
        "constraint": { "type": "regex", "pattern": "( [0-9]{1,4},){40} end" },
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 400,
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
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_constraint_that_cannot_be_honoured_is_refused() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let nested = (0..100).fold(json!({}), |inner, _| json!({ "items": inner }));
    for (constraint, part) in [
        (json!({ "type": "json_schema" }), "schema"),
        (json!({ "type": "json_schema", "schema": { "type": "text" } }), "text"),
        (json!({ "type": "json_schema", "schema": nested }), "cannot be"),
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
    let next = fleet.ask(&of_every_kind()[4]).await?;
    ensure!(["yes", "no", "perhaps"].contains(&next.text.as_str()), "{next:?}");
    fleet.idle().await?;
    fleet.end().await
}
