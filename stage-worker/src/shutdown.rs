//! The wish to end, from signals and from the parent process.

use std::convert::Infallible;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Time that running sessions get when the parent is gone: their coordinator is most likely gone
/// with it, and a step under way ends within this.
const PARENT_GRACE: Duration = Duration::from_millis(500);

/// How a process is asked to end, in two degrees.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Take nothing new, finish what runs, then end.
    pub drain: CancellationToken,
    /// End now.
    pub stop: CancellationToken,
}

impl Shutdown {
    /// Nobody has asked yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `work` and turns signals into wishes meanwhile: the first one drains, the second one
    /// stops; `work` then ends by itself.
    ///
    /// # Errors
    /// The system refuses to pass signals on.
    pub async fn with_signals<T>(&self, work: impl Future<Output = T>) -> std::io::Result<T> {
        let mut signals = Signals::new()?;
        tokio::pin!(work);
        loop {
            tokio::select! {
                outcome = &mut work => return Ok(outcome),
                () = signals.next() => {
                    if self.drain.is_cancelled() {
                        self.stop.cancel();
                    }
                    self.drain.cancel();
                }
            }
        }
    }

    /// Runs `work` and watches standard input meanwhile: its end means that the parent process is
    /// gone. Then what runs gets a short grace, whatever the configured time to drain.
    ///
    /// # Errors
    /// The system has no thread to watch standard input.
    pub async fn with_parent<T>(&self, work: impl Future<Output = T>) -> std::io::Result<T> {
        let gone = CancellationToken::new();
        watch_stdin(gone.clone())?;
        let leave = async {
            gone.cancelled().await;
            self.drain.cancel();
            tokio::time::sleep(PARENT_GRACE).await;
            self.stop.cancel();
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            outcome = work => Ok(outcome),
            never = leave => match never {},
        }
    }
}

/// A lone token asks for the gentler end.
impl From<CancellationToken> for Shutdown {
    fn from(drain: CancellationToken) -> Self {
        Self { drain, stop: CancellationToken::new() }
    }
}

/// Cancels `gone` at the end of standard input. The thread blocks in a read that nothing can
/// interrupt, so it is never joined and ends with the process.
fn watch_stdin(gone: CancellationToken) -> std::io::Result<()> {
    let read_to_end = move || {
        // An input that cannot be read has ended too.
        drop(std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()));
        gone.cancel();
    };
    std::thread::Builder::new().name("parent-watch".to_owned()).spawn(read_to_end).map(drop)
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
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
    brk: tokio::signal::windows::CtrlBreak,
    close: tokio::signal::windows::CtrlClose,
}

#[cfg(windows)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close};
        Ok(Self { interrupt: ctrl_c()?, brk: ctrl_break()?, close: ctrl_close()? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.brk.recv() => {}
            _ = self.close.recv() => {}
        }
    }
}
