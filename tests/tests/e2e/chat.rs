//! Conversations, from a pipe and on a terminal.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::{shard_sets, turn};

/// Rules out the token that ends answers.
const ENDLESS: [&str; 4] = ["--logit-bias", "2=-100", "--max-tokens", "4000"];

const FIRST: &str = "What is the capital of Japan?";
const SECOND: &str = "And of France?";

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

fn chat(fleet: &Fleet) -> Call {
    Call::new(["chat", "--broker", fleet.processes.url()])
}

fn lines(ended: &stagebus_tests::program::Ended) -> Result<Vec<Value>> {
    let parse = |line: &str| serde_json::from_str(line).with_context(|| ended.report());
    ended.stdout().lines().map(parse).collect()
}

#[tokio::test]
async fn each_turn_knows_those_before_it() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("chat.json");
    let input = format!("{FIRST}\n\n{SECOND}\n/save {}\n/stats\n", file.display());
    let call = chat(&fleet).args(&["--json", "--max-tokens", "24"]).input(input);
    let ended = call.run().await?.success()?;
    let shown = lines(&ended)?;
    let [first, second, stats] = shown.as_slice() else {
        anyhow::bail!("expected two answers and the stats\n{}", ended.report());
    };
    let said = [
        message("user", FIRST),
        message("assistant", first["text"].as_str().context("a text")?),
        message("user", SECOND),
    ];
    let alone = fleet.ask(&json!({ "messages": [said[0]], "max_tokens": 24 })).await?;
    let after = fleet.ask(&json!({ "messages": said, "max_tokens": 24 })).await?;
    ensure!(first["tokens"] == json!(alone.tokens), "{first:#}");
    ensure!(second["tokens"] == json!(after.tokens), "{second:#}");

    let saved: Vec<Value> = serde_json::from_slice(&std::fs::read(&file)?)?;
    let answer = message("assistant", second["text"].as_str().context("a text")?);
    ensure!(saved[..3] == said && saved[3..] == [answer], "{saved:#?}");
    let stats = &stats["stats"];
    let last = &stats["last"]["completion_tokens"];
    ensure!(stats["answers"] == 2 && *last == second["usage"]["completion_tokens"], "{stats:#}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_conversation_is_forgotten_and_its_system_message_changed() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let input = format!("{FIRST}\n/reset\n/system Answer in French.\n{SECOND}\n");
    let options = ["--json", "--system", "You are a pirate.", "--max-tokens", "16"];
    let ended = chat(&fleet).args(&options).input(input).run().await?.success()?;
    let answers = lines(&ended)?;
    let requests =
        [["You are a pirate.", FIRST], ["Answer in French.", SECOND]].map(|[system, said]| {
            let messages = [message("system", system), message("user", said)];
            json!({ "messages": messages, "max_tokens": 16 })
        });
    ensure!(answers.len() == requests.len(), "{}", ended.report());
    for (answer, request) in answers.iter().zip(&requests) {
        ensure!(answer["tokens"] == json!(fleet.ask(request).await?.tokens), "{answer:#}");
    }
    fleet.end().await
}

#[tokio::test]
async fn the_first_error_ends_a_conversation_from_a_pipe() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let ended = chat(&fleet).input(format!("/shout {FIRST}\n{FIRST}\n")).run().await?;
    ensure!(ended.stdout().is_empty(), "{}", ended.report());
    ended.failure(&["/shout", "/help"])?;
    let ended = chat(&fleet).args(&["--top-p", "1.5"]).input(FIRST).run().await?;
    ended.failure(&["top_p is 1.5", "invalid_request"])?;
    fleet.end().await
}

#[tokio::test]
async fn a_private_fleet_lasts_for_the_conversation() -> Result<()> {
    let _turn = turn::take().await;
    let ended = Call::new(["chat", "--local", "--profile", "exact", "--shards"])
        .arg(shard_sets::get(2).await?)
        .input(format!("{FIRST}\n{FIRST}\n"))
        .run()
        .await?
        .success()?;
    let n_answers = ended.stdout().matches("Tokyo").count();
    ensure!(n_answers >= 2 && ended.stdout().ends_with('\n'), "{}", ended.report());
    Ok(())
}

#[cfg(target_os = "linux")]
mod terminal {
    //! Linux only: its program `script` makes the terminal, and signals come from `kill`.

    use std::os::unix::fs::PermissionsExt as _;

    use stagebus_tests::program::signal;
    use stagebus_tests::terminal::Terminal;
    use stagebus_tests::wait;

    use super::{Call, ENDLESS, FIRST, Fleet, Result, chat, ensure};

    /// What the line editor writes each time that it begins to take keys: before that, Ctrl-C and
    /// Ctrl-D mean what they mean to the terminal.
    const TAKES_KEYS: &str = "\x1b[?2004h";

    async fn generates(fleet: &Fleet) -> Result<()> {
        wait::until("the session generates", async || {
            let load = fleet.load(&fleet.workers(1)[0]).await?;
            Ok((load.n_sessions == 1 && load.steps_completed > 5).then_some(()))
        })
        .await
    }

    #[tokio::test]
    async fn ctrl_c_cancels_the_answer_and_ctrl_d_leaves() -> Result<()> {
        let fleet = Fleet::start(2, |_| {}).await?;
        let data = tempfile::tempdir()?;
        let call: Call = chat(&fleet).args(&ENDLESS).env("XDG_DATA_HOME", data.path());
        let mut terminal = Terminal::new(call.start_on_terminal(None)?)?;
        terminal.shows(TAKES_KEYS).await?;
        terminal.press("Count for ever.\r").await?;
        generates(&fleet).await?;
        terminal.press("\x03").await?;
        fleet.idle().await?;
        terminal.shows(TAKES_KEYS).await?;
        // At the prompt it takes back the line only.
        terminal.press("never sent\x03").await?;
        terminal.shows(TAKES_KEYS).await?;
        terminal.press("/stats\r").await?;
        terminal.shows("conversation: 1 answers").await?;
        terminal.shows(TAKES_KEYS).await?;
        terminal.press("\x04").await?;
        terminal.ends().await?;

        let history = data.path().join("stagebus").join("chat-history");
        let text = std::fs::read_to_string(&history)?;
        ensure!(text.contains("Count for ever.") && !text.contains("never sent"), "{text}");
        let mode = std::fs::metadata(&history)?.permissions().mode();
        ensure!(mode & 0o077 == 0, "others can read the history: {mode:o}");
        fleet.end().await
    }

    #[tokio::test]
    async fn ctrl_c_ends_a_conversation_from_a_pipe_and_frees_the_session() -> Result<()> {
        let fleet = Fleet::start(2, |_| {}).await?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("questions.txt");
        std::fs::write(&file, format!("Count for ever.\n{FIRST}\n"))?;
        let mut child = chat(&fleet).args(&ENDLESS).start_with(std::fs::File::open(&file)?)?;
        generates(&fleet).await?;
        signal("INT", &child).await?;
        let status = tokio::time::timeout(wait::PATIENCE, child.wait()).await??;
        ensure!(status.code() == Some(1), "{status}");
        fleet.idle().await?;
        fleet.end().await
    }
}
