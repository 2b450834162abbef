//! Announcements for tests, of a fleet of two stages.

use stagebus_schemas::ids::StageIndex;
use stagebus_schemas::messages::fleet::{
    CoordinatorAnnouncement, WorkerAnnouncement, WorkerLoad, WorkerState,
};
use stagebus_schemas::version::MessageVersion;

/// A worker that is ready and holds one session.
///
/// # Panics
/// A name that is not valid.
#[must_use]
pub fn worker(model: &str, stage: u16, name: &str) -> WorkerAnnouncement {
    WorkerAnnouncement {
        version: MessageVersion::CURRENT,
        worker: name.parse().expect("an id"),
        model: model.parse().expect("a name"),
        fingerprint: "f".to_owned(),
        stage: StageIndex::new(stage),
        n_stages: 2,
        first_layer: u32::from(stage) * 15,
        end_layer: u32::from(stage) * 15 + 15,
        device: "CPU".to_owned(),
        profile: "fast".to_owned(),
        host: "box".to_owned(),
        state: WorkerState::Ready,
        interval_ms: 500,
        load: WorkerLoad {
            n_sessions: 1,
            max_sessions: 64,
            decode_us: 5250,
            ..WorkerLoad::default()
        },
    }
}

/// A coordinator that takes requests and runs one.
///
/// # Panics
/// A name that is not valid.
#[must_use]
pub fn coordinator(model: &str, name: &str) -> CoordinatorAnnouncement {
    CoordinatorAnnouncement {
        version: MessageVersion::CURRENT,
        coordinator: name.parse().expect("an id"),
        model: model.parse().expect("a name"),
        fingerprint: "f".to_owned(),
        n_stages: 2,
        host: "box".to_owned(),
        accepting: true,
        interval_ms: 500,
        n_sessions: 1,
        requests_done: 0,
        tokens_out: 0,
        tokens_drafted: 0,
        tokens_accepted: 0,
        recoveries: 0,
    }
}
