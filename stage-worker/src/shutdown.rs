//! The wish to end, from signals and from the parent process.

use std::convert::Infallible;
use std::time::Duration;

use stagebus_settings::process;
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

    /// Runs `work` to its end, unless somebody asks for the worker's end before.
    pub(crate) async fn unless_asked<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.drain.cancelled() => None,
            () = self.stop.cancelled() => None,
        }
    }

    /// Runs `work` and turns signals into wishes meanwhile: the first one drains, the second one
    /// stops; `work` then ends by itself.
    ///
    /// # Errors
    /// The system refuses to pass signals on.
    pub async fn with_signals<T>(&self, work: impl Future<Output = T>) -> std::io::Result<T> {
        let on_signal = |_| {
            if self.drain.is_cancelled() {
                self.stop.cancel();
            }
            self.drain.cancel();
        };
        process::with_signals(work, on_signal).await
    }

    /// Runs `work` and watches standard input meanwhile: its end means that the parent process is
    /// gone. Then what runs gets a short grace, whatever the configured time to drain.
    ///
    /// # Errors
    /// The system has no thread to watch standard input.
    pub async fn with_parent<T>(&self, work: impl Future<Output = T>) -> std::io::Result<T> {
        let gone = CancellationToken::new();
        process::watch_parent(gone.clone())?;
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
