//! What the gateway counts, for Prometheus. No id, key or model is a label.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// What all names start with.
pub const PREFIX: &str = "stagebus_gateway";
/// Responses by route and status; `_total` follows.
pub const RESPONSES: &str = "responses";
/// Connections that stand.
pub const CONNECTIONS: &str = "connections";
/// Answers under way.
pub const ANSWERS: &str = "answers";
/// Time from a request to the first token of its first answer; `_seconds` follows.
pub const FIRST_TOKEN: &str = "first_token";
/// Time from a request to the end of its last answer; `_seconds` follows.
pub const ANSWER: &str = "answer";
/// Tokens of prompts; `_total` follows.
pub const PROMPT_TOKENS: &str = "prompt_tokens";
/// Tokens generated; `_total` follows.
pub const COMPLETION_TOKENS: &str = "completion_tokens";
/// Answers cancelled because their client left, or their time was over; `_total` follows.
pub const CANCELLED: &str = "cancelled";
/// Cancellations that were not sent; the coordinator notices the absent client by itself.
/// `_total` follows.
pub const CANCELS_LOST: &str = "cancels_lost";
/// 1 while the connection to the broker stands.
pub const BROKER_CONNECTED: &str = "broker_connected";
/// Models that are served.
pub const MODELS: &str = "models";

/// Type of the text that [`Metrics::encode`] makes.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Labels of [`RESPONSES`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    route: String,
    status: u16,
}

/// All metrics of a gateway.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    responses: Family<ResponseLabels, Counter>,
    pub(crate) connections: Gauge,
    pub(crate) answers: Gauge,
    first_token: Histogram,
    answer: Histogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) completion_tokens: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) cancels_lost: Counter,
    broker_connected: Gauge,
    models: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        // From 10 ms to about 10 minutes, each twice the one before.
        let seconds = || Histogram::new(exponential_buckets(0.01, 2.0, 17));
        let (first_token, answer) = (seconds(), seconds());
        let times = [
            (FIRST_TOKEN, "From a request to the first token of an answer", &first_token),
            (ANSWER, "From a request to the end of its answers", &answer),
        ];
        for (name, help, metric) in times {
            registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
        }
        let responses = Family::<ResponseLabels, Counter>::default();
        registry.register(RESPONSES, "Responses by route and status", responses.clone());
        let counter = |registry: &mut Registry, name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let gauge = |registry: &mut Registry, name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let r = &mut registry;
        Self {
            connections: gauge(r, CONNECTIONS, "Connections that stand"),
            answers: gauge(r, ANSWERS, "Answers under way"),
            prompt_tokens: counter(r, PROMPT_TOKENS, "Tokens of prompts"),
            completion_tokens: counter(r, COMPLETION_TOKENS, "Tokens generated"),
            cancelled: counter(r, CANCELLED, "Answers cancelled by client or time limit"),
            cancels_lost: counter(r, CANCELS_LOST, "Cancellations that were not sent"),
            broker_connected: gauge(r, BROKER_CONNECTED, "1 while the broker is connected"),
            models: gauge(r, MODELS, "Models that are served"),
            responses,
            first_token,
            answer,
            registry,
        }
    }

    /// Counts a response; `route` is a route's pattern, never a path that a client chose.
    pub(crate) fn response(&self, route: &str, status: u16) {
        let labels = ResponseLabels { route: route.to_owned(), status };
        self.responses.get_or_create(&labels).inc();
    }

    pub(crate) fn first_token_after(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    pub(crate) fn answered_after(&self, time: Duration) {
        self.answer.observe(time.as_secs_f64());
    }

    /// The text for Prometheus, with what is only known when it is asked for.
    ///
    /// # Errors
    /// Never in practice: text is written to memory.
    pub(crate) fn encode(
        &self,
        connected: bool,
        n_models: usize,
    ) -> Result<String, std::fmt::Error> {
        self.broker_connected.set(i64::from(connected));
        self.models.set(i64::try_from(n_models).unwrap_or(i64::MAX));
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_prefix_unit_and_suffix() {
        let metrics = Metrics::new();
        metrics.response("/v1/models", 200);
        metrics.first_token_after(Duration::from_millis(15));
        metrics.prompt_tokens.inc_by(7);
        let text = metrics.encode(true, 2).expect("text");
        for line in [
            "stagebus_gateway_responses_total{route=\"/v1/models\",status=\"200\"} 1",
            "stagebus_gateway_first_token_seconds_bucket{le=\"0.02\"} 1",
            "stagebus_gateway_prompt_tokens_total 7",
            "stagebus_gateway_broker_connected 1",
            "stagebus_gateway_models 2",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line:?} is missing in\n{text}");
        }
    }
}
