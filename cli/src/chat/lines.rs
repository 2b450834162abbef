//! Where the lines of a conversation come from: a line editor on a terminal, else standard input.
//!
//! Reading blocks, and nothing can interrupt it. So a thread of its own reads one line each time
//! that one is asked for; it is never joined and ends with the process.

use std::io;
use std::path::{Path, PathBuf};

use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};
use tokio::sync::mpsc;

use crate::console;

/// Shown where the user types.
const PROMPT: &str = "> ";

/// Lines that the history keeps.
const HISTORY_LINES: usize = 1000;

/// What came instead of, or as, a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// A line.
    Text(String),
    /// Ctrl-C while the line was edited.
    Interrupted,
    /// The end of the input, or Ctrl-D.
    End,
}

/// Why there is no line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// Standard input cannot be read.
    #[error("cannot read a line of UTF-8 text from standard input")]
    Read(#[source] io::Error),
    /// The terminal cannot be used.
    #[error("the line editor cannot use this terminal; pipe the lines in instead")]
    Editor(#[source] ReadlineError),
    /// The thread that reads is gone.
    #[error("the thread that reads lines is gone")]
    Gone,
}

/// Reads lines.
#[derive(Debug)]
pub struct Lines {
    ask: mpsc::Sender<()>,
    lines: mpsc::Receiver<Result<Line, LineError>>,
    _terminal: terminal::Saved,
}

/// Where lines come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A terminal, with the file of its history if one is kept.
    Terminal {
        /// The file.
        history: Option<PathBuf>,
    },
    /// Standard input as it is.
    Input,
}

impl Lines {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(source: Source) -> io::Result<Self> {
        let terminal = terminal::Saved::now();
        let ((ask, asked), (found, lines)) = (mpsc::channel(1), mpsc::channel(1));
        std::thread::Builder::new()
            .name("line-editor".to_owned())
            .spawn(move || read_when_asked(source, asked, &found))?;
        Ok(Self { ask, lines, _terminal: terminal })
    }

    /// Waits for the next line; after [`Line::End`] and after an error there is none.
    ///
    /// # Errors
    /// [`LineError`].
    pub async fn next(&mut self) -> Result<Line, LineError> {
        self.ask.send(()).await.map_err(|_ended| LineError::Gone)?;
        self.lines.recv().await.unwrap_or(Err(LineError::Gone))
    }
}

fn read_when_asked(
    source: Source,
    mut asked: mpsc::Receiver<()>,
    found: &mpsc::Sender<Result<Line, LineError>>,
) {
    let mut reader = Reader::open(source);
    while asked.blocking_recv().is_some() {
        let line = match &mut reader {
            Ok(reader) => reader.read(),
            Err(_) => match std::mem::replace(&mut reader, Ok(Reader::Input)) {
                Err(error) => Err(error),
                Ok(_) => Ok(Line::End),
            },
        };
        let is_last = matches!(line, Ok(Line::End) | Err(_));
        if found.blocking_send(line).is_err() || is_last {
            return;
        }
    }
}

enum Reader {
    Editor { editor: Box<Editor<(), FileHistory>>, history: Option<PathBuf> },
    Input,
}

impl Reader {
    fn open(source: Source) -> Result<Self, LineError> {
        let Source::Terminal { history } = source else { return Ok(Self::Input) };
        let config = Config::builder()
            .max_history_size(HISTORY_LINES)
            .map_err(LineError::Editor)?
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config).map_err(LineError::Editor)?;
        let history = history.filter(|path| match load_history(&mut editor, path) {
            Ok(()) => true,
            Err(error) => {
                console::note(&format!("no history is kept in {}: {error}", path.display()));
                false
            }
        });
        Ok(Self::Editor { editor: Box::new(editor), history })
    }

    fn read(&mut self) -> Result<Line, LineError> {
        let (editor, history) = match self {
            Self::Editor { editor, history } => (editor, history),
            Self::Input => return read_line(&mut io::stdin().lock()),
        };
        let text = loop {
            match editor.readline(PROMPT) {
                Ok(text) => break text,
                Err(ReadlineError::Eof) => return Ok(Line::End),
                Err(ReadlineError::Interrupted) => return Ok(Line::Interrupted),
                // The window has another size.
                Err(ReadlineError::Signal(_)) => {}
                Err(error) => return Err(LineError::Editor(error)),
            }
        };
        let kept = match history.as_deref() {
            Some(path) => editor
                .add_history_entry(text.as_str())
                .and_then(|new| if new { editor.append_history(path) } else { Ok(()) }),
            None => editor.add_history_entry(text.as_str()).map(drop),
        };
        if let Err(error) = kept {
            console::note(&format!("the history is not kept any longer: {error}"));
            *history = None;
        }
        Ok(Line::Text(text))
    }
}

fn load_history(editor: &mut Editor<(), FileHistory>, path: &Path) -> rustyline::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(ReadlineError::Io)?;
    }
    match editor.load_history(path) {
        Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read_line(input: &mut impl io::BufRead) -> Result<Line, LineError> {
    let mut text = String::new();
    match input.read_line(&mut text) {
        Ok(0) => Ok(Line::End),
        Ok(_) => Ok(Line::Text(text)),
        Err(error) => Err(LineError::Read(error)),
    }
}

/// The file of the history: `stagebus/chat-history` in the user's folder for data.
#[must_use]
pub fn history_file() -> Option<PathBuf> {
    dirs::data_dir().map(|data| data.join("stagebus").join("chat-history"))
}

/// The terminal as it was: a program that is asked to end while a line is edited leaves the editor
/// no time to put it back.
#[cfg(unix)]
mod terminal {
    use std::io;

    use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

    use crate::console;

    #[derive(Debug)]
    pub(super) struct Saved(Option<Termios>);

    impl Saved {
        pub(super) fn now() -> Self {
            Self(tcgetattr(io::stdin()).ok())
        }
    }

    impl Drop for Saved {
        fn drop(&mut self) {
            let Some(saved) = &self.0 else { return };
            if tcsetattr(io::stdin(), OptionalActions::Now, saved).is_err() {
                console::note("the terminal was not put back; the command `reset` does it");
            }
        }
    }
}

/// The console forgets its mode with the program that set it.
#[cfg(not(unix))]
mod terminal {
    #[derive(Debug)]
    pub(super) struct Saved;

    impl Saved {
        pub(super) fn now() -> Self {
            Self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_read_line_by_line_to_its_end() {
        let mut input: &[u8] = b"Hi\n\nAnd then?";
        let mut next = || read_line(&mut input).expect("text");
        assert_eq!(next(), Line::Text("Hi\n".to_owned()));
        assert_eq!(next(), Line::Text("\n".to_owned()));
        assert_eq!(next(), Line::Text("And then?".to_owned()));
        assert_eq!(next(), Line::End);
        assert!(matches!(read_line(&mut &b"\xff\n"[..]), Err(LineError::Read(_))));
    }
}
