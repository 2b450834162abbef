//! The client of a request: where its events go, and in which encoding.

use std::sync::Arc;

use stagebus_schemas::codec::ContentType;

/// Where the events of a request go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// Reply subject of the request.
    pub(crate) reply: Arc<str>,
    /// Encoding of the request, and so of its events.
    pub(crate) content: ContentType,
}
