//! `stagebus top`, as lines and on a terminal.

use anyhow::{Result, ensure};
use serde_json::Value;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;

use crate::prompts;

/// A fleet that needs no OpenVINO and takes its time.
async fn toy_fleet() -> Result<Fleet> {
    Fleet::start(2, |spec| {
        let toy = ["worker.engine=test", "worker.test.run_us=2000", "coordinator.draft=off"];
        spec.settings.extend(toy.map(str::to_owned));
    })
    .await
}

#[tokio::test]
async fn each_look_is_one_line_with_rates() -> Result<()> {
    let fleet = toy_fleet().await?;
    let (answer, stream) = fleet.begin(&prompts::endless(), 1).await?;
    let options = ["top", "--json", "--count", "3", "--interval", "0.6", "--broker"];
    let ended = Call::new(options).arg(fleet.processes.url()).run().await?.success()?;
    fleet.cancel(&answer).await?;
    let looks: Vec<Value> =
        ended.stdout().lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(looks.len() == 3, "{}", ended.report());
    let last = &looks[2];
    let model = &last["models"][0];
    ensure!(last["connected"] == true && last["round_trip_ms"].is_f64(), "{last:#}");
    ensure!(model["served"] == true && model["sessions"] == 1, "{last:#}");
    ensure!(model["tok_s"].as_f64().is_some_and(|rate| rate > 0.0), "{last:#}");
    let workers = model["workers"].as_array().map_or(&[][..], Vec::as_slice);
    let busy = |worker: &Value| worker["steps_s"].as_f64().is_some_and(|rate| rate > 0.0);
    ensure!(workers.len() == 2 && workers.iter().all(busy), "{last:#}");
    drop(stream);
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn without_a_terminal_it_says_what_to_do() -> Result<()> {
    let ended = Call::new(["top", "--broker", "nats://127.0.0.1:1"]).run().await?;
    ensure!(ended.code() == Some(2), "{}", ended.report());
    ended.failure(&["--json", "terminal"])?;
    Ok(())
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_screen_shows_the_fleet_and_is_given_back() -> Result<()> {
    use stagebus_tests::terminal::Terminal;

    let fleet = toy_fleet().await?;
    let call = Call::new(["top", "--interval", "0.2", "--broker"]).arg(fleet.processes.url());
    let mut terminal = Terminal::new(call.start_on_terminal(Some((40, 120)))?)?;
    // Cells that were empty before are not written, so single words are looked for.
    terminal.shows("leaves,").await?;
    terminal.shows("served,").await?;
    terminal.press("q").await?;
    let last = terminal.ends().await?;
    ensure!(last.contains("\x1b[?1049l"), "the other screen is not left: {last:?}");
    fleet.end().await
}
