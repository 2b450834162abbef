//! The gateway's page in a real browser, in front of a real fleet.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::{browser, setup};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Longest wait for a word of the script: it starts a browser and waits for answers.
const PATIENCE: Duration = Duration::from_secs(180);

/// The script that drives the browser, and the way to talk with it.
struct Script {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Script {
    /// Starts it on a page; pictures go to a folder.
    async fn start(page: &str, pictures: &Path) -> Result<Self> {
        let folder = browser::folder().await?;
        // Its packages are found beside it.
        let script = folder.join("page.mjs");
        std::fs::copy(setup::root().join("tests").join("browser").join("page.mjs"), &script)?;
        // The browser is unpacked here, so that no other version is taken for it.
        let unpacked = folder.join("unpacked");
        std::fs::create_dir_all(&unpacked)?;
        let mut process = Command::new("node")
            .arg(script)
            .arg(page)
            .arg(pictures)
            .env("TMPDIR", unpacked)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot run node")?;
        let input = process.stdin.take().context("no standard input")?;
        let output = process.stdout.take().context("no standard output")?;
        Ok(Self { process, input, output: BufReader::new(output).lines() })
    }

    /// Waits for its next word; what it found wrong is on standard error.
    async fn says(&mut self, what: &str) -> Result<()> {
        let line = tokio::time::timeout(PATIENCE, self.output.next_line()).await??;
        let line = line.with_context(|| format!("it ended before it said {what}"))?;
        let said: Value = serde_json::from_str(&line)?;
        ensure!(said["seen"] == what, "{line} in the place of {what}");
        Ok(())
    }

    /// Tells it that something happens now.
    async fn tell(&mut self) -> Result<()> {
        let at = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
        let line = format!("{}\n", json!({ "at": u64::try_from(at)? }));
        Ok(self.input.write_all(line.as_bytes()).await?)
    }

    async fn end(mut self) -> Result<()> {
        let status = tokio::time::timeout(PATIENCE, self.process.wait()).await??;
        ensure!(status.success(), "the script ended with {status}");
        Ok(())
    }
}

#[tokio::test]
async fn the_page_works_in_a_browser() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| spec.gateway = Some(([127, 0, 0, 1], 0).into())).await?;
    let api = fleet.processes.gateway().context("no gateway")?;
    let page = api.trim_end_matches("v1").to_owned();
    let pictures = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&pictures)?;
    let mut script = Script::start(&page, &pictures).await?;

    script.says("shown").await?;
    let worker = fleet.workers(1).remove(0);
    script.tell().await?;
    fleet.processes.kill(&worker.name).await?;
    script.says("gone").await?;
    fleet.processes.add_worker(1).await?;
    script.tell().await?;
    script.says("back").await?;
    script.end().await?;
    fleet.end().await
}
