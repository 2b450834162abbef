//! What every process does around its work: signals, the parent's end, the ready line.

use std::io::{self, Write as _};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

/// Prints the one line of JSON on standard output by which a process says that it is ready.
///
/// # Errors
/// Whoever started the process has closed the pipe.
pub fn print_ready<T: Serialize>(ready: &T) -> io::Result<()> {
    let line = serde_json::to_string(ready)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Cancels `gone` at the end of standard input, which comes when the parent process ends.
///
/// The thread blocks in a read that nothing can interrupt, so it is never joined and ends with the
/// process.
///
/// # Errors
/// The system has no thread left.
pub fn watch_parent(gone: CancellationToken) -> io::Result<()> {
    let read_to_end = move || {
        // An input that cannot be read has ended too.
        drop(io::copy(&mut io::stdin().lock(), &mut io::sink()));
        gone.cancel();
    };
    std::thread::Builder::new().name("parent-watch".to_owned()).spawn(read_to_end).map(drop)
}

/// A wish of user or system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// The termination signal on Unix, Ctrl-Break and a closed console on Windows.
    Terminate,
}

/// Runs `work` to its end and calls `on_signal` at each wish of user or system that the process
/// ends, or that what it does ends.
///
/// # Errors
/// The system does not pass signals on.
pub async fn with_signals<T>(
    work: impl Future<Output = T>,
    mut on_signal: impl FnMut(Signal),
) -> io::Result<T> {
    let mut signals = Signals::watch()?;
    tokio::pin!(work);
    loop {
        tokio::select! {
            outcome = &mut work => return Ok(outcome),
            signal = signals.next() => on_signal(signal),
        }
    }
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn watch() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.terminate.recv() => Signal::Terminate,
        }
    }
}

/// Not run here: written by the documentation of `tokio::signal::windows`.
#[cfg(windows)]
struct Signals {
    interrupt: tokio::signal::windows::CtrlC,
    brk: tokio::signal::windows::CtrlBreak,
    close: tokio::signal::windows::CtrlClose,
}

#[cfg(windows)]
impl Signals {
    fn watch() -> io::Result<Self> {
        use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close};
        Ok(Self { interrupt: ctrl_c()?, brk: ctrl_break()?, close: ctrl_close()? })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.brk.recv() => Signal::Terminate,
            _ = self.close.recv() => Signal::Terminate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_ends_by_itself_meets_no_signal() {
        let mut n_signals = 0;
        let done = with_signals(async { 7 }, |_| n_signals += 1).await.expect("signals");
        assert_eq!((done, n_signals), (7, 0));
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_signal_reaches_the_work_through_its_token() {
        let stop = CancellationToken::new();
        let work = async {
            let me = std::process::id().to_string();
            let kill = std::process::Command::new("kill").args(["-TERM", &me]).status();
            assert!(kill.expect("kill").success());
            stop.cancelled().await;
        };
        let mut heard = Vec::new();
        with_signals(work, |signal| {
            heard.push(signal);
            stop.cancel();
        })
        .await
        .expect("signals");
        assert_eq!(heard, [Signal::Terminate]);
    }
}
