//! The tables of `stagebus status`: a model, its workers and its coordinators, for people.

use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement, WorkerState};
use stagebus_view::ModelView;

use crate::console;

/// Digits of a fingerprint that are shown.
const SHOWN_FINGERPRINT: usize = 12;

/// Describes a model for people.
pub(super) fn describe(model: &ModelView) -> String {
    let state = if model.served { "served" } else { "CANNOT BE SERVED" };
    let mut text = format!("{}: {state}, {} stages\n", model.model, model.n_stages);
    for problem in &model.problems {
        text.push_str(&format!("  ! {problem}\n"));
    }
    let rows: Vec<_> = model.workers.iter().map(worker_row).collect();
    if !rows.is_empty() {
        let header = [
            "stage",
            "layers",
            "worker",
            "state",
            "sessions",
            "queue",
            "kv tokens",
            "kv MiB",
            "ms",
            "device",
            "profile",
            "host",
            "shards",
        ];
        text.push_str(&console::table(&header, &rows));
    }
    let rows: Vec<_> = model.coordinators.iter().map(coordinator_row).collect();
    if !rows.is_empty() {
        let header = [
            "coordinator",
            "state",
            "sessions",
            "done",
            "tokens",
            "drafted",
            "accepted",
            "replays",
            "host",
            "shards",
        ];
        text.push_str(&console::table(&header, &rows));
    }
    text
}

fn worker_row(worker: &WorkerAnnouncement) -> Vec<String> {
    let load = &worker.load;
    #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
    let kv_mib = load.kv_bytes as f64 / f64::from(1 << 20);
    let state = match worker.state {
        WorkerState::Joining => "joining",
        WorkerState::Starting => "starting",
        WorkerState::Ready => "ready",
        WorkerState::Draining => "draining",
        WorkerState::Leaving => "leaving",
    };
    vec![
        worker.stage.to_string(),
        format!("{}..{}", worker.first_layer, worker.end_layer),
        worker.worker.to_string(),
        state.to_owned(),
        format!("{}/{}", load.n_sessions, load.max_sessions),
        load.queue_depth.to_string(),
        load.kv_tokens.to_string(),
        format!("{kv_mib:.1}"),
        format!("{:.2}", f64::from(load.decode_us) / 1e3),
        worker.device.clone(),
        worker.profile.clone(),
        worker.host.clone(),
        shown_fingerprint(&worker.fingerprint),
    ]
}

fn coordinator_row(coordinator: &CoordinatorAnnouncement) -> Vec<String> {
    vec![
        coordinator.coordinator.to_string(),
        if coordinator.accepting { "ready" } else { "draining" }.to_owned(),
        coordinator.n_sessions.to_string(),
        coordinator.requests_done.to_string(),
        coordinator.tokens_out.to_string(),
        coordinator.tokens_drafted.to_string(),
        coordinator.tokens_accepted.to_string(),
        coordinator.recoveries.to_string(),
        coordinator.host.clone(),
        shown_fingerprint(&coordinator.fingerprint),
    ]
}

fn shown_fingerprint(fingerprint: &str) -> String {
    fingerprint.get(..SHOWN_FINGERPRINT).unwrap_or(fingerprint).to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use stagebus_view::{FleetView, testing};

    use super::*;

    #[test]
    fn the_description_names_everybody_and_every_problem() {
        let fingerprint = "0123456789abcdef".to_owned();
        let (mut view, now) = (FleetView::default(), Instant::now());
        let worker = testing::worker("m", 0, "w0-a");
        view.hear_worker(WorkerAnnouncement { fingerprint: fingerprint.clone(), ..worker }, now);
        let coordinator = testing::coordinator("m", "c-x");
        view.hear_coordinator(CoordinatorAnnouncement { fingerprint, ..coordinator }, now);
        let text = describe(&view.models()[0]);
        for part in ["m: CANNOT BE SERVED", "! stage 1 has nobody", "w0-a", "1/64", "5.25", "c-x"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(!text.contains("0123456789abcdef"), "fingerprints are shortened\n{text}");
    }
}
