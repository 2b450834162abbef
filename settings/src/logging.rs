//! `[log]`: what goes to standard error, and in which form.
//!
//! Standard output is left to results. Prompts and generated text are never logged, at any level. At
//! their finest level libraries print what passes through them: the broker's client whole messages,
//! the tokenizer every character. That level is open to our own crates only.

use std::io::IsTerminal;

use serde::{Deserialize, Serialize};
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{ParseError, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

/// Filters that hold unless the configured level names the same target. The exporter of spans says
/// what the SDK says once more, and neither says why; our client does.
const QUIET: &str = "async_nats=warn,opentelemetry=warn,opentelemetry-otlp=off,ureq=warn";

/// How the names of our crates begin, in the targets of their log lines.
const OURS: &str = "stagebus";

/// The table `[log]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogSettings {
    /// A level (`error`, `warn`, `info`, `debug`, `trace`), or filters such as
    /// `info,stagebus_worker=debug`.
    pub level: String,
    /// Lines for people or for machines.
    pub format: LogFormat,
}

/// Form of a log line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text for people; coloured on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

/// Why logging could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// `log.level` is no filter.
    #[error("log.level is not a log filter: {level}")]
    Level {
        /// The value.
        level: String,
        /// What is wrong with it.
        #[source]
        source: ParseError,
    },
    /// Another logger is installed in this process.
    #[error("logging was started twice")]
    Started(#[from] TryInitError),
}

/// Starts logging to standard error for the whole process.
///
/// # Errors
/// [`LogError::Level`] for a level that cannot be parsed, [`LogError::Started`] the second time.
pub fn init(settings: &LogSettings) -> Result<(), LogError> {
    let filter = filter(&settings.level)?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let all = tracing_subscriber::registry().with(filter).with(filter_fn(is_free_of_text));
    match settings.format {
        LogFormat::Text => all.with(lines).try_init()?,
        LogFormat::Json => all.with(lines.json().flatten_event(true)).try_init()?,
    }
    Ok(())
}

/// Whether a place in the code may log, whatever level is asked for: at their finest level libraries
/// write what people ask and are told.
fn is_free_of_text(place: &Metadata<'_>) -> bool {
    *place.level() < Level::TRACE || place.target().starts_with(OURS)
}

fn filter(level: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::try_new(format!("{QUIET},{level}"))
        .map_err(|source| LogError::Level { level: level.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_checked_and_the_broker_client_stays_quiet() {
        assert!(matches!(filter("stagebus=loud"), Err(LogError::Level { .. })));
        let quiet = filter("trace").expect("a level").to_string();
        assert!(quiet.contains("async_nats=warn"), "{quiet}");
        let asked = filter("info,async_nats=trace").expect("filters").to_string();
        assert!(asked.contains("async_nats=trace"), "{asked}");
        assert!(!asked.contains("async_nats=warn"), "{asked}");
    }
}
