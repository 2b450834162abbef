//! A broker that was not started by a fleet.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::wait;

/// A `nats-server`; killed when dropped.
#[derive(Debug)]
pub struct PlainBroker {
    url: String,
    server: Child,
    _folder: TempDir,
}

impl PlainBroker {
    /// Starts it with its own defaults, so without JetStream, on a free port of the loopback
    /// interface.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start() -> Result<Self> {
        Self::launch(None).await
    }

    /// The same with a configuration file.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_with(configuration: &Path) -> Result<Self> {
        Self::launch(Some(configuration)).await
    }

    /// Ends it without a warning.
    ///
    /// # Errors
    /// The system refuses.
    pub async fn kill(mut self) -> Result<()> {
        Ok(self.server.kill().await?)
    }

    async fn launch(configuration: Option<&Path>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let server = stagebus_settings::find_nats_server()?;
        let mut command = Command::new(std::path::absolute(server)?);
        command.current_dir(folder.path());
        if let Some(configuration) = configuration {
            command.arg("-c").arg(configuration);
        }
        command.args(["-a", "127.0.0.1", "-p", "-1", "--ports_file_dir"]).arg(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = command.kill_on_drop(true).spawn().context("nats-server starts")?;
        let file = format!("nats-server_{}.ports", server.id().unwrap_or_default());
        let url = wait::until("the broker names its port", async || {
            ensure!(server.try_wait()?.is_none(), "nats-server ended at its start");
            Ok(address(&folder.path().join(&file)))
        })
        .await?;
        Ok(Self { url, server, _folder: folder })
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
