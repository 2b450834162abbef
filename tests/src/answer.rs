//! The events that answer one request, with the contract checked on the way.

use anyhow::{Context, Result, bail, ensure};
use stagebus_bus::EventStream;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::{RequestId, StageIndex};
use stagebus_schemas::messages::public::{
    Event, FinishReason, RequestState, Timings, TokenLogprobs, Usage,
};

/// A request's answer, complete or not.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// Name and prompt length, once accepted.
    pub accepted: Option<(RequestId, u32)>,
    /// The text so far.
    pub text: String,
    /// The tokens so far.
    pub tokens: Vec<u32>,
    /// Their log-probabilities, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Seed of the noise, if tokens are drawn.
    pub seed: Option<u64>,
    /// What was told of its state, and of which stage.
    pub states: Vec<(RequestState, Option<StageIndex>)>,
    /// Number of token events.
    pub n_events: usize,
    /// How it ended.
    pub end: Option<End>,
}

/// The last event of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum End {
    /// All is well.
    Done {
        /// Why generation ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// How long it took.
        timings: Timings,
    },
    /// A failure.
    Failed {
        /// Its kind.
        class: ErrorClass,
        /// What failed.
        message: String,
    },
}

impl Answer {
    /// Takes the next event; returns false after the empty message at the end.
    ///
    /// # Errors
    /// A stream that breaks, or that breaks the contract: acceptance first and once, then token
    /// events numbered without gaps, then one last event, then an empty message.
    pub async fn next(&mut self, stream: &mut EventStream) -> Result<bool> {
        let Some(event) = stream.next().await? else {
            ensure!(self.end.is_some(), "the stream ended without a last event: {self:?}");
            return Ok(false);
        };
        self.take(event)?;
        Ok(true)
    }

    /// Takes an event.
    ///
    /// # Errors
    /// It breaks the contract, as in [`Answer::next`].
    pub fn take(&mut self, event: Event) -> Result<()> {
        ensure!(self.end.is_none(), "{event:?} came after the last event");
        match event {
            Event::Accepted { request_id, prompt_tokens, seed } => {
                ensure!(self.accepted.is_none(), "the request was accepted twice");
                self.seed = seed;
                self.accepted = Some((request_id, prompt_tokens));
            }
            Event::Error { class, message, .. } => {
                ensure!(!message.is_empty(), "an error without a message");
                self.end = Some(End::Failed { class, message });
            }
            _ if self.accepted.is_none() => bail!("{event:?} came before the acceptance"),
            Event::Status { state, stage, .. } => self.states.push((state, stage)),
            Event::Token { i, text, tokens, logprobs, .. } => {
                ensure!(i == self.n_events as u64, "token event {i} instead of {}", self.n_events);
                self.n_events += 1;
                self.text.push_str(&text);
                self.tokens.extend(tokens);
                self.logprobs.extend(logprobs);
                self.check_logprobs()?;
            }
            Event::Done { finish_reason, usage, timings, text, tokens, logprobs } => {
                self.text.push_str(&text.unwrap_or_default());
                self.tokens.extend(tokens.unwrap_or_default());
                self.logprobs.extend(logprobs);
                self.check_logprobs()?;
                let n_tokens = self.tokens.len();
                ensure!(usage.completion_tokens as usize == n_tokens, "{usage:?}, {n_tokens} came");
                self.end = Some(End::Done { reason: finish_reason, usage, timings });
            }
        }
        Ok(())
    }

    /// Log-probabilities come for every token or for none.
    fn check_logprobs(&self) -> Result<()> {
        let of = self.logprobs.iter().map(|entry| entry.chosen.token);
        let aligned = self.logprobs.is_empty() || of.eq(self.tokens.iter().copied());
        ensure!(aligned, "log-probabilities of other tokens: {self:?}");
        Ok(())
    }

    /// Reads the stream to its end.
    ///
    /// # Errors
    /// As [`Answer::next`].
    pub async fn rest(mut self, stream: &mut EventStream) -> Result<Self> {
        while self.next(stream).await? {}
        Ok(self)
    }

    /// Why generation ended.
    ///
    /// # Errors
    /// The answer is a failure.
    pub fn reason(&self) -> Result<FinishReason> {
        match &self.end {
            Some(End::Done { reason, .. }) => Ok(*reason),
            other => bail!("no complete answer: {other:?}"),
        }
    }

    /// What the request used.
    ///
    /// # Errors
    /// The answer is a failure.
    pub fn usage(&self) -> Result<&Usage> {
        match &self.end {
            Some(End::Done { usage, .. }) => Ok(usage),
            other => bail!("no complete answer: {other:?}"),
        }
    }

    /// Class and message of the failure.
    ///
    /// # Errors
    /// The answer is no failure.
    pub fn failure(&self) -> Result<(ErrorClass, &str)> {
        match &self.end {
            Some(End::Failed { class, message }) => Ok((*class, message)),
            other => bail!("expected a failure: {other:?}"),
        }
    }

    /// Number of tokens of the prompt.
    ///
    /// # Errors
    /// The request was not accepted.
    pub fn prompt_tokens(&self) -> Result<usize> {
        let (_, n_tokens) = self.accepted.as_ref().context("the request was not accepted")?;
        Ok(*n_tokens as usize)
    }
}
