//! The wish to stop: Ctrl-C, and on Unix the termination signal.

use std::io;

use tokio_util::sync::CancellationToken;

/// Runs `work` and cancels `stop` when the user or the system asks the program to end; `work` then
/// ends by itself. Later signals change nothing: every wait after `stop` has a bound.
///
/// # Errors
/// What the system says when signals cannot be watched, else none of its own.
pub async fn run_until_stopped<T>(
    stop: &CancellationToken,
    work: impl Future<Output = T>,
) -> io::Result<T> {
    let mut signals = Signals::watch()?;
    tokio::pin!(work);
    loop {
        tokio::select! {
            result = &mut work => return Ok(result),
            () = signals.next() => stop.cancel(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_ends_by_itself_is_not_stopped() {
        let stop = CancellationToken::new();
        let done = run_until_stopped(&stop, async { 7 }).await.expect("signals can be watched");
        assert_eq!((done, stop.is_cancelled()), (7, false));
    }
}
