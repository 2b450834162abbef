//! The client of a request: where its events go, and in which form.

use std::sync::Arc;

use stagebus_schemas::cloud_events::{Packing, PublicHeaders};
use stagebus_schemas::codec::ContentType;
use stagebus_schemas::ids::RequestId;

use crate::jobs::JobKey;

/// Where the events of a request go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// Reply subject of the request; of a job, the subject of its results.
    pub(crate) reply: Arc<str>,
    /// Encoding of the request, and so of its events.
    pub(crate) content: ContentType,
    /// How its events are packed.
    pub(crate) packing: Packing,
    /// Name of the request, once it is read.
    pub(crate) request: Option<Arc<RequestId>>,
    /// The job, if its events are stored instead of sent.
    pub(crate) job: Option<JobKey>,
}

impl Client {
    /// The client of a message. One whose headers are not understood hears that in the packing of
    /// its message.
    pub(crate) fn new(reply: Arc<str>, headers: &PublicHeaders<'_>, payload: &[u8]) -> Self {
        Self {
            reply,
            content: headers.content(payload),
            packing: headers.answer().unwrap_or_else(|_refused_later| headers.packing()),
            request: None,
            job: None,
        }
    }
}
