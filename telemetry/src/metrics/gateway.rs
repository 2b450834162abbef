//! The metrics of a gateway.

use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::{Counter, Gauge, long_times, register};
use crate::names::{self, ROUTE, STATUS};

/// What a gateway counts and measures; clones share it. What each field is stands in
/// [`names::gateway`].
#[derive(Debug, Clone)]
pub struct GatewayMetrics {
    /// [`names::gateway::CONNECTIONS`].
    pub connections: Gauge,
    /// [`names::gateway::ANSWERS`].
    pub answers: Gauge,
    /// [`names::gateway::PROMPT_TOKENS`].
    pub prompt_tokens: Counter,
    /// [`names::gateway::COMPLETION_TOKENS`].
    pub completion_tokens: Counter,
    /// [`names::gateway::CANCELLED`].
    pub cancelled: Counter,
    /// [`names::gateway::CANCELS_LOST`].
    pub cancels_lost: Counter,
    /// [`names::gateway::BROKER_CONNECTED`].
    pub broker_connected: Gauge,
    /// [`names::gateway::MODELS`].
    pub models: Gauge,
    /// [`names::gateway::SLOW_CONSUMER`].
    pub slow_consumer: Counter,
    /// [`names::gateway::RECONNECTS`].
    pub reconnects: Counter,
    responses: Family<[(&'static str, String); 2], Counter>,
    first_token: Histogram,
    answer: Histogram,
}

impl GatewayMetrics {
    /// A set that `registry` shows.
    #[must_use]
    pub fn registered(registry: &mut Registry) -> Self {
        let set = Self {
            connections: Gauge::default(),
            answers: Gauge::default(),
            prompt_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            cancelled: Counter::default(),
            cancels_lost: Counter::default(),
            broker_connected: Gauge::default(),
            models: Gauge::default(),
            slow_consumer: Counter::default(),
            reconnects: Counter::default(),
            responses: Family::default(),
            first_token: long_times(),
            answer: long_times(),
        };
        register(registry, &names::gateway::RESPONSES, set.responses.clone());
        register(registry, &names::gateway::CONNECTIONS, set.connections.clone());
        register(registry, &names::gateway::ANSWERS, set.answers.clone());
        register(registry, &names::gateway::FIRST_TOKEN, set.first_token.clone());
        register(registry, &names::gateway::ANSWER, set.answer.clone());
        register(registry, &names::gateway::PROMPT_TOKENS, set.prompt_tokens.clone());
        register(registry, &names::gateway::COMPLETION_TOKENS, set.completion_tokens.clone());
        register(registry, &names::gateway::CANCELLED, set.cancelled.clone());
        register(registry, &names::gateway::CANCELS_LOST, set.cancels_lost.clone());
        register(registry, &names::gateway::BROKER_CONNECTED, set.broker_connected.clone());
        register(registry, &names::gateway::MODELS, set.models.clone());
        register(registry, &names::gateway::SLOW_CONSUMER, set.slow_consumer.clone());
        register(registry, &names::gateway::RECONNECTS, set.reconnects.clone());
        set
    }

    /// A response was given; `route` is a route's pattern, never a path that a client chose.
    pub fn response(&self, route: &str, status: u16) {
        let labels = [(ROUTE, route.to_owned()), (STATUS, status.to_string())];
        self.responses.get_or_create(&labels).inc();
    }

    /// The first token of an answer came after this time.
    pub fn first_token(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    /// The last answer to a request ended after this time.
    pub fn answered(&self, time: Duration) {
        self.answer.observe(time.as_secs_f64());
    }
}
