//! The system's wish that the process ends: Ctrl-C, and on Unix the termination signal.

use std::io;

use tokio_util::sync::CancellationToken;

/// Runs `work` and cancels `shutdown` at the first signal; `work` ends by itself then. Later
/// signals change nothing: every wait after that has a bound.
///
/// # Errors
/// The system's reason why signals cannot be watched.
pub(crate) async fn run_until_signalled<T>(
    shutdown: &CancellationToken,
    work: impl Future<Output = T>,
) -> io::Result<T> {
    let mut signals = Signals::watch()?;
    tokio::pin!(work);
    loop {
        tokio::select! {
            outcome = &mut work => return Ok(outcome),
            () = signals.next() => shutdown.cancel(),
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

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(windows)]
struct Signals {
    interrupt: tokio::signal::windows::CtrlC,
    close: tokio::signal::windows::CtrlClose,
}

#[cfg(windows)]
impl Signals {
    fn watch() -> io::Result<Self> {
        use tokio::signal::windows::{ctrl_c, ctrl_close};
        Ok(Self { interrupt: ctrl_c()?, close: ctrl_close()? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.close.recv() => {}
        }
    }
}
