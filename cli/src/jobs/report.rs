//! How a job stands, put together from its events.

use serde::Serialize;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{Event, FinishReason, Timings, TokenLogprobs, Usage};

use crate::ask::answer::AnswerError;

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// No event is stored: it waits, its results are too old, or nobody submitted it.
    Unknown,
    /// Some events are stored.
    Running,
    /// It has ended.
    Done,
    /// It was cancelled.
    Cancelled,
    /// It has failed.
    Failed,
}

/// What is stored of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Its name.
    pub request_id: RequestId,
    /// How far it is.
    pub state: JobState,
    /// The text so far.
    pub text: String,
    /// The tokens so far.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u32>,
    /// Seed of the noise, if tokens are drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Log-probabilities, if asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// What it used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// How long its last part took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    #[serde(skip)]
    next_event: u64,
}

/// The failure of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Its kind.
    pub class: ErrorClass,
    /// What failed.
    pub message: String,
}

impl Report {
    /// Makes the report of a job of which nothing is known.
    #[must_use]
    pub fn new(request_id: RequestId) -> Self {
        Self {
            request_id,
            state: JobState::Unknown,
            text: String::new(),
            tokens: Vec::new(),
            prompt_tokens: None,
            seed: None,
            logprobs: Vec::new(),
            finish_reason: None,
            usage: None,
            timings: None,
            error: None,
            next_event: 0,
        }
    }

    /// Takes the next event and returns the text that it adds.
    ///
    /// # Errors
    /// [`AnswerError::Gap`]: events are missing, because their time is over or their room was
    /// needed.
    pub fn take(&mut self, event: Event) -> Result<String, AnswerError> {
        match event {
            Event::Accepted { prompt_tokens, seed, .. } => {
                self.state = JobState::Running;
                self.prompt_tokens = Some(prompt_tokens);
                self.seed = seed;
                Ok(String::new())
            }
            Event::Status { .. } => Ok(String::new()),
            Event::Token { i, .. } if i != self.next_event => {
                Err(AnswerError::Gap { expected: self.next_event, found: i })
            }
            Event::Token { text, tokens, logprobs, .. } => {
                self.state = JobState::Running;
                self.next_event += 1;
                self.tokens.extend(tokens);
                self.logprobs.extend(logprobs);
                self.text.push_str(&text);
                Ok(text)
            }
            Event::Done { finish_reason, usage, timings, text, tokens, logprobs } => {
                self.state = match finish_reason {
                    FinishReason::Cancelled => JobState::Cancelled,
                    FinishReason::Stop | FinishReason::Length => JobState::Done,
                };
                self.finish_reason = Some(finish_reason);
                self.usage = Some(usage);
                self.timings = Some(timings);
                self.tokens.extend(tokens.unwrap_or_default());
                self.logprobs.extend(logprobs);
                let text = text.unwrap_or_default();
                self.text.push_str(&text);
                Ok(text)
            }
            Event::Error { class, message, .. } => {
                self.state = JobState::Failed;
                self.error = Some(Failure { class, message });
                Ok(String::new())
            }
        }
    }

    /// Whether the last event is there.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.state, JobState::Done | JobState::Cancelled | JobState::Failed)
    }

    /// One line for people.
    #[must_use]
    pub fn remark(&self) -> String {
        let n_tokens = self.tokens.len();
        match (self.state, &self.error) {
            (JobState::Failed, Some(Failure { class, message })) => {
                format!("[failed: {message} ({})]", class.as_str())
            }
            (JobState::Unknown, _) => format!(
                "[no event of {} is stored: it waits, its time is over, or nobody submitted it]",
                self.request_id
            ),
            (JobState::Running, _) => format!("[not finished: {n_tokens} tokens so far]"),
            (JobState::Cancelled, _) => format!("[cancelled after {n_tokens} tokens]"),
            (JobState::Done | JobState::Failed, _) => {
                let prompt_tokens = self.prompt_tokens.unwrap_or(0);
                format!("[{prompt_tokens} prompt tokens, {n_tokens} generated]")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::new(RequestId::new("r").expect("an id"))
    }

    fn token(i: u64, text: &str) -> Event {
        let (text, logprobs, steps) = (text.to_owned(), Vec::new(), Vec::new());
        Event::Token { i, text, tokens: vec![7], logprobs, steps }
    }

    #[test]
    fn a_report_follows_the_events() {
        let mut report = report();
        assert_eq!((report.state, report.is_over()), (JobState::Unknown, false));
        let request_id = report.request_id.clone();
        report.take(Event::Accepted { request_id, prompt_tokens: 4, seed: None }).expect("valid");
        assert_eq!(report.take(token(0, "To")).expect("valid"), "To");
        assert_eq!(report.take(token(1, "kyo")).expect("valid"), "kyo");
        assert!(report.remark().contains("2 tokens so far"));
        report
            .take(Event::Done {
                finish_reason: FinishReason::Stop,
                usage: Usage::default(),
                timings: Timings::default(),
                text: None,
                tokens: None,
                logprobs: Vec::new(),
            })
            .expect("valid");
        assert_eq!((report.state, report.text.as_str()), (JobState::Done, "Tokyo"));
        assert_eq!(report.remark(), "[4 prompt tokens, 2 generated]");
    }

    #[test]
    fn missing_events_and_failures_are_told() {
        let gap = report().take(token(3, "x")).expect_err("three are missing");
        assert_eq!(gap, AnswerError::Gap { expected: 0, found: 3 });
        let mut failed = report();
        let message = "no room".to_owned();
        let class = ErrorClass::Overloaded;
        failed.take(Event::Error { class, message, retry_after_ms: None }).expect("valid");
        assert!(failed.is_over());
        assert_eq!(failed.remark(), "[failed: no room (overloaded)]");
    }
}
