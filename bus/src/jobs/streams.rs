//! The two streams of a model and the consumer that hands out its jobs.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, Consumer, Info as ConsumerInfo, pull};
use async_nats::jetstream::consumer::{IntoConsumerConfig as _, pull::Config as PullConfig};
use async_nats::jetstream::stream::{Config, DiscardPolicy, Info, RetentionPolicy, StorageType};
use serde_json::json;
use stagebus_schemas::access::JOB_CONSUMER as CONSUMER;
use stagebus_schemas::subjects::Subjects;

use super::JobLimits;
use super::error::JobError;
use crate::jetstream::{Api, ApiError};

/// Jobs that all coordinators together may hold; beyond that the broker hands out none.
const MAX_HELD: i64 = 65_536;

/// The broker's own time in which it looks for messages of the same id; events have none.
const DUPLICATES: Duration = Duration::from_secs(120);

/// Room for the headers of a job beside its request, in bytes.
const HEADER_BYTES: u32 = 4_096;

/// Makes what is missing, checks what is there, and sets the limits.
pub(super) async fn ensure(
    api: &Api,
    subjects: &Subjects,
    limits: &JobLimits,
) -> Result<Consumer<pull::Config>, JobError> {
    ensure_stream(api, jobs(subjects, limits)).await?;
    ensure_stream(api, results(subjects, limits)).await?;
    let stream = subjects.jobs_stream();
    let config = PullConfig {
        durable_name: Some(CONSUMER.to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: limits.ack_wait,
        // The coordinators count themselves: the broker would leave a job in the queue for ever.
        max_deliver: -1,
        max_ack_pending: MAX_HELD,
        ..PullConfig::default()
    };
    let body = json!({ "stream_name": stream, "config": config.clone().into_consumer_config() });
    let subject = format!("CONSUMER.CREATE.{stream}.{CONSUMER}");
    let info: ConsumerInfo = api.request(&subject, &body).await?;
    Ok(Consumer::new(config, info, api.context.clone()))
}

fn jobs(subjects: &Subjects, limits: &JobLimits) -> Config {
    let max_bytes = limits.max_job_bytes.saturating_add(HEADER_BYTES);
    Config {
        name: subjects.jobs_stream(),
        subjects: vec![subjects.job()],
        description: Some("durable requests that wait or run".to_owned()),
        retention: RetentionPolicy::WorkQueue,
        storage: StorageType::File,
        discard: DiscardPolicy::New,
        max_bytes: -1,
        max_messages: i64::try_from(limits.max_jobs).unwrap_or(i64::MAX),
        max_messages_per_subject: -1,
        max_message_size: i32::try_from(max_bytes).unwrap_or(i32::MAX),
        max_consumers: -1,
        num_replicas: 1,
        duplicate_window: limits.keep,
        ..Config::default()
    }
}

fn results(subjects: &Subjects, limits: &JobLimits) -> Config {
    let mut all = vec![subjects.result_all(), subjects.cancel_all()];
    all.sort();
    Config {
        name: subjects.results_stream(),
        subjects: all,
        description: Some("events of durable requests, and cancellations".to_owned()),
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        discard: DiscardPolicy::Old,
        max_bytes: i64::try_from(limits.keep_bytes).unwrap_or(i64::MAX),
        max_messages: -1,
        max_messages_per_subject: -1,
        max_consumers: -1,
        max_age: limits.keep,
        num_replicas: 1,
        // It may not be longer than the age of the oldest message.
        duplicate_window: DUPLICATES.min(limits.keep),
        ..Config::default()
    }
}

/// Makes a stream, or checks the one that is there and gives it our limits; replicas, placement
/// and storage stay as the operator chose them.
async fn ensure_stream(api: &Api, wanted: Config) -> Result<(), JobError> {
    let stream = wanted.name.clone();
    let found = match api.request::<Info>(&format!("STREAM.INFO.{stream}"), &json!({})).await {
        Ok(info) => info.config,
        Err(ApiError::NoStream { .. }) => {
            // Another coordinator may be as fast: making the same stream again changes nothing.
            let _made: Info = api.request(&format!("STREAM.CREATE.{stream}"), &wanted).await?;
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    check(&stream, "retention", &found.retention, &wanted.retention)?;
    let mut subjects = found.subjects.clone();
    subjects.sort();
    check(&stream, "subjects", &subjects, &wanted.subjects)?;
    let limited = Config {
        discard: wanted.discard,
        max_messages: wanted.max_messages,
        max_bytes: wanted.max_bytes,
        max_age: wanted.max_age,
        max_message_size: wanted.max_message_size,
        duplicate_window: wanted.duplicate_window,
        ..found.clone()
    };
    let differs = (limited.max_messages, limited.max_bytes, limited.max_age)
        != (found.max_messages, found.max_bytes, found.max_age)
        || (limited.duplicate_window, limited.max_message_size.max(-1))
            != (found.duplicate_window, found.max_message_size)
        || limited.discard != found.discard;
    if differs {
        let _updated: Info = api.request(&format!("STREAM.UPDATE.{stream}"), &limited).await?;
    }
    Ok(())
}

fn check<T: std::fmt::Debug + PartialEq>(
    stream: &str,
    field: &'static str,
    found: &T,
    expected: &T,
) -> Result<(), JobError> {
    if found == expected {
        return Ok(());
    }
    Err(JobError::Mismatch {
        stream: stream.to_owned(),
        field,
        found: format!("{found:?}"),
        expected: format!("{expected:?}"),
    })
}
