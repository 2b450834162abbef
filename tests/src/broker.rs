//! A broker that was started without our configuration.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::wait;

/// A `nats-server` with its own defaults, so without JetStream; killed when dropped.
#[derive(Debug)]
pub struct PlainBroker {
    url: String,
    _server: Child,
    _folder: TempDir,
}

impl PlainBroker {
    /// Starts it on a free port of the loopback interface.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let server = stagebus_settings::find_nats_server()?;
        let mut command = Command::new(server);
        command.args(["-a", "127.0.0.1", "-p", "-1", "--ports_file_dir"]).arg(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = command.kill_on_drop(true).spawn().context("nats-server starts")?;
        let file = format!("nats-server_{}.ports", server.id().unwrap_or_default());
        let url = wait::until("the broker names its port", async || {
            ensure!(server.try_wait()?.is_none(), "nats-server ended at its start");
            Ok(address(&folder.path().join(&file)))
        })
        .await?;
        Ok(Self { url, _server: server, _folder: folder })
    }

    /// Its address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// The address in the file; absent while it is being written.
fn address(file: &Path) -> Option<String> {
    let ports: Value = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    Some(ports["nats"].get(0)?.as_str()?.to_owned())
}
