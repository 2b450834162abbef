//! A program that is measured: a child process that generates when it is told to.
//!
//! The child prints one line of JSON when it is ready, [`Ready`]. Then it reads lines from standard
//! input, each with a number of tokens, generates that many for its prompt, greedily and from an
//! empty cache, and prints one line of JSON, [`Turn`]. It leaves when its standard input ends.
//! Others take orders of their own form, see [`Contender::order`].
//! Contenders stay loaded between turns, so their turns can be interleaved.

use std::ffi::OsString;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::harness::machine;

/// How much of a failed child's standard error is shown, in bytes.
const SHOWN_ERROR_BYTES: u64 = 4096;

/// What a contender says when it is ready.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// True; false if it cannot work here, and `error` says why.
    pub ready: bool,
    /// Versions of what it runs on.
    #[serde(default)]
    pub version: String,
    /// Time to load the model, in milliseconds.
    #[serde(default)]
    pub load_ms: f64,
    /// Why it is not ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// From the start to the first token (prefill), in milliseconds.
    pub first_token_ms: f64,
    /// From each token to the next, in milliseconds: one fewer than tokens.
    pub token_ms: Vec<f64>,
}

/// One generation as seen from outside.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    /// What the child reports.
    pub turn: Turn,
    /// From the request to the answer, in milliseconds.
    pub wall_ms: f64,
    /// Processor time of all threads, in milliseconds, if the platform tells.
    pub cpu_ms: Option<f64>,
}

/// How to start a contender.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Name in tables and errors.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The core that it is tied to.
    pub cpu: Option<usize>,
}

impl Launch {
    /// The command, tied to its core by `taskset`, which replaces itself by the program: the
    /// child's id is the program's.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = match self.cpu {
            None => Command::new(&self.program),
            Some(cpu) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &cpu.to_string()]).arg(&self.program);
                command
            }
        };
        command.args(&self.args).kill_on_drop(true);
        command
    }
}

/// A running contender; killed when dropped.
#[derive(Debug)]
pub struct Contender {
    name: String,
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    errors: std::fs::File,
    ready: Ready,
}

impl Contender {
    /// Starts a contender and waits until it is ready.
    ///
    /// # Errors
    /// A program that does not start, and what it says if it is not ready.
    pub async fn start(launch: &Launch) -> anyhow::Result<Self> {
        let name = launch.name.clone();
        let errors = tempfile::tempfile().context("cannot create a temporary file")?;
        let mut child = launch
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone().context("cannot share a temporary file")?)
            .spawn()
            .with_context(|| format!("cannot start {name} with {}", launch.program.display()))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            anyhow::bail!("{name} has no pipes");
        };
        let stdout = BufReader::new(stdout).lines();
        let ready = Ready { ready: false, version: String::new(), load_ms: 0.0, error: None };
        let mut contender = Self { name, child, stdin, stdout, errors, ready };
        let ready: Ready = contender.read().await?;
        if let Some(error) = &ready.error {
            anyhow::bail!("{} is not ready: {error}", contender.name);
        }
        anyhow::ensure!(ready.ready, "{} is not ready and does not say why", contender.name);
        contender.ready = ready;
        Ok(contender)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it said when it was ready.
    #[must_use]
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// The most memory that it has used so far, in bytes, if the platform tells.
    #[must_use]
    pub fn peak_rss_bytes(&self) -> Option<u64> {
        stagebus_fleet::peak_rss_bytes(self.child.id()?).ok()
    }

    /// Lets it generate `n_tokens` tokens.
    ///
    /// # Errors
    /// A child that has died, and an answer of another form or length.
    pub async fn turn(&mut self, n_tokens: usize) -> anyhow::Result<Timed> {
        let pid = self.child.id();
        let cpu_before = pid.and_then(machine::cpu_ms);
        let started = Instant::now();
        let turn: Turn = self.order(&n_tokens.to_string()).await?;
        let wall_ms = started.elapsed().as_secs_f64() * 1e3;
        let cpu_after = pid.and_then(machine::cpu_ms);
        let (found, gaps) = (turn.tokens.len(), turn.token_ms.len());
        anyhow::ensure!(
            found == n_tokens && gaps + 1 == n_tokens,
            "{} gave {found} tokens and {gaps} times, {n_tokens} tokens were asked for",
            self.name
        );
        let cpu_ms = cpu_before.zip(cpu_after).map(|(before, after)| after - before);
        Ok(Timed { turn, wall_ms, cpu_ms })
    }

    /// Sends a line and reads the line that answers it.
    ///
    /// # Errors
    /// A child that has died, and an answer of another form.
    pub async fn order<T: for<'de> Deserialize<'de>>(&mut self, order: &str) -> anyhow::Result<T> {
        let line = format!("{order}\n");
        let sent = async {
            self.stdin.write_all(line.as_bytes()).await?;
            self.stdin.flush().await
        };
        sent.await.with_context(|| format!("{} is gone: {}", self.name, self.last_errors()))?;
        self.read().await
    }

    async fn read<T: for<'de> Deserialize<'de>>(&mut self) -> anyhow::Result<T> {
        let line = self.stdout.next_line().await.context("cannot read from a child")?;
        let Some(line) = line else {
            let status = self.child.wait().await.context("cannot wait for a child")?;
            anyhow::bail!("{} ended by itself ({status}): {}", self.name, self.last_errors());
        };
        serde_json::from_str(&line)
            .with_context(|| format!("{} wrote something else than its answer: {line}", self.name))
    }

    /// The end of what it wrote to standard error.
    fn last_errors(&self) -> String {
        let mut text = Vec::new();
        let mut file = &self.errors;
        let bytes = file.metadata().map_or(0, |data| data.len());
        let start = SeekFrom::Start(bytes.saturating_sub(SHOWN_ERROR_BYTES));
        if file.seek(start).and_then(|_| file.read_to_end(&mut text)).is_err() {
            return "its messages cannot be read".to_owned();
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    }
}

/// Looks for a program in the folders of `PATH`.
#[must_use]
pub fn on_path(name: &str) -> Option<PathBuf> {
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    stagebus_settings::environment::program_folders()
        .iter()
        .map(|folder| folder.join(&file))
        .find(|path| Path::is_file(path))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Launch {
        let args = vec!["-c".into(), script.into()];
        Launch { name: "shell".to_owned(), program: "sh".into(), args, cpu: None }
    }

    #[tokio::test]
    async fn a_contender_takes_its_turns() {
        let script = r#"echo '{"ready":true,"version":"1"}'
            read n; echo '{"tokens":[5,6],"first_token_ms":3,"token_ms":[1.5]}'
            read n; echo '{"tokens":[5],"first_token_ms":3,"token_ms":[]}'"#;
        let mut contender = Contender::start(&shell(script)).await.expect("starts");
        assert_eq!(contender.ready().version, "1");
        let timed = contender.turn(2).await.expect("a turn");
        assert_eq!((timed.turn.tokens, timed.turn.token_ms), (vec![5, 6], vec![1.5]));
        let error = contender.turn(2).await.expect_err("one token is missing");
        assert!(error.to_string().contains("gave 1 tokens"), "{error}");
    }

    #[tokio::test]
    async fn a_contender_that_dies_is_quoted() {
        let error = Contender::start(&shell("echo broken >&2; exit 3")).await.expect_err("dies");
        let text = error.to_string();
        assert!(text.contains("broken") && text.contains('3'), "{text}");
    }

    #[tokio::test]
    async fn a_contender_that_cannot_work_says_why() {
        let script = r#"echo '{"ready":false,"error":"no module"}'"#;
        let error = Contender::start(&shell(script)).await.expect_err("not ready");
        assert_eq!(error.to_string(), "shell is not ready: no module");
    }
}
