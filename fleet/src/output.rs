//! What the children write: the one log view, and the last lines for error messages.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::sync::mpsc;

/// How many of a child's last lines are kept: enough for an error with its causes.
const KEPT_LINES: usize = 40;

/// The longest line that is kept or passed on whole, in bytes; the rest of a longer one is cut.
const MAX_LINE_BYTES: usize = 8 * 1024;

/// Where the children's log lines go, each prefixed with the child's name.
#[derive(Debug, Clone, Default)]
pub enum LogSink {
    /// To standard error.
    Stderr,
    /// Nowhere; the last lines of each child are still kept for error messages.
    #[default]
    Quiet,
    /// To a channel. A line that finds it full is dropped: a slow reader must not block a child.
    Channel(mpsc::Sender<String>),
}

impl LogSink {
    fn write(&self, name: &str, line: &str) {
        match self {
            Self::Stderr => {
                // Nobody is left to tell when standard error itself is gone.
                drop(writeln!(std::io::stderr().lock(), "{name} | {line}"));
            }
            Self::Quiet => {}
            Self::Channel(lines) => drop(lines.try_send(format!("{name} | {line}"))),
        }
    }
}

/// The last lines of one child.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// The kept lines, oldest first, one a line.
    pub(crate) fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Passes on all lines of `source` until it ends.
pub(crate) async fn forward(
    source: impl AsyncRead + Unpin,
    name: String,
    tail: Tail,
    sink: LogSink,
) {
    let mut source = BufReader::new(source);
    while let Some(line) = next_line(&mut source).await {
        sink.write(&name, &line);
        tail.push(line);
    }
}

/// The next line without its end, or `None` at the end of the stream or when it fails.
///
/// # Cancel safety
/// Not cancel safe: a line that was read in part is lost.
pub(crate) async fn next_line<R: AsyncRead + Unpin>(source: &mut BufReader<R>) -> Option<String> {
    let mut line = Vec::new();
    loop {
        let chunk = source.fill_buf().await.ok()?;
        if chunk.is_empty() {
            return (!line.is_empty()).then(|| text(&line));
        }
        let end = chunk.iter().position(|&byte| byte == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        let room = MAX_LINE_BYTES - line.len();
        line.extend_from_slice(&part[..part.len().min(room)]);
        let consumed = part.len() + usize::from(end.is_some());
        source.consume(consumed);
        if end.is_some() {
            return Some(text(&line));
        }
    }
}

fn text(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim_end_matches('\r').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_split_cut_and_kept() {
        let long = "x".repeat(MAX_LINE_BYTES + 5);
        let text = format!("one\r\n{long}\nlast");
        let mut source = BufReader::new(text.as_bytes());
        assert_eq!(next_line(&mut source).await.as_deref(), Some("one"));
        let cut = next_line(&mut source).await.expect("a line");
        assert_eq!(cut.len(), MAX_LINE_BYTES);
        assert_eq!(next_line(&mut source).await.as_deref(), Some("last"));
        assert_eq!(next_line(&mut source).await, None);
    }

    #[tokio::test]
    async fn the_tail_holds_the_last_lines_and_the_sink_gets_all() {
        let lines: Vec<String> = (0..KEPT_LINES + 3).map(|n| n.to_string()).collect();
        let (sender, mut receiver) = mpsc::channel(lines.len());
        let tail = Tail::default();
        let text = lines.join("\n");
        forward(text.as_bytes(), "a".to_owned(), tail.clone(), LogSink::Channel(sender)).await;
        assert_eq!(tail.text(), lines[3..].join("\n"));
        assert_eq!(receiver.recv().await.as_deref(), Some("a | 0"));
        assert_eq!(receiver.len(), lines.len() - 1);
    }
}
