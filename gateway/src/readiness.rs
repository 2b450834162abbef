//! Whether requests can be answered: a token came a moment ago, or one comes when asked for.
//!
//! One task answers all who ask, one after the other, so that at most one probe is under way
//! however many ask.

use std::time::Duration;

use futures::future::join_all;
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_schemas::trace::TraceContext;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::gateway::Shared;
use crate::generation::Generation;

/// A token that came within this time shows that requests are answered.
const RECENT: Duration = Duration::from_secs(10);

/// How long the outcome of a probe holds.
const CACHED: Duration = Duration::from_secs(3);

/// How long a probe may take.
const PROBE: Duration = Duration::from_secs(5);

/// Keeps probes out of traces: nobody records this span.
const UNTRACED: TraceContext = TraceContext { trace_id: 1, span_id: 1, is_sampled: false };

/// Whether requests can be answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// They can.
    Ready,
    /// No model is served.
    NoModel,
    /// No model gave a token when asked for one.
    NoToken,
    /// Too many ask at the same time, or the gateway is ending.
    Unknown,
}

/// Answers all who ask until `stop` is cancelled.
pub(crate) async fn answer(
    gateway: Shared,
    mut asked: mpsc::Receiver<oneshot::Sender<Readiness>>,
    stop: CancellationToken,
) {
    let mut known: Option<(Readiness, Instant)> = None;
    loop {
        let ask = tokio::select! {
            ask = asked.recv() => ask,
            () = stop.cancelled() => None,
        };
        let Some(ask) = ask else { return };
        let readiness = match &known {
            _ if gateway.token_came_within(RECENT) => Readiness::Ready,
            Some((readiness, at)) if at.elapsed() < CACHED => readiness.clone(),
            _ => {
                let readiness = tokio::select! {
                    readiness = probe(&gateway) => readiness,
                    () = stop.cancelled() => Readiness::Unknown,
                };
                known = Some((readiness.clone(), Instant::now()));
                readiness
            }
        };
        // Whoever asked may be gone.
        drop(ask.send(readiness));
    }
}

/// Asks every model for one token; one that answers is enough.
async fn probe(gateway: &Shared) -> Readiness {
    let models = gateway.models();
    if models.is_empty() {
        return Readiness::NoModel;
    }
    let deadline = Instant::now() + PROBE;
    let probes = models.iter().map(|model| async move {
        let request = PromptRequest {
            tokens: Some(vec![0]),
            max_tokens: Some(1),
            stream: Some(false),
            ..PromptRequest::default()
        };
        let trace = Some(UNTRACED);
        let generation = Generation::begin(gateway, &model.name, request, trace, deadline).await?;
        generation.finish().await
    });
    if join_all(probes).await.iter().any(Result::is_ok) {
        Readiness::Ready
    } else {
        Readiness::NoToken
    }
}
