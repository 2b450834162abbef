//! A program on a terminal of its own.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::wait;

/// Keys and screen of a program that [`start_on_terminal`](crate::program::Call::start_on_terminal)
/// started.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    screen: ChildStdout,
    /// What was read and not yet waited for.
    shown: Vec<u8>,
}

impl Terminal {
    /// Takes over a program.
    ///
    /// # Errors
    /// It has no keys or no screen.
    pub fn new(mut child: Child) -> Result<Self> {
        let keys = child.stdin.take().context("the program has no keys")?;
        let screen = child.stdout.take().context("the program has no screen")?;
        Ok(Self { child, keys, screen, shown: Vec::new() })
    }

    /// Presses keys.
    ///
    /// # Errors
    /// The program has ended.
    pub async fn press(&mut self, keys: &str) -> Result<()> {
        self.keys.write_all(keys.as_bytes()).await?;
        Ok(self.keys.flush().await?)
    }

    /// Reads on to the end of the next such text after the last one that was waited for.
    ///
    /// # Errors
    /// It does not come.
    pub async fn shows(&mut self, text: &str) -> Result<()> {
        let read = async {
            loop {
                let found = self.shown.windows(text.len()).position(|part| part == text.as_bytes());
                if let Some(at) = found {
                    self.shown.drain(..at + text.len());
                    return anyhow::Ok(());
                }
                let n_bytes = self.screen.read_buf(&mut self.shown).await?;
                ensure!(n_bytes > 0, "the screen ended");
            }
        };
        let read = match tokio::time::timeout(wait::PATIENCE, read).await {
            Ok(read) => read,
            Err(elapsed) => Err(elapsed.into()),
        };
        let shown = String::from_utf8_lossy(&self.shown);
        read.with_context(|| format!("{text:?} did not come, but {shown:?}"))
    }

    /// Waits for the end of the program, which must be a success, and returns what it showed last.
    ///
    /// # Errors
    /// It does not end, or with a failure.
    pub async fn ends(mut self) -> Result<String> {
        let mut rest = self.shown;
        let end = async {
            self.screen.read_to_end(&mut rest).await?;
            self.child.wait().await
        };
        let status = tokio::time::timeout(wait::PATIENCE, end).await??;
        let rest = String::from_utf8_lossy(&rest).into_owned();
        ensure!(status.success(), "{status}: {rest:?}");
        Ok(rest)
    }
}
