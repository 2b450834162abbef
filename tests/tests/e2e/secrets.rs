//! What people ask and what they are told is in no log, at any level, and in no announcement.

use anyhow::{Result, ensure};
use serde_json::json;
use stagebus_bus::Subscription;
use stagebus_fleet::{BrokerChoice, LogSink};
use stagebus_schemas::error::ErrorClass;
use stagebus_tests::fleet::Fleet;
use tokio::sync::mpsc;

/// More lines than the fleet writes: a full channel would drop some.
const MAX_LINES: usize = 1 << 20;

/// A word that stands in no model and no program.
const CANARY: &str = "Xyloqwrtz";

/// Beginning of the answer to the request below; it holds the word as well, as the model repeats it.
const ECHO: &str = "Repeat this word and nothing else:";

/// All lines that came so far.
fn drain(lines: &mut mpsc::Receiver<String>) -> Vec<String> {
    std::iter::from_fn(|| lines.try_recv().ok()).collect()
}

/// All bytes that came so far.
fn payloads(subscription: &mut Subscription) -> Vec<bytes::Bytes> {
    std::iter::from_fn(|| subscription.try_next()).map(|delivery| delivery.payload).collect()
}

#[tokio::test]
async fn no_text_is_logged_or_announced() -> Result<()> {
    let (sender, mut lines) = mpsc::channel(MAX_LINES);
    let fleet = Fleet::start(2, |spec| {
        spec.log = LogSink::Channel(sender.clone());
        if let BrokerChoice::Private(options) = &mut spec.broker {
            options.log = LogSink::Channel(sender);
        }
        spec.settings.push("log.level=trace,async_nats=trace".to_owned());
        // Drafts are text as well.
        spec.settings.push("coordinator.draft=ngram".to_owned());
    })
    .await?;
    let mut announced = fleet.bus.subscribe(&fleet.subjects().fleet_all()).await?;
    let mut internal = fleet.bus.subscribe(&fleet.subjects().step_all()).await?;
    let chat = json!([{ "role": "user", "content": format!("{ECHO} {CANARY} {CANARY} {CANARY}") }]);
    let answer = fleet.ask(&json!({ "messages": chat, "max_tokens": 24 })).await?;
    ensure!(!answer.text.is_empty(), "{answer:?}");
    let raw = json!({ "prompt": CANARY, "stop": [CANARY], "max_tokens": 2, "logprobs": true });
    fleet.ask(&raw).await?.reason()?;
    let choice = json!({ "type": "choice", "options": [CANARY] });
    let chosen = fleet.ask(&json!({ "prompt": "a", "constraint": choice })).await?;
    ensure!(chosen.text == CANARY, "{chosen:?}");
    // What is refused is told to the client, and to nobody else.
    for refused in [
        json!({ "prompt": CANARY, "max_tokens": 0 }),
        json!({ "prompt": CANARY, CANARY: 1 }),
        json!({ "prompt": { CANARY: CANARY } }),
        json!({ "messages": [{ "role": CANARY, "content": CANARY }], "temperature": -1 }),
        json!({ "prompt": CANARY.repeat(20_000) }),
        json!({ "prompt": "a", "constraint": { "type": "regex", "pattern": format!("{CANARY}(") } }),
    ] {
        let (class, _) = fleet.ask(&refused).await?.failure().map(|(c, m)| (c, m.to_owned()))?;
        ensure!(class == ErrorClass::InvalidRequest, "{class:?}");
    }
    let mut stream = fleet.send(format!("{{\"prompt\": \"{CANARY}").into_bytes()).await?;
    while stream.next().await?.is_some() {}
    fleet.idle().await?;
    let announcements = payloads(&mut announced);
    let steps = payloads(&mut internal);
    ensure!(!announcements.is_empty() && !steps.is_empty(), "nothing was overheard");
    for payload in announcements.iter().chain(&steps) {
        let text = String::from_utf8_lossy(payload);
        ensure!(!text.contains(CANARY), "a text is on an internal subject");
    }
    fleet.end().await?;
    let lines = drain(&mut lines);
    for part in ["worker-0.0 | ", "worker-1.0 | ", "coordinator.0 | ", "broker | "] {
        let n_lines = lines.iter().filter(|line| line.starts_with(part)).count();
        ensure!(n_lines > 0, "no log of {part}");
    }
    ensure!(lines.iter().any(|line| line.contains("DEBUG")), "the level was not taken");
    // At the finest level libraries write texts piece by piece, where no search would find them.
    let ours = |line: &str| !line.contains(" TRACE ") || line.contains(" TRACE stagebus");
    let foreign = lines.iter().find(|line| !ours(line));
    ensure!(foreign.is_none(), "a library logs at the finest level: {foreign:?}");
    let words = answer.text.split_whitespace().filter(|word| word.len() > 6);
    let secrets: Vec<&str> = words.chain([CANARY, ECHO]).collect();
    for line in &lines {
        let told = secrets.iter().find(|&&secret| line.contains(secret));
        ensure!(told.is_none(), "{told:?} is in the log: {line}");
    }
    Ok(())
}
