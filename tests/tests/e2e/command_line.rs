//! The commands as a user sees them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::{shard_sets, turn};

const QUESTION: &str = "What is the capital of Japan?";

#[tokio::test]
async fn ask_local_answers_with_one_json_object() -> Result<()> {
    let _turn = turn::take().await;
    let ended = Call::new(["ask", "--local", "--json", "--profile", "exact", "--shards"])
        .arg(shard_sets::get(2).await?)
        .arg(QUESTION)
        .run()
        .await?
        .success()?;
    let answer = ended.json()?;
    let tokens: Vec<u32> = serde_json::from_value(answer["tokens"].clone())?;
    ensure!(tokens == crate::prompts::cases()?[0].output_ids, "{answer:#}");
    ensure!(answer["text"].as_str().is_some_and(|text| text.contains("Tokyo")), "{answer:#}");
    ensure!(answer["stages"] == 2 && answer["finish_reason"] == "stop", "{answer:#}");
    for figure in ["tok_s", "ttft_ms"] {
        ensure!(answer[figure].as_f64().is_some_and(|n| n > 0.0), "{figure} in {answer:#}");
    }
    Ok(())
}

#[tokio::test]
async fn ask_and_status_find_the_fleet_and_its_model() -> Result<()> {
    let fleet = Fleet::start(2, |spec| spec.workers_per_stage = 2).await?;
    let url = fleet.processes.url().to_owned();
    let ask = Call::new(["ask", "--broker", &url, QUESTION]).run().await?.success()?;
    ensure!(ask.stdout().contains("Tokyo") && ask.stdout().ends_with('\n'), "{}", ask.report());
    let raw = ["ask", "--broker", &url, "--raw", "--json", "--max-tokens", "3", "The capital of"];
    let raw = Call::new(raw).run().await?.success()?.json()?;
    ensure!(raw["finish_reason"] == "length" && raw["usage"]["completion_tokens"] == 3, "{raw:#}");
    let refused = Call::new(["ask", "--broker", &url, "--tokens", "1,60000"]).run().await?;
    refused.failure(&["tokens[1] is 60000", "invalid_request"])?;

    let status =
        Call::new(["status", "--json", "--broker", &url]).run().await?.success()?.json()?;
    let model = &status["models"][0];
    ensure!(status["served"] == true && model["model"] == fleet.model.as_str(), "{status:#}");
    let stages: Vec<&Value> =
        model["workers"].as_array().into_iter().flatten().map(|worker| &worker["stage"]).collect();
    ensure!(stages == [0, 0, 1, 1], "{status:#}");
    ensure!(model["coordinators"].as_array().is_some_and(|all| all.len() == 1), "{status:#}");
    let table = Call::new(["status", "--broker", &url]).run().await?.success()?.stdout();
    ensure!(table.contains(&format!("{}: served, 2 stages", fleet.model)), "{table}");
    fleet.end().await
}

#[tokio::test]
async fn shard_describes_what_it_wrote() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("set");
    let call = Call::new(["shard", "--json", "--split", "16,14", "--name", "smol", "--out"]);
    let call = call.arg(&out).arg(stagebus_tests::setup::model()?);
    let report = call.clone().run().await?.success()?.json()?;
    let layers: Vec<[&Value; 2]> = report["stages"]
        .as_array()
        .context("stages")?
        .iter()
        .map(|stage| [&stage["first_layer"], &stage["end_layer"]])
        .collect();
    ensure!(layers == [[0, 16], [16, 30]] && report["model"] == "smol", "{report:#}");
    ensure!(report["weights"] == "exact", "{report:#}");
    call.clone().run().await?.failure(&["is a shard set already"])?;
    let again = call.arg("--force").run().await?.success()?.json()?;
    ensure!(again["fingerprint"] == report["fingerprint"], "{again:#}");
    let files = std::fs::read_dir(folder.path())?.count();
    ensure!(files == 1, "{files} entries beside the shard set");
    Ok(())
}

#[cfg(target_os = "linux")]
mod processes {
    //! Who is left when the parent ends. Linux only: the system tells who is whose child.

    use std::fs;

    use anyhow::Context;
    use stagebus_tests::program::signal;
    use stagebus_tests::wait;
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::TcpStream;
    use tokio::process::{Child, Command};

    use super::{Call, Fleet, QUESTION, Result, Value, ensure, shard_sets, turn};

    /// State and parent of a process; `None` when it is gone.
    fn state(pid: u32) -> Option<(char, u32)> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The program's name stands in parentheses and may hold anything.
        let (_, rest) = text.rsplit_once(')')?;
        let mut words = rest.split_whitespace();
        Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
    }

    /// All children of a process and theirs.
    fn descendants(pid: u32) -> Result<Vec<u32>> {
        let mut all = vec![pid];
        let mut looked_at = 0;
        let running: Vec<u32> = fs::read_dir("/proc")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        while let Some(&parent) = all.get(looked_at) {
            looked_at += 1;
            all.extend(
                running
                    .iter()
                    .copied()
                    .filter(|&child| state(child).is_some_and(|(_, of)| of == parent)),
            );
        }
        Ok(all.split_off(1))
    }

    async fn gone(pids: &[u32]) -> Result<()> {
        wait::until("all children are gone", async || {
            // One that nobody has waited for yet is gone, too.
            Ok(pids
                .iter()
                .all(|&pid| state(pid).is_none_or(|(state, _)| state == 'Z'))
                .then_some(()))
        })
        .await
    }

    /// Starts `stagebus up` and waits until it is ready.
    async fn up() -> Result<(Child, Value)> {
        let free = ["--broker-port", "0", "--gateway", "127.0.0.1:0"];
        let call = Call::new(["up", "--json", "--quiet"]).args(&free).arg("--shards");
        let mut up = call.arg(shard_sets::get(2).await?).start()?;
        let mut line = String::new();
        let out = up.stdout.take().context("a standard output")?;
        BufReader::new(out).read_line(&mut line).await?;
        let ready: Value = serde_json::from_str(&line).with_context(|| format!("{line:?}"))?;
        ensure!(ready["ready"] == true && ready["stages"] == 2, "{ready:#}");
        Ok((up, ready))
    }

    #[tokio::test]
    async fn ctrl_c_ends_up_and_all_its_children() -> Result<()> {
        let _turn = turn::take().await;
        let (mut up, ready) = up().await?;
        let children = descendants(up.id().context("it runs")?)?;
        // Two workers, a coordinator, a gateway and the broker; the broker's watcher has a child of
        // its own.
        ensure!(children.len() >= 5, "{children:?}");
        for member in ready["members"].as_array().into_iter().flatten() {
            let pid = u32::try_from(member["pid"].as_u64().context("a process id")?)?;
            ensure!(children.contains(&pid), "{member} is not among {children:?}");
        }
        let url = ready["broker"].as_str().context("an address")?;
        let ask = Call::new(["ask", "--broker", url, QUESTION]).run().await?.success()?;
        ensure!(ask.stdout().contains("Tokyo"), "{}", ask.report());
        let api = ready["gateway"].as_str().context("an API")?;
        let address = api.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/v1"));
        let mut page = TcpStream::connect(address.context("an address")?).await?;
        page.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n").await?;
        let mut text = String::new();
        page.read_to_string(&mut text).await?;
        ensure!(text.contains("<title>Stagebus</title>"), "{text}");

        signal("INT", &up).await?;
        let status = tokio::time::timeout(wait::PATIENCE, up.wait()).await??;
        ensure!(status.success(), "{status}");
        gone(&children).await
    }

    #[tokio::test]
    async fn a_killed_up_leaves_no_children() -> Result<()> {
        let _turn = turn::take().await;
        let (mut up, _) = up().await?;
        let children = descendants(up.id().context("it runs")?)?;
        ensure!(children.len() >= 4, "{children:?}");
        up.kill().await?;
        gone(&children).await
    }

    #[tokio::test]
    async fn a_part_that_dies_ends_up_with_a_failure() -> Result<()> {
        let _turn = turn::take().await;
        let (mut up, ready) = up().await?;
        let children = descendants(up.id().context("it runs")?)?;
        let pid = ready["members"][0]["pid"].as_u64().context("a process id")?;
        let killed = Command::new("sh").args(["-c", &format!("kill -KILL {pid}")]).status().await?;
        ensure!(killed.success());
        let status = tokio::time::timeout(wait::PATIENCE, up.wait()).await??;
        ensure!(status.code() == Some(1), "{status}");
        gone(&children).await
    }

    #[tokio::test]
    async fn ctrl_c_of_ask_frees_the_session() -> Result<()> {
        let fleet = Fleet::start(2, |_| {}).await?;
        let url = fleet.processes.url().to_owned();
        let args = ["ask", "--json", "--raw", "--max-tokens", "4000", "--broker", &url];
        let mut ask = Call::new(args).arg("1, 2, 3, 4, 5, 6, 7, 8, 9, 10,").start()?;
        wait::until("the session generates", async || {
            let load = fleet.load(&fleet.workers(1)[0]).await?;
            Ok((load.n_sessions == 1 && load.kv_tokens > 30).then_some(()))
        })
        .await?;
        signal("INT", &ask).await?;
        let status = tokio::time::timeout(wait::PATIENCE, ask.wait()).await??;
        ensure!(status.code() == Some(1), "{status}");
        fleet.idle().await?;
        fleet.end().await
    }
}
