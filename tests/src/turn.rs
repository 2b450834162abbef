//! One test at a time has running processes.

use tokio::sync::{Semaphore, SemaphorePermit};

static TURN: Semaphore = Semaphore::const_new(1);

/// The right to run processes, given back when dropped.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "held for its drop")] SemaphorePermit<'static>);

/// Waits for the end of the tests before this one. Test runners that start a process for each test
/// need a group of their own for the same purpose.
///
/// # Panics
/// Never: the semaphore is not closed.
pub async fn take() -> Turn {
    Turn(TURN.acquire().await.expect("the semaphore is never closed"))
}
