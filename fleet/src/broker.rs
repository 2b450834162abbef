//! A private broker: a real `nats-server`, on a loopback port unless it has keys.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use stagebus_keys::KeyFolder;
use tempfile::TempDir;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::error::FleetError;
use crate::output::LogSink;
use crate::process::{Launch, Process, Stopped};

/// The development configuration, so that private brokers have the documented limits.
const CONFIGURATION: &str = include_str!("../../nats.conf");

/// The line of the configuration that says where jobs are kept; a private broker has its own place.
const STORE_DIR: &str = "store_dir: \"jetstream\"";

/// How often to look for the file with the ports. The server writes it once, within some 20 ms.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How a private broker is started.
#[derive(Debug, Clone)]
pub struct BrokerOptions {
    /// The `nats-server` program; found by [`stagebus_settings::find_nats_server`] when absent.
    pub server: Option<PathBuf>,
    /// A fixed port; a free one is chosen when absent.
    pub port: Option<u16>,
    /// Address to listen on; one that other machines reach needs `keys`.
    pub listen: IpAddr,
    /// Folder of keys: the broker speaks TLS and lets in only who has one of them. No credentials
    /// when absent.
    pub keys: Option<PathBuf>,
    /// Processors to run on, in the form of `taskset`.
    pub cpus: Option<String>,
    /// Where its log goes.
    pub log: LogSink,
    /// Folder for durable jobs and their results; one that ends with the broker when absent. With
    /// keys they are kept beside the broker's own.
    pub store_dir: Option<PathBuf>,
    /// How long it may take to start, and to leave.
    pub patience: Duration,
}

impl Default for BrokerOptions {
    fn default() -> Self {
        Self {
            server: None,
            port: None,
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            keys: None,
            cpus: None,
            log: LogSink::default(),
            store_dir: None,
            patience: Duration::from_secs(10),
        }
    }
}

/// A running private broker; killed when dropped.
#[derive(Debug)]
pub struct LocalBroker {
    options: BrokerOptions,
    /// The keys' folder for the broker, absolute.
    secured: Option<PathBuf>,
    server: PathBuf,
    /// Holds the configuration and the file with the ports; removed with the broker.
    folder: TempDir,
    port: u16,
    running: Option<Running>,
}

/// The server, and the watcher that ends it when this process is gone.
#[derive(Debug)]
struct Running {
    watcher: Process,
    server: Process,
}

impl LocalBroker {
    /// Starts a broker on a port and waits until it accepts connections.
    ///
    /// # Errors
    /// [`FleetError::Insecure`] for an address that other machines reach without keys,
    /// [`FleetError::Keys`], [`FleetError::Runtime`] without a `nats-server`, [`FleetError::Spawn`], and
    /// [`FleetError::Exited`] or [`FleetError::NotReady`] with its last lines.
    pub async fn start(options: BrokerOptions) -> Result<Self, FleetError> {
        if !options.listen.is_loopback() && options.keys.is_none() {
            return Err(FleetError::Insecure { listen: options.listen });
        }
        let server = match &options.server {
            Some(server) => server.clone(),
            None => stagebus_settings::find_nats_server()?,
        };
        let folder = TempDir::with_prefix("stagebus-broker-")
            .map_err(|source| FleetError::File { path: std::env::temp_dir(), source })?;
        let store = options.store_dir.clone().unwrap_or_else(|| folder.path().join("jetstream"));
        let configuration = folder.path().join("nats.conf");
        fs::write(&configuration, configured(&store)?)
            .map_err(|source| FleetError::File { path: configuration, source })?;
        let secured = match &options.keys {
            None => None,
            Some(keys) => Some(absolute(&KeyFolder::open(keys)?.broker())?),
        };
        let mut broker = Self { port: 0, options, secured, server, folder, running: None };
        broker.launch(broker.options.port).await?;
        Ok(broker)
    }

    /// The address for clients.
    #[must_use]
    pub fn url(&self) -> String {
        let (listen, port) = (self.options.listen, self.port);
        let address = SocketAddr::new(listen, port);
        match &self.secured {
            None => format!("nats://{address}"),
            // The certificate names this machine, and what the keys were made for.
            Some(_) if listen.is_loopback() || listen.is_unspecified() => {
                format!("tls://localhost:{port}")
            }
            Some(_) => format!("tls://{address}"),
        }
    }

    /// The port that clients connect to; the same after a restart.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server's process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().and_then(|running| running.server.pid())
    }

    /// The end of the server's log.
    #[must_use]
    pub fn last_lines(&self) -> String {
        self.running.as_ref().map_or_else(String::new, |running| running.server.last_lines())
    }

    /// Kills the server without a warning, as a crash would.
    ///
    /// # Errors
    /// [`FleetError::Stop`] if the system refuses.
    pub async fn kill(&mut self) -> Result<(), FleetError> {
        match self.running.take() {
            None => Ok(()),
            Some(mut running) => {
                running.server.kill().await?;
                running.watcher.kill().await
            }
        }
    }

    /// Starts the server again on the same port, after killing it if it runs.
    ///
    /// # Errors
    /// As [`LocalBroker::start`].
    pub async fn restart(&mut self) -> Result<(), FleetError> {
        self.kill().await?;
        self.launch(Some(self.port)).await
    }

    /// Ends the server in an orderly way; kills it after the patience of the options. Returns
    /// whether it left by itself.
    ///
    /// # Errors
    /// [`FleetError::Stop`] if the system refuses.
    pub async fn stop(&mut self) -> Result<bool, FleetError> {
        let Some(mut running) = self.running.take() else { return Ok(true) };
        // The watcher ends the server when its own standard input closes.
        running.watcher.ask_to_leave();
        let deadline = Instant::now() + self.options.patience;
        let stopped = running.server.leave(deadline).await?;
        running.watcher.leave(deadline).await?;
        Ok(stopped != Stopped::Killed)
    }

    /// Waits until the server ends by itself; for ever if it does not run.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn ended(&mut self) -> Result<std::process::ExitStatus, FleetError> {
        match &mut self.running {
            Some(running) => running.server.wait().await,
            None => std::future::pending().await,
        }
    }

    /// The end of the log of a server that has ended.
    pub(crate) async fn final_lines(&mut self) -> String {
        match &mut self.running {
            Some(running) => running.server.final_lines().await,
            None => String::new(),
        }
    }

    async fn launch(&mut self, port: Option<u16>) -> Result<(), FleetError> {
        let folder = self.folder.path();
        let configuration = self.secured.as_deref().unwrap_or(folder).join("nats.conf");
        let listen = self.options.listen.to_string();
        let mut args: Vec<OsString> = vec!["-c".into(), configuration.into()];
        args.extend(["-a".into(), listen.into(), "-p".into()]);
        args.push(port.map_or_else(|| "-1".to_owned(), |port| port.to_string()).into());
        args.extend(["--ports_file_dir".into(), folder.into()]);
        let launch = Launch {
            name: "broker".to_owned(),
            program: absolute(&self.server)?,
            args,
            // Its certificate and users are named relative to their folder.
            folder: self.secured.clone(),
            cpus: self.options.cpus.clone(),
        };
        let mut server = Process::spawn(launch, self.options.log.clone())?;
        let watcher = watcher(server.pid().unwrap_or_default())?;
        self.port = wait_for_port(&mut server, folder, self.options.patience).await?;
        self.running = Some(Running { watcher, server });
        Ok(())
    }
}

/// A path that means the same in every folder; a program without one is looked up as it is.
fn absolute(path: &Path) -> Result<PathBuf, FleetError> {
    if path.components().count() == 1 {
        return Ok(path.to_owned());
    }
    std::path::absolute(path).map_err(|source| FleetError::File { path: path.to_owned(), source })
}

/// The development configuration with another folder for jobs.
fn configured(store: &Path) -> Result<String, FleetError> {
    let absolute = std::path::absolute(store)
        .map_err(|source| FleetError::File { path: store.to_owned(), source })?;
    // The server takes slashes on every system, and a backslash would be an escape.
    let place = absolute.display().to_string().replace('\\', "/").replace('"', "\\\"");
    Ok(CONFIGURATION.replace(STORE_DIR, &format!("store_dir: \"{place}\"")))
}

/// Waits for the file that the server writes when it listens, and reads the port from it.
async fn wait_for_port(
    server: &mut Process,
    folder: &Path,
    patience: Duration,
) -> Result<u16, FleetError> {
    // The name holds the process id, so a file of an earlier server is not taken for this one's.
    let file = folder.join(format!("nats-server_{}.ports", server.pid().unwrap_or_default()));
    let deadline = tokio::time::sleep(patience);
    tokio::pin!(deadline);
    let mut ticks = interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            status = server.wait() => {
                let status = status?;
                return Err(server.exited(status).await);
            }
            () = &mut deadline => {
                return Err(FleetError::NotReady {
                    name: server.name().to_owned(),
                    waited: patience,
                    last_lines: server.last_lines(),
                });
            }
            _ = ticks.tick() => {
                // Absent or written in part: look again.
                if let Some(port) = fs::read_to_string(&file).ok().as_deref().and_then(port) {
                    return Ok(port);
                }
            }
        }
    }
}

/// The port in `{"nats":["nats://127.0.0.1:4222"]}`.
fn port(text: &str) -> Option<u16> {
    let value: Value = serde_json::from_str(text).ok()?;
    value["nats"][0].as_str()?.rsplit(':').next()?.parse().ok()
}

/// Starts a process that waits for the end of its standard input and then asks the process `pid`
/// to end. It outlives this process by that moment only.
fn watcher(pid: u32) -> Result<Process, FleetError> {
    let (program, args): (&str, Vec<OsString>) = if cfg!(windows) {
        let script = format!("more >NUL & taskkill /F /PID {pid} >NUL 2>NUL");
        ("cmd", vec!["/C".into(), script.into()])
    } else {
        let script = format!("cat >/dev/null; kill {pid} 2>/dev/null");
        ("sh", vec!["-c".into(), script.into()])
    };
    let launch = Launch {
        name: "watcher".to_owned(),
        program: program.into(),
        args,
        folder: None,
        cpus: None,
    };
    Process::spawn(launch, LogSink::Quiet)
}

#[cfg(test)]
mod tests {
    use stagebus_keys::Plan;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    /// Connects and reads the greeting, in which the server states its limits.
    async fn greeting(port: u16) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        stream.write_all(b"PING\r\n").await.ok()?;
        let mut buffer = vec![0; 4096];
        let n_read = stream.read(&mut buffer).await.ok()?;
        let text = String::from_utf8_lossy(&buffer[..n_read]);
        serde_json::from_str(text.strip_prefix("INFO ")?.lines().next()?).ok()
    }

    #[tokio::test]
    async fn a_broker_starts_with_the_documented_limits_and_stops() {
        let mut broker = LocalBroker::start(BrokerOptions::default()).await.expect("starts");
        let info = greeting(broker.port()).await.expect("greets");
        assert_eq!(info["max_payload"], 8 * 1024 * 1024);
        assert_eq!(info["host"], "127.0.0.1");
        assert_eq!(info["jetstream"], true);
        assert!(broker.folder.path().join("jetstream").is_dir(), "its jobs are elsewhere");
        assert!(broker.stop().await.expect("stops"), "it had to be killed");
        assert!(greeting(broker.port()).await.is_none());
        assert_eq!(broker.pid(), None);
    }

    #[tokio::test]
    async fn a_broker_comes_back_on_its_port_after_a_crash() {
        let mut broker = LocalBroker::start(BrokerOptions::default()).await.expect("starts");
        let (port, pid) = (broker.port(), broker.pid());
        broker.kill().await.expect("dies");
        assert!(greeting(port).await.is_none());
        broker.restart().await.expect("restarts");
        assert_eq!(broker.port(), port);
        assert_ne!(broker.pid(), pid);
        assert!(greeting(port).await.is_some());
        broker.restart().await.expect("restarts while it runs");
        assert!(greeting(port).await.is_some());
        broker.stop().await.expect("stops");
    }

    #[tokio::test]
    async fn a_taken_port_is_reported_with_the_servers_words() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = taken.local_addr().expect("an address").port();
        let options = BrokerOptions { port: Some(port), ..BrokerOptions::default() };
        match LocalBroker::start(options).await {
            Err(FleetError::Exited { name, last_lines, .. }) => {
                assert_eq!(name, "broker");
                assert!(last_lines.contains(&port.to_string()), "{last_lines}");
            }
            other => panic!("unexpected {other:?}"),
        }
    }

    #[tokio::test]
    async fn without_keys_nobody_else_reaches_a_broker() {
        for listen in ["0.0.0.0", "192.0.2.1", "::"] {
            let listen = listen.parse().expect("an address");
            // A program that does not exist: it is refused before anything is started.
            let server = Some("no-such-server".into());
            let options = BrokerOptions { listen, server, ..Default::default() };
            let error = LocalBroker::start(options).await.expect_err("refused");
            assert!(matches!(error, FleetError::Insecure { listen: l } if l == listen), "{error}");
        }
    }

    #[tokio::test]
    async fn a_broker_with_keys_speaks_tls_and_asks_for_one() {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let keys = parent.path().join("keys");
        let models = vec!["m-1".parse().expect("a name")];
        KeyFolder::create(&keys, &Plan { models, results: false, hosts: Vec::new() })
            .expect("keys");
        let options = BrokerOptions { keys: Some(keys), ..Default::default() };
        let mut broker = LocalBroker::start(options).await.expect("starts");
        assert_eq!(broker.url(), format!("tls://localhost:{}", broker.port()));
        let info = greeting(broker.port()).await.expect("greets");
        assert_eq!(info["tls_required"], true);
        assert_eq!(info["auth_required"], true);
        assert_eq!(info["max_payload"], 8 * 1024 * 1024);
        broker.stop().await.expect("stops");
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let options = BrokerOptions { server: Some("no-such-server".into()), ..Default::default() };
        assert!(matches!(LocalBroker::start(options).await,
            Err(FleetError::Spawn { program, .. }) if program == Path::new("no-such-server")));
    }

    #[tokio::test]
    async fn the_watcher_ends_the_server_when_its_pipe_closes() {
        let mut broker = LocalBroker::start(BrokerOptions::default()).await.expect("starts");
        let running = broker.running.as_mut().expect("running");
        // What the system does when the parent dies.
        running.watcher.ask_to_leave();
        running.server.wait().await.expect("ends");
        assert!(greeting(broker.port()).await.is_none());
    }

    #[test]
    fn the_port_is_read_from_the_file() {
        assert_eq!(port(r#"{"nats":["nats://127.0.0.1:4222"]}"#), Some(4222));
        assert_eq!(port(r#"{"nats":["nats"#), None);
    }
}
