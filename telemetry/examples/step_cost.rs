//! Measures what the metrics cost a step: `cargo run --release -p stagebus-telemetry --example
//! step_cost`. Prints nanoseconds, the median of some rounds.

use std::hint::black_box;
use std::io::Write as _;
use std::time::{Duration, Instant};

use stagebus_schemas::messages::forward::Phase;
use stagebus_telemetry::{CoordinatorMetrics, Registry, WorkerMetrics, mirror};

/// Changes in a round: long enough for the clock.
const STEPS: u32 = 200_000;

/// Rounds, whose median counts.
const ROUNDS: usize = 21;

fn main() -> std::io::Result<()> {
    let mut registry = Registry::default();
    let worker = WorkerMetrics::registered(&mut registry, 0);
    let coordinator = CoordinatorMetrics::registered(&mut registry);
    let on_worker = median(|| one_step_of_a_worker(&worker));
    let on_coordinator = median(|| one_step_of_a_coordinator(&coordinator));
    let mut out = std::io::stdout().lock();
    writeln!(out, "worker: {on_worker:.0} ns a decode step that runs alone")?;
    writeln!(out, "coordinator: {on_coordinator:.0} ns a decode step of one token")
}

/// What the owner and the inference thread of a worker change for one step.
fn one_step_of_a_worker(worker: &WorkerMetrics) {
    let time = black_box(Duration::from_micros(5_300));
    worker.received.inc_by(2_500);
    worker.queue_steps.inc_by(1);
    for counter in [
        &worker.steps_duplicate,
        &worker.steps_refused,
        &worker.malformed,
        &worker.expired,
        &worker.unheard,
        &worker.slow_consumer,
        &worker.reconnects,
    ] {
        mirror(counter, black_box(0));
    }
    worker.sessions.set(1);
    worker.ready.set(1);
    worker.micro_batch(1, 1);
    worker.step_started(time);
    worker.decode(time);
    worker.steps_done.inc_by(1);
    worker.steps_failed.inc_by(0);
    worker.queue_steps.dec_by(1);
    worker.kv(black_box(500), 5_000_000, 500_000_000);
    worker.sent_direct.inc_by(2_500);
}

/// What the owner of a coordinator changes for the answer to one step.
fn one_step_of_a_coordinator(coordinator: &CoordinatorMetrics) {
    let time = black_box(Duration::from_micros(12_000));
    coordinator.step(Phase::Decode, time);
    coordinator.hop(time / 3);
    coordinator.more_tokens(1, time);
    coordinator.generated_tokens.inc_by(1);
    // Once when the answer is taken in, once when its tokens have become text.
    for _ in 0..2 {
        for counter in [
            &coordinator.drafted_tokens,
            &coordinator.accepted_tokens,
            &coordinator.late_answers,
            &coordinator.refused_announcements,
        ] {
            mirror(counter, black_box(3));
        }
        coordinator.sessions.set(1);
        coordinator.queued.set(0);
    }
    mirror(&coordinator.slow_consumer, black_box(0));
    mirror(&coordinator.reconnects, black_box(0));
}

/// Nanoseconds of one call.
fn median(step: impl Fn()) -> f64 {
    let mut rounds: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            (0..STEPS).for_each(|_| step());
            started.elapsed()
        })
        .collect();
    rounds.sort_unstable();
    rounds[ROUNDS / 2].as_secs_f64() * 1e9 / f64::from(STEPS)
}
