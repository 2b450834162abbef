//! Waiting for a state that nobody announces.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

/// How often a state is looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// Longest wait for a state: far above what a loaded machine needs, so that only a state that
/// never comes ends it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Looks again and again until `look` finds something.
///
/// # Errors
/// What `look` reports, or that `what` did not come about within [`PATIENCE`].
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("not within {PATIENCE:?}: {what}");
        }
        sleep(INTERVAL).await;
    }
}
