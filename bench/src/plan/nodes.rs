//! Nodes and a plan as child processes, as a user starts them.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use stagebus_fleet::{BrokerOptions, LocalBroker};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::LayoutKind;
use crate::harness::machine;
use crate::link::Link;
use crate::node_fleet::cpu_list;

/// Longest wait for a node's start or end.
const PATIENCE: Duration = Duration::from_secs(60);

/// What names of nodes start with; the rest is the node's place in the list of cores.
const NAME: &str = "node-";

/// Nodes that can be asked, and their broker.
pub(super) struct Nodes {
    nodes: Vec<Child>,
    /// The cores of the nodes; empty where processes cannot be tied.
    cpus: Vec<usize>,
    links: Vec<Link>,
    broker: LocalBroker,
}

/// What was planned.
#[derive(Debug)]
pub(super) struct Chosen {
    /// Layers of each stage.
    pub(super) split: Vec<usize>,
    /// The core of each stage; empty where processes cannot be tied.
    pub(super) cpus: Vec<usize>,
    /// Predicted time per token, in milliseconds.
    pub(super) token_ms: f64,
    /// What it is made of.
    pub(super) parts: Value,
}

impl Nodes {
    /// Starts a broker and the nodes of a layout.
    pub(super) async fn start(
        model: &Path,
        cache: &Path,
        layout: LayoutKind,
        cpus: &[usize],
    ) -> anyhow::Result<Self> {
        let options = BrokerOptions {
            cpus: (!cpus.is_empty()).then(|| cpu_list(cpus)),
            ..BrokerOptions::default()
        };
        let broker = LocalBroker::start(options).await.context("the broker did not start")?;
        let (nodes, links) = (Vec::new(), Vec::new());
        let mut all = Self { nodes, cpus: cpus.to_vec(), links, broker };
        for at in 0..layout.n_nodes {
            let url = match layout.link() {
                None => all.broker.url(),
                Some(plan) => {
                    let link =
                        Link::to_broker(&all.broker.url(), plan).context("cannot open a link")?;
                    let url = link.url();
                    all.links.push(link);
                    url
                }
            };
            all.nodes.push(all.node(at, model, cache, &url).await?);
        }
        Ok(all)
    }

    async fn node(
        &self,
        at: usize,
        model: &Path,
        cache: &Path,
        url: &str,
    ) -> anyhow::Result<Child> {
        let program = machine::this_program()?;
        let mut command = match self.cpus.get(at % self.cpus.len().max(1)) {
            None => Command::new(program),
            Some(cpu) => {
                // taskset replaces itself by the program.
                let mut command = Command::new("taskset");
                command.args(["-c", &cpu.to_string()]).arg(program);
                command
            }
        };
        command.args(["node", "--devices", "CPU", "--name", &format!("{NAME}{at}")]);
        command.args(["--broker", url, "--exit-with-parent", "--model"]).arg(model);
        command.arg("--cache").arg(cache);
        command.args(["--set", "worker.threads=1", "--set", "worker.profile=fast"]);
        command.args(["--set", "log.level=warn"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("a node cannot be started")?;
        let stdout = child.stdout.take().context("a node has no standard output")?;
        let (mut stdout, mut line) = (BufReader::new(stdout), String::new());
        let ready = tokio::time::timeout(PATIENCE, stdout.read_line(&mut line));
        ready.await.context("a node does not get ready")??;
        let ready: Value = serde_json::from_str(&line).context("a node did not start")?;
        anyhow::ensure!(ready["ready"] == true, "a node is not ready: {ready}");
        Ok(child)
    }

    /// Makes a plan with a stage on every node.
    pub(super) async fn plan(
        &self,
        model: &Path,
        cache: &Path,
        context: usize,
    ) -> anyhow::Result<Chosen> {
        let n_nodes = self.nodes.len().to_string();
        let output = Command::new(machine::this_program()?)
            .args(["--quiet", "plan", "--json", "--broker", &self.broker.url()])
            .args(["--nodes", &n_nodes, "--stages", &n_nodes])
            .args(["--context", &context.to_string(), "--cache"])
            .arg(cache)
            .arg(model)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot start the planner")?;
        anyhow::ensure!(
            output.status.success(),
            "no plan: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let plan: Value =
            serde_json::from_slice(&output.stdout).context("the plan cannot be read")?;
        chosen(&plan["chosen"], &self.cpus)
    }

    /// Ends nodes and broker in order.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        for mut node in self.nodes.drain(..) {
            drop(node.stdin.take());
            let ended = tokio::time::timeout(PATIENCE, node.wait()).await;
            let status = ended.context("a node does not end")??;
            anyhow::ensure!(status.success(), "a node ended with {status}");
        }
        anyhow::ensure!(self.broker.stop().await?, "the broker had to be killed");
        Ok(())
    }
}

fn chosen(layout: &Value, cpus: &[usize]) -> anyhow::Result<Chosen> {
    let stages = layout["stages"].as_array().context("the plan has no stages")?;
    let place = |stage: &Value| -> anyhow::Result<usize> {
        let name = stage["node"].as_str().context("a stage has no node")?;
        let at = name.strip_prefix(NAME).with_context(|| format!("{name} is no node of ours"))?;
        Ok(at.parse()?)
    };
    let places = stages.iter().map(place).collect::<anyhow::Result<Vec<_>>>()?;
    let core = |at: &usize| cpus.get(at % cpus.len().max(1)).copied();
    Ok(Chosen {
        split: serde_json::from_value(layout["split"].clone()).context("no split")?,
        cpus: places.iter().filter_map(core).collect(),
        token_ms: layout["token_ms"].as_f64().context("the plan predicts nothing")?,
        parts: layout["parts"].clone(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stages_run_on_the_cores_of_their_nodes() {
        let layout = json!({
            "stages": [{"node": "node-1"}, {"node": "node-0"}],
            "split": [16, 14],
            "token_ms": 12.5,
            "parts": {"links_ms": 0.5},
        });
        let found = chosen(&layout, &[7, 6]).expect("a plan");
        assert_eq!((found.split, found.cpus), (vec![16, 14], vec![6, 7]));
        assert!((found.token_ms - 12.5).abs() < 1e-9);
        assert!(chosen(&layout, &[]).expect("a plan").cpus.is_empty());
        let strange = json!({"stages": [{"node": "desk"}], "split": [30], "token_ms": 1.0});
        let error = chosen(&strange, &[0]).expect_err("no node of ours");
        assert!(error.to_string().contains("desk"), "{error}");
    }
}
