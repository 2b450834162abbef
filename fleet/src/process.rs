//! One child process: start, readiness, orderly end.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::BufReader;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::error::FleetError;
use crate::output::{LogSink, Tail, forward, next_line};

/// How to start a child.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// Name in logs and errors.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Folder to run in; this process's own when absent.
    pub folder: Option<PathBuf>,
    /// Processors to run on, in the form of `taskset`, for example `0` or `0,2-3`.
    pub cpus: Option<String>,
}

/// A running child. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<BufReader<ChildStdout>>,
    tail: Tail,
    sink: LogSink,
    /// The tasks that pass on the child's output. They end with the child's pipes.
    readers: TaskTracker,
}

/// How a child was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// It left by itself, with this status.
    Left(ExitStatus),
    /// It was still there at the deadline and was killed.
    Killed,
}

impl Process {
    /// Starts a child with pipes on all three streams.
    pub(crate) fn spawn(launch: Launch, sink: LogSink) -> Result<Self, FleetError> {
        let Launch { name, program, args, folder, cpus } = launch;
        let mut command = match cpus {
            None => Command::new(&program),
            Some(cpus) if cfg!(target_os = "linux") => {
                // taskset replaces itself by the program, so the child's id and handle are the
                // program's.
                let mut command = Command::new("taskset");
                command.args(["-c", &cpus]).arg(&program);
                command
            }
            Some(_) => return Err(FleetError::PinUnsupported),
        };
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
        own_group(&mut command);
        let mut child = command.spawn().map_err(|source| FleetError::Spawn {
            name: name.clone(),
            program,
            source,
        })?;
        let readers = TaskTracker::new();
        let tail = Tail::default();
        if let Some(stderr) = child.stderr.take() {
            readers.spawn(forward(stderr, name.clone(), tail.clone(), sink.clone()));
        }
        readers.close();
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().map(BufReader::new);
        Ok(Self { name, child, stdin, stdout, tail, sink, readers })
    }

    /// Waits for the line that says the child is ready and returns it; later lines on standard
    /// output join the log.
    pub(crate) async fn ready(&mut self, deadline: Instant) -> Result<Value, FleetError> {
        let started = Instant::now();
        let Some(mut stdout) = self.stdout.take() else {
            return Err(FleetError::Readiness { name: self.name.clone(), line: String::new() });
        };
        let Ok(line) = tokio::time::timeout_at(deadline, next_line(&mut stdout)).await else {
            return Err(FleetError::NotReady {
                name: self.name.clone(),
                waited: started.elapsed(),
                last_lines: self.tail.text(),
            });
        };
        let Some(line) = line else { return Err(self.ended_early(deadline).await) };
        let value = serde_json::from_str::<Value>(&line).unwrap_or_default();
        if value["ready"] != Value::Bool(true) {
            return Err(FleetError::Readiness { name: self.name.clone(), line });
        }
        let (name, tail, sink) = (self.name.clone(), self.tail.clone(), self.sink.clone());
        self.readers.spawn(forward(stdout, name, tail, sink));
        Ok(value)
    }

    /// The error for a child that closed its standard output without a word.
    async fn ended_early(&mut self, deadline: Instant) -> FleetError {
        let started = Instant::now();
        match tokio::time::timeout_at(deadline, self.child.wait()).await {
            Ok(Ok(status)) => self.exited(status).await,
            Ok(Err(source)) => FleetError::Stop { name: self.name.clone(), source },
            Err(_) => FleetError::NotReady {
                name: self.name.clone(),
                waited: started.elapsed(),
                last_lines: self.tail.text(),
            },
        }
    }

    /// The error for a child that ended too early, with its last lines.
    pub(crate) async fn exited(&mut self, status: ExitStatus) -> FleetError {
        let last_lines = self.final_lines().await;
        FleetError::Exited { name: self.name.clone(), status, last_lines }
    }

    /// Waits until the child ends by itself.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is lost, and the standard input stays open.
    pub(crate) async fn wait(&mut self) -> Result<ExitStatus, FleetError> {
        // `Child::wait` would close the standard input, which means leave; it was taken out above.
        let result = self.child.wait().await;
        result.map_err(|source| FleetError::Stop { name: self.name.clone(), source })
    }

    /// Closes the standard input, which tells the child to leave.
    pub(crate) fn ask_to_leave(&mut self) {
        self.stdin = None;
    }

    /// Waits for the child to leave, and kills it at the deadline.
    pub(crate) async fn leave(&mut self, deadline: Instant) -> Result<Stopped, FleetError> {
        let stopped = match tokio::time::timeout_at(deadline, self.wait()).await {
            Ok(status) => Stopped::Left(status?),
            Err(_) => {
                self.kill().await?;
                Stopped::Killed
            }
        };
        self.drain_output().await;
        Ok(stopped)
    }

    /// Kills the child at once and waits for its end.
    pub(crate) async fn kill(&mut self) -> Result<(), FleetError> {
        let result = self.child.kill().await;
        result.map_err(|source| FleetError::Stop { name: self.name.clone(), source })
    }

    /// Sends the child a signal, by its short name.
    #[cfg(unix)]
    pub(crate) async fn signal(&self, signal: &str) -> Result<(), FleetError> {
        let stop = |source| FleetError::Stop { name: self.name.clone(), source };
        let gone = || stop(std::io::Error::from(std::io::ErrorKind::NotFound));
        let pid = self.pid().ok_or_else(gone)?;
        let mut kill = Command::new("kill");
        kill.arg(format!("-{signal}")).arg(pid.to_string()).stdin(Stdio::null());
        match kill.status().await {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(gone()),
            Err(source) => Err(stop(source)),
        }
    }

    /// The child's process id, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The end of the child's log.
    pub(crate) fn last_lines(&self) -> String {
        self.tail.text()
    }

    /// The end of the log of a child that has ended, once all of it has arrived.
    pub(crate) async fn final_lines(&mut self) -> String {
        self.drain_output().await;
        self.tail.text()
    }

    /// The child's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Waits for the rest of the output of a child that has ended. A grandchild may hold the
    /// pipes open, so there is an end to this.
    async fn drain_output(&mut self) {
        const PATIENCE: Duration = Duration::from_millis(500);
        if tokio::time::timeout(PATIENCE, self.readers.wait()).await.is_err() {
            tracing::debug!("a child's output is still open after its end");
        }
    }
}

#[cfg(unix)]
fn own_group(command: &mut Command) {
    command.process_group(0);
}

#[cfg(windows)]
fn own_group(command: &mut Command) {
    /// `CREATE_NEW_PROCESS_GROUP` of the Windows API's process creation flags.
    const CREATE_NEW_PROCESS_GROUP: u32 = 0x0000_0200;
    command.creation_flags(CREATE_NEW_PROCESS_GROUP);
}

#[cfg(not(any(unix, windows)))]
fn own_group(_command: &mut Command) {}
