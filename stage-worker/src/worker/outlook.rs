//! What a worker shows of itself, and what it sees of its connection.

use std::time::{Duration, Instant};

use stagebus_bus::BusEvent;
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerLoad, WorkerState};
use stagebus_schemas::version::MessageVersion;
use stagebus_telemetry::mirror;

use super::{Counters, Worker};
use crate::results::u32_of;

impl Worker {
    /// Publishes the worker's state and load.
    pub(crate) fn announce(&mut self) {
        let announcement = WorkerAnnouncement {
            version: MessageVersion::CURRENT,
            worker: self.stage.worker.clone(),
            model: self.stage.model.clone(),
            fingerprint: self.stage.fingerprint.clone(),
            stage: self.stage.index,
            n_stages: self.stage.n_stages,
            first_layer: self.stage.first_layer,
            end_layer: self.stage.end_layer,
            device: self.limits.device.clone(),
            profile: self.limits.profile.clone(),
            host: self.limits.host.clone(),
            state: self.state,
            interval_ms: u32::try_from(self.limits.announce_interval.as_millis())
                .unwrap_or(u32::MAX),
            load: self.load(),
        };
        let subject = self.stage.subjects.worker(self.stage.index, &self.stage.worker);
        self.post(subject, &announcement);
    }

    /// Lets the metrics follow the state.
    pub(super) fn show(&self) {
        // Every coordinator beyond the limit announces itself twice a second: a log line tells.
        let Counters { duplicates, refused, malformed, expired, unheard, unfollowed: _ } =
            self.counters;
        let metrics = &self.metrics;
        mirror(&metrics.steps_duplicate, duplicates);
        mirror(&metrics.steps_refused, refused);
        mirror(&metrics.malformed, malformed);
        mirror(&metrics.expired, expired);
        mirror(&metrics.unheard, unheard);
        metrics.sessions.set(self.sessions.len() as u64);
        metrics.ready.set(u64::from(self.state == WorkerState::Ready));
    }

    /// Nothing is repaired here: the announced number of losses tells the coordinators to look
    /// after their steps.
    pub(super) fn on_connection(&mut self, event: BusEvent) {
        let stage_index = self.stage.index;
        match event {
            BusEvent::Connected => {
                tracing::info!(%stage_index, "connected to the broker");
                self.sessions.restart_clocks(Instant::now());
                self.announce();
            }
            BusEvent::Disconnected => {
                self.losses += 1;
                tracing::warn!(%stage_index, "connection to the broker lost");
            }
            BusEvent::SlowConsumer => {
                self.losses += 1;
                tracing::warn!(%stage_index, "messages dropped, this worker reads too slowly");
                self.announce();
            }
            BusEvent::Missed(n) => tracing::warn!(%stage_index, n, "connection events missed"),
            BusEvent::LameDuck => tracing::warn!(%stage_index, "the broker will end soon"),
            BusEvent::PermissionViolation(error) => {
                tracing::error!(%stage_index, %error, "an answer cannot be sent");
            }
            BusEvent::ReconnectFailed(text) => tracing::debug!(%stage_index, text, "no broker yet"),
            BusEvent::ServerError(text) => tracing::error!(%stage_index, text, "broker error"),
            // The intake ends on these two.
            BusEvent::AuthRefused | BusEvent::Closed => {}
        }
    }

    pub(super) fn load(&self) -> WorkerLoad {
        let load = self.inference.load();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "smoothed non-negative u32 measurements"
        )]
        let whole = |us: f64| us.round() as u32;
        let running = load.running.filter(|_| self.inference.queued() > 0);
        let ms = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        WorkerLoad {
            busy_ms: running.map_or(0, |batch| ms(batch.since.elapsed())),
            expected_ms: running
                .and_then(|batch| batch.expected)
                .map_or(0, |expected| ms(expected).max(1)),
            losses: self.losses,
            n_sessions: u32_of(self.sessions.len()),
            max_sessions: u32_of(self.limits.max_sessions),
            queue_depth: self.inference.queued(),
            kv_tokens: load.kv_tokens,
            kv_bytes: load.kv_bytes,
            kv_max_bytes: load.kv_max_bytes,
            steps_completed: load.steps_completed,
            rows_completed: load.rows_completed,
            decode_us: whole(load.decode_us),
            prefill_row_us: whole(load.prefill_row_us),
        }
    }
}
