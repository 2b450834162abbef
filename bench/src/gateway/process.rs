//! A gateway as a child process, as a user starts it.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::harness::machine;

/// Longest wait for its start or its end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Requests beside the open streams.
const SPARE: u16 = 16;

/// A running gateway; killed when dropped.
pub(super) struct GatewayProcess {
    child: Child,
    pid: u32,
    address: SocketAddr,
}

impl GatewayProcess {
    /// Starts one on a free port, with room for so many open streams.
    pub(super) async fn start(broker: &str, n_streams: u16) -> anyhow::Result<Self> {
        let room = format!("gateway.max_requests={}", n_streams.saturating_add(SPARE));
        let mut command = Command::new(machine::this_program()?);
        command.args(["gateway", "--listen", "127.0.0.1:0", "--broker", broker]);
        command.args(["--exit-with-parent", "--set", "log.level=warn", "--set", &room]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("the gateway cannot be started")?;
        let stdout = child.stdout.take().context("the gateway has no standard output")?;
        let (mut stdout, mut line) = (BufReader::new(stdout), String::new());
        let ready = tokio::time::timeout(PATIENCE, stdout.read_line(&mut line));
        ready.await.context("the gateway does not get ready")??;
        let ready: Value = serde_json::from_str(&line).context("the gateway did not start")?;
        let address = ready["listen"].as_str().context("the gateway does not tell its address")?;
        let address = address.parse().context("the gateway's address cannot be read")?;
        let pid = child.id().context("the gateway has ended")?;
        Ok(Self { child, pid, address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Its resident memory, where the system tells it.
    pub(super) fn resident_mb(&self) -> Option<f64> {
        Some(stagebus_fleet::rss_bytes(self.pid).ok()? as f64 / 1e6)
    }

    /// Ends it in order.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        let status = ended.context("the gateway does not end")??;
        anyhow::ensure!(status.success(), "the gateway ended with {status}");
        Ok(())
    }
}
