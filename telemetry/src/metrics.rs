//! Handles of the metrics: each process holds one set and changes it as things happen.
//!
//! A change is one atomic addition, or for a histogram a lock that nobody holds for longer than a
//! few nanoseconds; a scrape takes the same locks one by one. Sets exist whether somebody scrapes
//! or not, so nothing else depends on it.

mod coordinator;
mod gateway;
mod worker;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::text;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric as Registrable, Registry, Unit};

pub use coordinator::{CoordinatorMetrics, Outcome, Recovery};
pub use gateway::GatewayMetrics;
pub use prometheus_client::metrics::counter::Counter;
pub use worker::WorkerMetrics;

use crate::names::{Kind, Metric};

/// Type of the text that [`encode`] makes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Writes what is registered, as Prometheus reads it.
///
/// # Errors
/// A metric cannot be written; there is no such metric.
pub fn encode(registry: &Registry) -> Result<String, fmt::Error> {
    let mut body = String::new();
    text::encode(&mut body, registry)?;
    Ok(body)
}

/// A number that rises and falls.
pub type Gauge = prometheus_client::metrics::gauge::Gauge<u64, AtomicU64>;

/// One label with one of a few values.
type Label = [(&'static str, &'static str); 1];

/// Takes over a count that is kept elsewhere.
pub fn mirror(counter: &Counter, count: u64) {
    counter.inner().store(count, Ordering::Relaxed);
}

/// Shows `handle` as `metric`.
fn register(registry: &mut Registry, metric: &Metric, handle: impl Registrable) {
    // The encoder adds these endings again.
    let base = match metric.kind {
        Kind::Counter => metric.name.strip_suffix("_total").unwrap_or(metric.name),
        Kind::Gauge | Kind::Histogram => metric.name,
    };
    let unit = match metric.unit() {
        Some("seconds") => Some(Unit::Seconds),
        Some("bytes") => Some(Unit::Bytes),
        _ => None,
    };
    match unit {
        None => registry.register(base, metric.meaning, handle),
        Some(unit) => {
            let name = base.strip_suffix(unit.as_str()).unwrap_or(base).trim_end_matches('_');
            registry.register_with_unit(name, metric.meaning, unit, handle);
        }
    }
}

/// A histogram of inference times and times on the way: 0.1 ms to 52 s.
fn short_times() -> Histogram {
    Histogram::new(exponential_buckets(1e-4, 2.0, 20))
}

/// A histogram of times of whole requests: 1 ms to 524 s.
fn long_times() -> Histogram {
    Histogram::new(exponential_buckets(1e-3, 2.0, 20))
}

/// A histogram of counts: 1 to 2^(n - 1).
fn counts(n: u16) -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, n))
}

/// Counters by one label, all of whose values are there from the start: a rate needs the 0.
fn counters(
    label: &'static str,
    values: impl IntoIterator<Item = &'static str>,
) -> Family<Label, Counter> {
    let family = Family::default();
    for value in values {
        drop(family.get_or_create(&[(label, value)]));
    }
    family
}

#[cfg(test)]
mod tests;
