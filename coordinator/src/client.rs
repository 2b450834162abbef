//! The client of a request: where its events go, and in which encoding.

use std::sync::Arc;

use stagebus_schemas::codec::ContentType;

use crate::jobs::JobKey;

/// Where the events of a request go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// Reply subject of the request; of a job, the subject of its results.
    pub(crate) reply: Arc<str>,
    /// Encoding of the request, and so of its events.
    pub(crate) content: ContentType,
    /// The job, if its events are stored instead of sent.
    pub(crate) job: Option<JobKey>,
}
