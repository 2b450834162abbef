//! The programs of `examples/`, each as its users call it, against one fleet and one gateway.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::{foreign, setup};
use tokio::process::Command;

use crate::foreign_client;
use crate::gateway::Gateway;

const QUESTION: &str = "What is the capital of Japan?";

/// What the agent is told before the question.
const INSTRUCTIONS: &str = "You answer in one sentence.";

fn example(name: &str) -> PathBuf {
    setup::root().join("examples").join(name)
}

/// The fleet's answer to a chat of roles and texts, as the examples ask for it.
async fn asked(fleet: &Fleet, chat: &[(&str, &str)]) -> Result<String> {
    let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    let messages: Vec<Value> = chat.iter().map(message).collect();
    Ok(fleet.ask(&json!({"messages": messages, "max_tokens": 64})).await?.text)
}

#[tokio::test]
async fn every_example_prints_what_the_fleet_answers() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let folder = tempfile::tempdir()?;
    let (url, model) = (fleet.processes.url().to_owned(), fleet.model.as_str());
    let call = Call::new(["gateway", "--broker", &url]);
    let gateway = Gateway::start(call, &folder.path().join("log")).await?;
    gateway.lists(model).await?;
    let answer = asked(&fleet, &[("user", QUESTION)]).await?;
    ensure!(answer.contains("Tokyo"), "{answer}");
    let line = format!("{answer}\n");
    let of_agent = asked(&fleet, &[("system", INSTRUCTIONS), ("user", QUESTION)]).await?;

    for (name, address, expected) in [
        ("ask.py", &url, &line),
        ("cloud_events.py", &url, &line),
        ("openai_sdk.py", &gateway.base_url, &line),
        ("langchain_chat.py", &gateway.base_url, &line),
        ("agents_sdk.py", &gateway.base_url, &format!("{of_agent}\n")),
    ] {
        let found = foreign_client::run(&example(name), &[QUESTION, model, address]).await?;
        ensure!(found == *expected, "{name} prints {found:?} instead of {expected:?}");
    }
    let args = [QUESTION, model, url.as_str()];
    let found = foreign_client::output_of(Command::new(setup::example("ask")?).args(args)).await?;
    ensure!(found == line, "ask.rs prints {found:?} instead of {line:?}");
    let (node, project) = foreign::node(&example("typescript"), "ask.ts").await?;
    let mut typescript = Command::new(node);
    typescript.current_dir(project).arg("ask.ts").args(args);
    let found = foreign_client::output_of(&mut typescript).await?;
    ensure!(found == line, "ask.ts prints {found:?} instead of {line:?}");

    let mut curl = Command::new("sh");
    curl.arg(example("ask.sh")).args([model, &gateway.base_url]);
    let found = streamed(&foreign_client::output_of(&mut curl).await?)?;
    ensure!(found == answer, "ask.sh gives {found:?} instead of {answer:?}");
    jobs(&fleet, &answer).await?;
    fleet.idle().await?;
    gateway.end().await?;
    fleet.end().await
}

/// The text of a stream of server-sent events.
fn streamed(events: &str) -> Result<String> {
    let mut text = String::new();
    let mut data = events.lines().filter_map(|line| line.strip_prefix("data: "));
    ensure!(data.next_back() == Some("[DONE]"), "{events}");
    for chunk in data {
        let chunk: Value = serde_json::from_str(chunk)?;
        text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    Ok(text)
}

/// The queue: started again with one prompt more, the program asks for that one only.
async fn jobs(fleet: &Fleet, answer: &str) -> Result<()> {
    const ANOTHER: &str = "Name a colour.";
    let another = asked(fleet, &[("user", ANOTHER)]).await?;
    let (model, url) = (fleet.model.as_str(), fleet.processes.url());
    for (prompts, known) in
        [(&[QUESTION][..], &[false][..]), (&[QUESTION, ANOTHER][..], &[true, false][..])]
    {
        let args = [&[model, url][..], prompts].concat();
        let out = foreign_client::run(&example("jobs.py"), &args).await?;
        let lines: Vec<Value> = out.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        ensure!(lines.len() == prompts.len(), "{out}");
        for ((line, &prompt), &known) in lines.iter().zip(prompts).zip(known) {
            let expected: &str = if prompt == QUESTION { answer } else { &another };
            ensure!(line["prompt"] == prompt && line["known"] == known, "{line:#}");
            ensure!(line["answer"] == expected, "{line:#} instead of {expected:?}");
        }
    }
    Ok(())
}

#[test]
fn the_tests_run_the_versions_that_the_examples_ask_for() -> Result<()> {
    let read =
        |path: PathBuf| fs::read_to_string(&path).with_context(|| path.display().to_string());
    let asked = read(example("requirements.txt"))?;
    let tested = read(setup::root().join("tests").join("clients").join("requirements.txt"))?;
    for line in asked.lines().filter(|line| !line.starts_with('#')) {
        ensure!(tested.lines().any(|pinned| pinned == line), "{line} is not tested");
    }
    Ok(())
}
