//! The answer to one request, put together from its events.

use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{Event, FinishReason, Timings, TokenLogprobs, Usage};

/// What came so far.
#[derive(Debug)]
pub struct Answer {
    asked: Instant,
    first_token: Option<Duration>,
    accepted: Option<(RequestId, u32)>,
    next_event: u64,
    text: String,
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    seed: Option<u64>,
    end: Option<(FinishReason, Usage, Timings)>,
}

/// A complete answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Complete {
    /// The generated text.
    pub text: String,
    /// The generated tokens, an end token included.
    pub tokens: Vec<u32>,
    /// Tokens per second after the first one, as the coordinator measured it.
    pub tok_s: f64,
    /// Time from sending the request to the first token's arrival here, in milliseconds.
    pub ttft_ms: f64,
    /// Number of stages that the answer went through.
    pub stages: usize,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens of prompt and answer.
    pub usage: Usage,
    /// Where the time went, as the coordinator measured it.
    pub timings: Timings,
    /// Name of the request.
    pub request_id: RequestId,
    /// Seed of the noise, if tokens were drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Log-probabilities of the tokens, if asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
}

/// Why there is no complete answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The fleet refused the request or failed at it.
    #[error("{message} ({class}{})", retry(*retry_after_ms), class = class.as_str())]
    Refused {
        /// Kind of failure.
        class: ErrorClass,
        /// What failed.
        message: String,
        /// When a retry is sensible.
        retry_after_ms: Option<u64>,
    },
    /// Events are missing: the stream lost messages.
    #[error("event {expected} is missing, event {found} came")]
    Gap {
        /// Number expected.
        expected: u64,
        /// Number found.
        found: u64,
    },
    /// An event came that cannot come at this point.
    #[error("event {event:?} came {place}")]
    Unexpected {
        /// Name of the event.
        event: &'static str,
        /// Where in the stream.
        place: &'static str,
    },
    /// The stream ended before the answer.
    #[error("the stream ended before the answer was complete")]
    Incomplete,
}

impl Answer {
    /// Starts the clock of a request that is about to be sent.
    #[must_use]
    pub fn asked_now() -> Self {
        Self {
            asked: Instant::now(),
            first_token: None,
            accepted: None,
            next_event: 0,
            text: String::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            seed: None,
            end: None,
        }
    }

    /// Takes the next event and returns the text that it adds.
    ///
    /// # Errors
    /// [`AnswerError::Refused`] for an error event, [`AnswerError::Gap`] and
    /// [`AnswerError::Unexpected`] for a stream that breaks the contract.
    pub fn take(&mut self, event: Event) -> Result<String, AnswerError> {
        if self.end.is_some() {
            return Err(unexpected(&event, "after the end"));
        }
        match event {
            Event::Accepted { request_id, prompt_tokens, seed } if self.accepted.is_none() => {
                self.seed = seed;
                self.accepted = Some((request_id, prompt_tokens));
                Ok(String::new())
            }
            Event::Accepted { .. } => Err(unexpected(&event, "twice")),
            Event::Error { class, message, retry_after_ms } => {
                Err(AnswerError::Refused { class, message, retry_after_ms })
            }
            _ if self.accepted.is_none() => {
                Err(unexpected(&event, "before the request's acceptance"))
            }
            Event::Status { .. } => Ok(String::new()),
            Event::Token { i, .. } if i != self.next_event => {
                Err(AnswerError::Gap { expected: self.next_event, found: i })
            }
            Event::Token { text, tokens, logprobs, .. } => {
                self.next_event += 1;
                self.first_token.get_or_insert_with(|| self.asked.elapsed());
                self.text.push_str(&text);
                self.tokens.extend(tokens);
                self.logprobs.extend(logprobs);
                Ok(text)
            }
            Event::Done { finish_reason, usage, timings, text, tokens, logprobs } => {
                self.logprobs.extend(logprobs);
                self.end = Some((finish_reason, usage, timings));
                self.tokens.extend(tokens.unwrap_or_default());
                let text = text.unwrap_or_default();
                self.text.push_str(&text);
                Ok(text)
            }
        }
    }

    /// Whether the last event has come.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.end.is_some()
    }

    /// Tokens of the prompt as the coordinator counts them, once the request is accepted.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<u32> {
        self.accepted.as_ref().map(|(_, prompt_tokens)| *prompt_tokens)
    }

    /// Closes the answer. `n_stages` is used when the caller knows the number of stages.
    ///
    /// # Errors
    /// [`AnswerError::Incomplete`] before the last event.
    pub fn finish(self, n_stages: Option<usize>) -> Result<Complete, AnswerError> {
        let (Some((finish_reason, usage, timings)), Some((request_id, _))) =
            (self.end, self.accepted)
        else {
            return Err(AnswerError::Incomplete);
        };
        Ok(Complete {
            text: self.text,
            tokens: self.tokens,
            tok_s: timings.decode_tok_s,
            ttft_ms: self.first_token.map_or(timings.ttft_ms, |time| time.as_secs_f64() * 1e3),
            stages: n_stages.unwrap_or(timings.stage_infer_ms.len()),
            finish_reason,
            usage,
            timings,
            request_id,
            seed: self.seed,
            logprobs: self.logprobs,
        })
    }
}

fn unexpected(event: &Event, place: &'static str) -> AnswerError {
    let event = match event {
        Event::Accepted { .. } => "accepted",
        Event::Status { .. } => "status",
        Event::Token { .. } => "token",
        Event::Done { .. } => "done",
        Event::Error { .. } => "error",
    };
    AnswerError::Unexpected { event, place }
}

fn retry(retry_after_ms: Option<u64>) -> String {
    retry_after_ms.map_or_else(String::new, |ms| format!(", retry after {ms} ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted() -> Event {
        let request_id = RequestId::new("r-1").expect("a valid id");
        Event::Accepted { request_id, prompt_tokens: 7, seed: None }
    }

    fn token(i: u64, text: &str, token: u32) -> Event {
        let (text, logprobs, steps) = (text.to_owned(), vec![], vec![]);
        Event::Token { i, text, tokens: vec![token], logprobs, steps }
    }

    fn done(text: Option<&str>, tokens: Option<Vec<u32>>) -> Event {
        Event::Done {
            finish_reason: FinishReason::Stop,
            usage: Usage { prompt_tokens: 7, completion_tokens: 2, ..Usage::default() },
            timings: Timings { stage_infer_ms: vec![1.0, 2.0], ..Timings::default() },
            text: text.map(str::to_owned),
            tokens,
            logprobs: vec![],
        }
    }

    fn feed(events: Vec<Event>) -> Result<Answer, AnswerError> {
        let mut answer = Answer::asked_now();
        for event in events {
            answer.take(event)?;
        }
        Ok(answer)
    }

    #[test]
    fn text_and_tokens_are_joined_in_order() {
        let answer =
            feed(vec![accepted(), token(0, "To", 4), token(1, "kyo", 5), done(None, None)])
                .expect("a valid stream");
        assert_eq!(answer.prompt_tokens(), Some(7));
        let complete = answer.finish(None).expect("it is complete");
        assert_eq!((complete.text.as_str(), complete.tokens.as_slice()), ("Tokyo", &[4, 5][..]));
        assert_eq!((complete.stages, complete.usage.completion_tokens), (2, 2));
    }

    #[test]
    fn an_answer_without_streaming_comes_with_the_last_event() {
        let answer =
            feed(vec![accepted(), done(Some("Tokyo"), Some(vec![4, 5]))]).expect("a valid stream");
        let complete = answer.finish(Some(3)).expect("it is complete");
        assert_eq!((complete.text.as_str(), complete.stages), ("Tokyo", 3));
        assert_eq!(complete.tokens, [4, 5]);
    }

    #[test]
    fn a_broken_stream_is_an_error() {
        let error = |events| feed(events).expect_err("a broken stream");
        assert_eq!(
            error(vec![accepted(), token(0, "a", 1), token(2, "b", 2)]),
            AnswerError::Gap { expected: 1, found: 2 }
        );
        for events in [
            vec![token(0, "a", 1)],
            vec![done(None, None)],
            vec![accepted(), accepted()],
            vec![accepted(), done(None, None), token(0, "a", 1)],
        ] {
            assert!(matches!(error(events), AnswerError::Unexpected { .. }));
        }
        let cut = feed(vec![accepted(), token(0, "a", 1)]).expect("valid so far");
        assert_eq!(cut.finish(None), Err(AnswerError::Incomplete));
    }

    #[test]
    fn a_refusal_keeps_class_and_hint() {
        let refusal = Event::Error {
            class: ErrorClass::Overloaded,
            message: "no room".to_owned(),
            retry_after_ms: Some(250),
        };
        let error = feed(vec![refusal]).expect_err("refused");
        assert_eq!(error.to_string(), "no room (overloaded, retry after 250 ms)");
    }
}
