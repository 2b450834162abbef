//! Starts a private nats-server on a free port of the loopback interface.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A running nats-server.
pub(crate) struct Broker {
    child: Child,
    folder: TempDir,
    port: u16,
    config: Option<PathBuf>,
}

impl Broker {
    /// Starts a broker with the default configuration.
    pub(crate) fn start() -> Self {
        Self::launch(tempfile::tempdir().expect("a temporary folder"), None)
    }

    /// Starts a broker with a configuration text; `{}` stands for a folder that holds `files`.
    pub(crate) fn start_with(config: &str, files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).expect("the folder is writable");
        }
        let path = folder.path().join("test.conf");
        let place = folder.path().display().to_string().replace('\\', "/");
        std::fs::write(&path, config.replace("{}", &place)).expect("the folder is writable");
        Self::launch(folder, Some(path))
    }

    fn launch(folder: TempDir, config: Option<PathBuf>) -> Self {
        let child = spawn(folder.path(), "-1", config.as_deref());
        let mut broker = Self { child, folder, port: 0, config };
        broker.port = broker.wait_for_port();
        broker
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// Ends the broker without giving it a chance to say goodbye.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the broker runs");
        self.child.wait().expect("the broker ends");
    }

    /// Starts the broker again on the same port.
    pub(crate) fn restart(&mut self) {
        let port = self.port.to_string();
        self.child = spawn(self.folder.path(), &port, self.config.as_deref());
        assert_eq!(self.wait_for_port(), self.port);
    }

    /// Waits for the file in which the broker names its ports.
    fn wait_for_port(&mut self) -> u16 {
        let file = self.folder.path().join(format!("nats-server_{}.ports", self.child.id()));
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            // The file may be half-written; then it does not parse and is read again.
            let port = std::fs::read(&file)
                .ok()
                .and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok())
                .and_then(|ports| {
                    let url = ports["nats"][0].as_str()?;
                    url.rsplit_once(':')?.1.parse().ok()
                });
            if let Some(port) = port {
                return port;
            }
            let ended = self.child.try_wait().expect("the child is ours");
            assert!(ended.is_none(), "nats-server ended at start: {ended:?}");
            assert!(Instant::now() < deadline, "nats-server named no port");
            std::thread::yield_now();
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // The test may have killed it already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn spawn(folder: &Path, port: &str, config: Option<&Path>) -> Child {
    let mut command = Command::new(program());
    command.args(["-a", "127.0.0.1", "-p", port, "--ports_file_dir"]).arg(folder);
    if let Some(config) = config {
        command.arg("-c").arg(config);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("nats-server starts")
}

#[expect(clippy::disallowed_methods, reason = "a test is told by the environment what to run")]
fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("STAGEBUS_NATS_SERVER") {
        return path.into();
    }
    let name = format!("nats-server{}", std::env::consts::EXE_SUFFIX);
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join(".runtime").join("bin").join(&name))
        .find(|path| path.is_file())
        .expect("no nats-server: run cargo xtask setup, or set STAGEBUS_NATS_SERVER")
}
