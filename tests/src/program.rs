//! Running `stagebus` as a user does, to its end or in the background.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stagebus_settings::environment;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use crate::setup;

/// Longest time for one command: some start fleets and generate hundreds of tokens.
const PATIENCE: Duration = Duration::from_secs(240);

/// Exit code of a Rust program that panicked.
const PANIC_EXIT: i32 = 101;

/// A call of `stagebus`.
#[derive(Debug, Clone)]
pub struct Call {
    args: Vec<OsString>,
    env: Vec<(&'static str, OsString)>,
    input: Option<String>,
    patience: Duration,
}

/// A call that has ended.
#[derive(Debug)]
pub struct Ended {
    call: String,
    output: Output,
}

impl Call {
    /// A call with these arguments.
    #[must_use]
    pub fn new<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        Self {
            args: args.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            input: None,
            patience: PATIENCE,
        }
    }

    /// Lets it take another time than four minutes.
    #[must_use]
    pub fn within(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString> + Clone>(mut self, args: &[A]) -> Self {
        self.args.extend(args.iter().cloned().map(Into::into));
        self
    }

    /// Sets an environment variable. Those of the caller that Stagebus reads are not passed on.
    #[must_use]
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// Gives it a standard input of this text; it has none otherwise.
    #[must_use]
    pub fn input(mut self, text: impl Into<String>) -> Self {
        self.input = Some(text.into());
        self
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// It does not start, or does not end in time (it is killed then).
    pub async fn run(mut self) -> Result<Ended> {
        let (call, patience, input) = (self.shown(), self.patience, self.input.take());
        let mut command = self.command()?;
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().with_context(|| format!("cannot run `{call}`"))?;
        let stdin = child.stdin.take();
        let feed = async {
            if let (Some(mut stdin), Some(input)) = (stdin, input) {
                // One that has read enough closes its end.
                drop(stdin.write_all(input.as_bytes()).await);
            }
        };
        let run = async { tokio::join!(feed, child.wait_with_output()).1 };
        let output = tokio::time::timeout(patience, run)
            .await
            .with_context(|| format!("`{call}` did not end within {patience:?}"))?
            .with_context(|| format!("cannot run `{call}`"))?;
        Ok(Ended { call, output })
    }

    /// Starts it with a standard output to read from; killed when dropped.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(self) -> Result<Child> {
        self.start_with(Stdio::null())
    }

    /// The same with a standard input.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_with(self, input: impl Into<Stdio>) -> Result<Child> {
        let call = self.shown();
        self.command()?
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run `{call}`"))
    }

    /// Starts it on a terminal of its own, whose keys are the child's standard input and whose screen
    /// is its standard output; killed when dropped. The program `script` makes the terminal,
    /// with so many rows and columns; `None` leaves it without any.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_on_terminal(self, size: Option<(u16, u16)>) -> Result<Child> {
        let call = self.shown();
        let inner = self.command()?;
        let inner = inner.as_std();
        let words = std::iter::once(inner.get_program()).chain(inner.get_args());
        let quoted = |word: &OsStr| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"));
        let words: Vec<String> = words.map(quoted).collect();
        // A shell that waited for the program would hear its Ctrl-C too, and some end with it.
        let run = format!("exec {}", words.join(" "));
        let line = match size {
            Some((rows, columns)) => format!("stty rows {rows} columns {columns}; {run}"),
            None => run,
        };
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => script.env(name, value),
                None => script.env_remove(name),
            };
        }
        script
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run `{call}` in `script`"))
    }

    /// As [`Call::start`], with what it writes to standard error in a file.
    ///
    /// # Errors
    /// It does not start, or the file cannot be made.
    pub fn start_logged(self, log: &Path) -> Result<Child> {
        let call = self.shown();
        let file = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
        self.command()?
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot run `{call}`"))
    }

    fn shown(&self) -> String {
        let words = self.args.iter().map(|arg| arg.to_string_lossy());
        std::iter::once("stagebus".into()).chain(words).collect::<Vec<_>>().join(" ")
    }

    fn command(self) -> Result<Command> {
        let mut command = Command::new(setup::program()?);
        for (name, _) in environment::variables() {
            command.env_remove(name);
        }
        command.env(environment::RUNTIME_DIR, setup::runtime_dir()?);
        // Parts that the user has named instead of the pinned ones.
        if let Some(library) = environment::openvino() {
            command.env(environment::OPENVINO, library);
        }
        if let Some(server) = environment::nats_server() {
            command.env(environment::NATS_SERVER, server);
        }
        command.args(self.args).envs(self.env).stdin(Stdio::null()).kill_on_drop(true);
        Ok(command)
    }
}

/// Sends a running child the signal of this name, such as `INT`.
///
/// # Errors
/// It has ended already, or the system refuses.
pub async fn signal(name: &str, process: &Child) -> Result<()> {
    let pid = process.id().context("it has ended already")?;
    let status = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().await?;
    ensure!(status.success(), "kill -{name} {pid}");
    Ok(())
}

impl Ended {
    /// Standard output.
    #[must_use]
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    /// Standard error.
    #[must_use]
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// The exit code; `None` after a signal.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.output.status.code()
    }

    /// Checks that it succeeded.
    ///
    /// # Errors
    /// It did not; with everything that it wrote.
    pub fn success(self) -> Result<Self> {
        ensure!(self.output.status.success(), "expected success\n{}", self.report());
        Ok(self)
    }

    /// Checks that it failed in an orderly way, and that its message has all `parts`.
    ///
    /// # Errors
    /// It succeeded, panicked, was killed, or a part is missing; with everything that it wrote.
    pub fn failure(self, parts: &[&str]) -> Result<Self> {
        let stderr = self.stderr();
        match self.code() {
            None | Some(0 | PANIC_EXIT) => bail!("expected an orderly failure\n{}", self.report()),
            Some(_) => {}
        }
        ensure!(!stderr.contains("panicked at"), "there was a panic\n{}", self.report());
        for part in parts {
            ensure!(stderr.contains(part), "{part:?} is not in the message\n{}", self.report());
        }
        Ok(self)
    }

    /// The JSON object on standard output.
    ///
    /// # Errors
    /// There is none, or something else beside it.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.output.stdout)
            .with_context(|| format!("expected one JSON value\n{}", self.report()))
    }

    /// The JSON object in the last line of standard output.
    ///
    /// # Errors
    /// There is none.
    pub fn last_json(&self) -> Result<Value> {
        let stdout = self.stdout();
        serde_json::from_str(stdout.lines().next_back().unwrap_or_default())
            .with_context(|| format!("expected a JSON value last\n{}", self.report()))
    }

    /// Everything about it, for a failed test.
    #[must_use]
    pub fn report(&self) -> String {
        format!(
            "command: {}\nstatus: {}\nstandard output:\n{}\nstandard error:\n{}",
            self.call,
            self.output.status,
            self.stdout(),
            self.stderr()
        )
    }
}
