//! The keeper of one job: stores its events in order, tells the broker that it is being worked on,
//! and takes it out of the queue after the last event.

use std::time::Duration;

use stagebus_bus::{JobDelivery, JobError, JobStore, NewEvent, PublishError};
use stagebus_schemas::cloud_events::{EventOrigin, Packing, PublicMessage, encode_event};
use stagebus_schemas::codec::{CodecError, ContentType};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{CoordinatorId, RequestId};
use stagebus_schemas::messages::public::Event;
use stagebus_schemas::subjects::Subjects;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use tracing::{info, warn};

use super::intake::Intake;
use super::{StoredAnswer, with_cause};
use crate::client::Client;

/// Failures after which another try may succeed, with this coordinator or another one.
const RETRIED: [ErrorClass; 4] = [
    ErrorClass::Overloaded,
    ErrorClass::StageUnavailable,
    ErrorClass::VersionMismatch,
    ErrorClass::Internal,
];

/// Bounds of the pause before another try; it doubles with each.
const RETRY_LIMITS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// How long an event is tried to be stored before the job is given back. A broker that restarts
/// is back much sooner.
const STORE_PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two tries to store an event.
const STORE_RETRY: Duration = Duration::from_millis(200);

/// Tokens in one event, when events have to wait for each other.
const MAX_MERGED_TOKENS: usize = 64;

/// One job and what is known of its stored events.
pub(super) struct Keeper {
    store: JobStore,
    job: JobDelivery,
    request: RequestId,
    subjects: Subjects,
    content: ContentType,
    packing: Packing,
    /// Who stores the events.
    writer: CoordinatorId,
    /// Tries without a new event before this one, and how many there may be.
    tries: (u64, u64),
    last_sequence: u64,
    n_token_events: u64,
    /// Events that are stored, those of earlier deliveries included.
    n_events: u64,
    progress: Interval,
}

/// Whether the job is still ours.
enum Step {
    Goes,
    Over,
}

impl Keeper {
    pub(super) fn new(
        intake: Intake,
        job: JobDelivery,
        request: RequestId,
        client: &Client,
        stored: &StoredAnswer,
    ) -> Self {
        let mut progress = interval(intake.ack_wait / 3);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let tries = job.delivered.saturating_sub(stored.last_delivery);
        Self {
            writer: intake.writer,
            store: intake.store,
            subjects: intake.subjects,
            content: client.content,
            packing: client.packing,
            job,
            request,
            tries: (tries, intake.max_deliveries),
            last_sequence: stored.last_sequence,
            n_token_events: stored.n_token_events,
            n_events: stored.n_events,
            progress,
        }
    }

    /// Stores events until the last one, or until nobody sends any more: then the job is given
    /// back.
    pub(super) async fn run(mut self, mut events: Receiver<Event>) {
        let mut held = None;
        loop {
            let event = match held.take() {
                Some(event) => event,
                None => tokio::select! {
                    event = events.recv() => match event {
                        Some(event) => event,
                        None => return self.give_back(Duration::ZERO).await,
                    },
                    _ = self.progress.tick() => {
                        self.tell_progress().await;
                        continue;
                    }
                },
            };
            let event = merged(event, &mut events, &mut held);
            if let Step::Over = self.take(event).await {
                return;
            }
        }
    }

    /// Ends the job with a failure.
    pub(super) async fn give_up(&mut self, error: ErrorReply) {
        warn!(sequence = self.job.sequence, %error, "job given up");
        let ErrorReply { class, message, retry_after_ms } = error;
        let event = Event::Error { class, message, retry_after_ms };
        if self.try_store(&event).await {
            self.finish().await;
        }
    }

    async fn take(&mut self, event: Event) -> Step {
        match event {
            Event::Error { class, message, retry_after_ms } if RETRIED.contains(&class) => {
                let (tries, most) = self.tries;
                if tries < most {
                    warn!(sequence = self.job.sequence, %message, "job failed, is tried again");
                    self.give_back(retry_delay(tries, retry_after_ms)).await;
                } else {
                    let message = format!("given up after {tries} tries: {message}");
                    self.give_up(ErrorReply { class, message, retry_after_ms: None }).await;
                }
                Step::Over
            }
            Event::Done { .. } | Event::Error { .. } => {
                if self.try_store(&event).await {
                    self.finish().await;
                }
                Step::Over
            }
            // How a request fares is of the moment.
            Event::Status { .. } => Step::Goes,
            Event::Token { .. } | Event::Accepted { .. } => {
                if self.try_store(&event).await {
                    Step::Goes
                } else {
                    Step::Over
                }
            }
        }
    }

    /// Stores an event; false if the job is not ours any more.
    async fn try_store(&mut self, event: &Event) -> bool {
        match self.store_event(event).await {
            Ok(()) => {
                // A new event shows that trying helps.
                self.tries.0 = 1;
                true
            }
            Err(JobError::Fenced { .. }) => {
                info!(sequence = self.job.sequence, "another coordinator has the job");
                false
            }
            Err(error) => {
                warn!(
                    sequence = self.job.sequence,
                    error = %with_cause(&error),
                    "an event cannot be stored, the job is given back"
                );
                self.give_back(RETRY_LIMITS.0).await;
                false
            }
        }
    }

    async fn store_event(&mut self, event: &Event) -> Result<(), JobError> {
        let message = match event {
            // Events that were merged leave no gap in the numbers.
            Event::Token { text, tokens, logprobs, steps, .. } => {
                let (text, tokens, logprobs) = (text.clone(), tokens.clone(), logprobs.clone());
                let (i, steps) = (self.n_token_events, steps.clone());
                self.encode(&Event::Token { i, text, tokens, logprobs, steps })?
            }
            other => self.encode(other)?,
        };
        let new = NewEvent {
            message,
            after: self.last_sequence,
            delivery: self.job.delivered,
            name: format!("{}-{}-{}", self.writer, self.job.delivered, self.n_events),
        };
        self.last_sequence = match self.append(new.clone()).await {
            Err(JobError::Publish(PublishError::PayloadTooLarge { bytes, limit })) => {
                let too_large = Event::Error {
                    class: ErrorClass::InvalidRequest,
                    message: format!(
                        "answer of {bytes} bytes exceeds the broker's limit of {limit}; ask for a \
                         stream"
                    ),
                    retry_after_ms: None,
                };
                let message = self.encode(&too_large)?;
                self.append(NewEvent { message, ..new }).await?
            }
            stored => stored?,
        };
        self.n_events += 1;
        self.n_token_events += u64::from(matches!(event, Event::Token { .. }));
        Ok(())
    }

    /// The form in which the next event is stored.
    fn encode(&self, event: &Event) -> Result<PublicMessage, CodecError> {
        let origin = EventOrigin {
            subjects: &self.subjects,
            coordinator: &self.writer,
            request: Some(&self.request),
            answer: None,
            index: self.n_events,
        };
        encode_event(event, self.content, self.packing, &origin)
    }

    /// Appends an event, again and again while the broker is away, and goes on telling that the
    /// job is being worked on.
    async fn append(&mut self, event: NewEvent) -> Result<u64, JobError> {
        let deadline = Instant::now() + STORE_PATIENCE;
        let (store, request) = (self.store.clone(), self.request.clone());
        let stored = async {
            loop {
                match store.append(&request, event.clone()).await {
                    Err(JobError::NoAnswer { .. } | JobError::Request { .. })
                        if Instant::now() < deadline =>
                    {
                        tokio::time::sleep(STORE_RETRY).await;
                    }
                    outcome => return outcome,
                }
            }
        };
        tokio::pin!(stored);
        loop {
            tokio::select! {
                outcome = &mut stored => return outcome,
                _ = self.progress.tick() => self.tell_progress().await,
            }
        }
    }

    async fn tell_progress(&self) {
        if let Err(error) = self.job.progress().await {
            warn!(error = %with_cause(&error), "progress of a job was not told");
        }
    }

    async fn finish(&self) {
        // Without it the job is delivered again, found done, and taken out then.
        if let Err(error) = self.job.done().await {
            warn!(error = %with_cause(&error), "a job that is done stays in the queue");
        }
    }

    async fn give_back(&self, delay: Duration) {
        if let Err(error) = self.job.give_back(delay).await {
            warn!(error = %with_cause(&error), "a job was not given back, it waits");
        }
    }
}

/// Joins token events that wait behind one another; what cannot be joined is held for the next
/// round.
fn merged(mut event: Event, events: &mut Receiver<Event>, held: &mut Option<Event>) -> Event {
    while let Event::Token { text, tokens, logprobs, steps, .. } = &mut event
        && tokens.len() < MAX_MERGED_TOKENS
        && let Ok(next) = events.try_recv()
    {
        match next {
            Event::Token {
                text: more_text,
                tokens: more,
                logprobs: more_logprobs,
                steps: more_steps,
                ..
            } => {
                text.push_str(&more_text);
                tokens.extend(more);
                logprobs.extend(more_logprobs);
                steps.extend(more_steps);
            }
            other => {
                *held = Some(other);
                break;
            }
        }
    }
    event
}

fn retry_delay(tries: u64, retry_after_ms: Option<u64>) -> Duration {
    let (least, most) = RETRY_LIMITS;
    let doublings = u32::try_from(tries.saturating_sub(1)).unwrap_or(u32::MAX).min(16);
    let pause = least.saturating_mul(1 << doublings);
    pause.max(Duration::from_millis(retry_after_ms.unwrap_or(0))).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str, tokens: &[u32]) -> Event {
        let (text, tokens) = (text.to_owned(), tokens.to_vec());
        Event::Token { i: 0, text, tokens, logprobs: Vec::new(), steps: Vec::new() }
    }

    #[test]
    fn waiting_tokens_become_one_event_and_the_end_stays_apart() {
        let (send, mut receive) = tokio::sync::mpsc::channel(8);
        let end = Event::Error {
            class: ErrorClass::Internal,
            message: "end".to_owned(),
            retry_after_ms: None,
        };
        for event in [token("b", &[2]), token("c", &[3, 4]), end.clone(), token("d", &[5])] {
            send.try_send(event).unwrap();
        }
        let mut held = None;
        let event = merged(token("a", &[1]), &mut receive, &mut held);
        assert_eq!(event, token("abc", &[1, 2, 3, 4]));
        assert_eq!(held.take(), Some(end.clone()));
        assert_eq!(merged(end.clone(), &mut receive, &mut held), end);
        assert_eq!(held, None);
        assert_eq!(receive.try_recv().unwrap(), token("d", &[5]));
    }

    #[test]
    fn a_merged_event_has_a_bound() {
        let (send, mut receive) = tokio::sync::mpsc::channel(256);
        for _ in 0..200 {
            send.try_send(token("x", &[1])).unwrap();
        }
        let Event::Token { tokens, .. } = merged(token("x", &[1]), &mut receive, &mut None) else {
            panic!("a token event");
        };
        assert_eq!(tokens.len(), MAX_MERGED_TOKENS);
    }

    #[test]
    fn pauses_double_and_follow_the_hint_within_bounds() {
        assert_eq!(retry_delay(1, None), Duration::from_millis(500));
        assert_eq!(retry_delay(3, None), Duration::from_secs(2));
        assert_eq!(retry_delay(1, Some(7_000)), Duration::from_secs(7));
        assert_eq!(retry_delay(200, Some(90_000)), Duration::from_secs(30));
    }
}
