//! Fetching a job and finding out what is left to do of it.

use std::sync::Arc;
use std::time::Duration;

use stagebus_bus::{JobDelivery, JobError, JobStore};
use stagebus_schemas::cloud_events::decode_request;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{CoordinatorId, RequestId};
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_schemas::subjects::Subjects;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::keeper::Keeper;
use super::{JobStart, StoredAnswer, with_cause};
use crate::client::Client;

/// How long one question for a job stands.
const PULL_WAIT: Duration = Duration::from_secs(5);

/// Pause after a failed fetch, and before a job is tried again that could not be looked at.
const RETRY: Duration = Duration::from_secs(1);

/// What it takes to fetch jobs.
#[derive(Clone)]
pub(super) struct Intake {
    pub(super) store: JobStore,
    pub(super) subjects: Subjects,
    /// Who stores the events.
    pub(super) writer: CoordinatorId,
    /// Cancelled when no more jobs are wanted.
    pub(super) stopped: CancellationToken,
    pub(super) max_deliveries: u64,
    pub(super) max_request_bytes: usize,
    pub(super) ack_wait: Duration,
}

/// A job that is to run, and the keeper of its events.
pub(super) struct Taken {
    pub(super) keeper: Keeper,
    pub(super) start: JobStart,
}

impl Intake {
    /// Waits a while for a job that has something left to do.
    pub(super) async fn pull(mut self) -> Option<Taken> {
        let pulled = tokio::select! {
            pulled = self.store.pull(PULL_WAIT) => pulled,
            () = self.stopped.cancelled() => return None,
        };
        match pulled {
            Ok(job) => Box::pin(self.look(job?)).await,
            Err(error) => {
                warn!(error = %with_cause(&error), "no job can be fetched");
                tokio::select! {
                    () = tokio::time::sleep(RETRY) => {}
                    () = self.stopped.cancelled() => return None,
                }
                if let Err(error) = self.store.reopen().await {
                    warn!(error = %with_cause(&error), "the streams of jobs are not there");
                }
                None
            }
        }
    }

    async fn look(self, job: JobDelivery) -> Option<Taken> {
        if self.stopped.is_cancelled() {
            return give_back(&job, Duration::ZERO).await;
        }
        let prompt = self.read(&job);
        let request = name(&job, prompt.as_ref().ok());
        match self.find(&job, &request).await {
            Ok((stored, _)) if stored.ended => {
                debug!(sequence = job.sequence, "the job is done already");
                if let Err(error) = job.done().await {
                    warn!(error = %with_cause(&error), "a job that is done stays in the queue");
                }
                None
            }
            Ok((stored, cancelled)) => self.begin(job, request, prompt, stored, cancelled).await,
            Err(error) => {
                warn!(error = %with_cause(&error), "a job cannot be looked at, it is given back");
                give_back(&job, RETRY).await
            }
        }
    }

    /// What is stored of a job, and whether it is cancelled.
    async fn find(
        &self,
        job: &JobDelivery,
        request: &RequestId,
    ) -> Result<(StoredAnswer, bool), JobError> {
        let stored = match self.store.results(request).await? {
            Some(results) => StoredAnswer::read(results).await?,
            None => StoredAnswer::default(),
        };
        let cancelled = self.store.is_cancelled(request, job.published).await?;
        Ok((stored, cancelled))
    }

    async fn begin(
        self,
        job: JobDelivery,
        request: RequestId,
        prompt: Result<PromptRequest, ErrorReply>,
        stored: StoredAnswer,
        cancelled: bool,
    ) -> Option<Taken> {
        let reply = self.subjects.result(&request).into();
        let client = Client {
            request: Some(Arc::new(request.clone())),
            ..Client::new(reply, &job.public_headers(), &job.payload)
        };
        let trace = job.trace();
        let n_tries = job.delivered.saturating_sub(stored.last_delivery);
        let max_deliveries = self.max_deliveries;
        let mut keeper = Keeper::new(self, job, request.clone(), &client, &stored);
        if n_tries > max_deliveries {
            // Whoever had it has not come to say so: this one does not try.
            let n_tries = n_tries - 1;
            let message = format!("given up: {n_tries} coordinators in a row did not finish it");
            keeper.give_up(ErrorReply::new(ErrorClass::Internal, message)).await;
            return None;
        }
        let start = JobStart { client, request, prompt, trace, cancelled, stored };
        Some(Taken { keeper, start })
    }

    fn read(&self, job: &JobDelivery) -> Result<PromptRequest, ErrorReply> {
        let (found, limit) = (job.payload.len(), self.max_request_bytes);
        let invalid = |message| ErrorReply::new(ErrorClass::InvalidRequest, message);
        if found > limit {
            return Err(invalid(format!("job has {found} bytes, at most {limit} are taken")));
        }
        decode_request(&job.public_headers(), &job.payload)
            .map_err(|error| invalid(format!("job cannot be read: {error}")))
    }
}

async fn give_back(job: &JobDelivery, delay: Duration) -> Option<Taken> {
    if let Err(error) = job.give_back(delay).await {
        warn!(error = %with_cause(&error), "a job was not given back, it waits");
    }
    None
}

/// The name of a job: its own, else the one that its sender gave the broker, else its number.
fn name(job: &JobDelivery, prompt: Option<&PromptRequest>) -> RequestId {
    let own = prompt.and_then(|prompt| prompt.request_id.clone());
    own.or_else(|| job.message_id().and_then(|id| RequestId::new(id).ok()))
        .unwrap_or_else(|| RequestId::of_job(job.sequence))
}
