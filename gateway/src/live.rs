//! `/fleet` and `/fleet/events`: the fleet as it is, once and as it changes.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream;
use tokio::sync::watch;

use crate::answers::UNBUFFERED;
use crate::fleet::FleetDocument;
use crate::gateway::Shared;

/// After so much silence a comment shows that the stream lives.
const SILENCE: Duration = Duration::from_secs(10);

/// One document.
pub(crate) async fn show(State(gateway): State<Shared>) -> Response<Body> {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (headers, gateway.fleet().borrow().to_string()).into_response()
}

/// A document at once, and one for each change, until the gateway ends.
pub(crate) async fn follow(State(gateway): State<Shared>) -> Response<Body> {
    let mut fleet = gateway.fleet();
    fleet.mark_changed();
    let events = Sse::new(stream::unfold(fleet, next));
    let mut response = events.keep_alive(KeepAlive::new().interval(SILENCE)).into_response();
    response.headers_mut().insert(UNBUFFERED, HeaderValue::from_static("no"));
    response
}

type Fleet = watch::Receiver<FleetDocument>;

/// A reader that is slow gets the newest document and none of those between.
async fn next(mut fleet: Fleet) -> Option<(Result<Event, Infallible>, Fleet)> {
    fleet.changed().await.ok()?;
    let document = FleetDocument::clone(&fleet.borrow_and_update());
    Some((Ok(Event::default().data(&*document)), fleet))
}
