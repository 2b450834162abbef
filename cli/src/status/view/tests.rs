//! Fleets with and without gaps.

use stagebus_schemas::messages::fleet::WorkerLoad;
use stagebus_schemas::version::MessageVersion;

use super::*;

fn model() -> ModelName {
    ModelName::new("m").expect("a valid name")
}

fn worker(stage: u16, name: &str, fingerprint: &str, state: WorkerState) -> WorkerAnnouncement {
    WorkerAnnouncement {
        version: MessageVersion::CURRENT,
        worker: WorkerId::new(name).expect("a valid id"),
        model: model(),
        fingerprint: fingerprint.to_owned(),
        stage: StageIndex::new(stage),
        n_stages: 2,
        first_layer: u32::from(stage) * 15,
        end_layer: u32::from(stage) * 15 + 15,
        device: "CPU".to_owned(),
        profile: "fast".to_owned(),
        host: "box".to_owned(),
        state,
        interval_ms: 300,
        load: WorkerLoad {
            n_sessions: 1,
            max_sessions: 32,
            queue_depth: 0,
            kv_tokens: 40,
            kv_bytes: 1 << 20,
            kv_max_bytes: 0,
            steps_completed: 5,
            decode_us: 5250,
            prefill_row_us: 300,
            ..WorkerLoad::default()
        },
    }
}

fn coordinator(name: &str, fingerprint: &str, accepting: bool) -> CoordinatorAnnouncement {
    CoordinatorAnnouncement {
        version: MessageVersion::CURRENT,
        coordinator: CoordinatorId::new(name).expect("a valid id"),
        model: model(),
        fingerprint: fingerprint.to_owned(),
        n_stages: 2,
        host: "box".to_owned(),
        accepting,
        interval_ms: 300,
        n_sessions: 1,
        requests_done: 3,
        tokens_out: 90,
        tokens_drafted: 40,
        tokens_accepted: 30,
        recoveries: 0,
    }
}

fn view(
    workers: Vec<WorkerAnnouncement>,
    coordinators: Vec<CoordinatorAnnouncement>,
) -> Vec<ModelView> {
    let mut view = FleetView::default();
    let now = Instant::now();
    workers.into_iter().for_each(|worker| view.hear_worker(worker, now));
    coordinators.into_iter().for_each(|coordinator| view.hear_coordinator(coordinator, now));
    view.models()
}

fn check(
    workers: Vec<WorkerAnnouncement>,
    coordinators: Vec<CoordinatorAnnouncement>,
    served: bool,
    problems: &[Problem],
) {
    let models = view(workers, coordinators);
    assert_eq!(models.len(), 1);
    assert_eq!(models[0].problems, problems);
    assert_eq!(models[0].served, served);
}

#[test]
fn a_full_fleet_is_served() {
    let ready = WorkerState::Ready;
    check(
        vec![worker(0, "a", "f", ready), worker(1, "b", "f", ready), worker(1, "c", "f", ready)],
        vec![coordinator("x", "f", true)],
        true,
        &[],
    );
    assert!(view(vec![], vec![]).is_empty());
}

#[test]
fn a_stage_without_a_usable_worker_is_named() {
    let (ready, draining) = (WorkerState::Ready, WorkerState::Draining);
    let empty =
        |n_leaving, n_other_shards| [Problem::StageEmpty { stage: 1, n_leaving, n_other_shards }];
    let first = || worker(0, "a", "f", ready);
    let coordinators = || vec![coordinator("x", "f", true)];
    check(vec![first()], coordinators(), false, &empty(0, 0));
    check(vec![first(), worker(1, "b", "f", draining)], coordinators(), false, &empty(1, 0));
    check(vec![first(), worker(1, "b", "other", ready)], coordinators(), false, &empty(0, 1));
}

#[test]
fn a_fleet_without_a_coordinator_is_not_served() {
    let workers =
        || vec![worker(0, "a", "f", WorkerState::Ready), worker(1, "b", "f", WorkerState::Ready)];
    check(workers(), vec![], false, &[Problem::NoCoordinator { n_leaving: 0 }]);
    let leaving = vec![coordinator("x", "f", false)];
    check(workers(), leaving, false, &[Problem::NoCoordinator { n_leaving: 1 }]);
}

#[test]
fn coordinators_with_different_shards_are_a_warning() {
    let workers =
        vec![worker(0, "a", "f", WorkerState::Ready), worker(1, "b", "f", WorkerState::Ready)];
    let mixed = Problem::MixedShards { fingerprints: vec!["f".to_owned(), "g".to_owned()] };
    let coordinators = vec![coordinator("x", "f", true), coordinator("y", "g", true)];
    check(workers, coordinators, true, &[mixed]);
}

#[test]
fn a_worker_that_leaves_is_forgotten_and_news_replace_the_old() {
    let (mut view, now) = (FleetView::default(), Instant::now());
    view.hear_worker(worker(0, "a", "f", WorkerState::Ready), now);
    view.hear_worker(worker(0, "a", "f", WorkerState::Draining), now);
    assert_eq!(view.models()[0].workers.len(), 1);
    assert_eq!(view.models()[0].workers[0].state, WorkerState::Draining);
    view.hear_worker(worker(0, "a", "f", WorkerState::Leaving), now);
    assert!(view.models().is_empty());
}

#[test]
fn who_misses_three_announcements_is_forgotten() {
    let (mut view, start) = (FleetView::default(), Instant::now());
    let at = |ms| start + Duration::from_millis(ms);
    view.hear_worker(worker(0, "a", "f", WorkerState::Ready), start);
    view.hear_worker(worker(1, "b", "f", WorkerState::Ready), at(300));
    view.hear_coordinator(coordinator("x", "f", true), start);
    view.forget_silent(at(899));
    assert_eq!((view.workers().count(), view.models()[0].coordinators.len()), (2, 1));
    view.forget_silent(at(900));
    let left: Vec<_> = view.workers().map(|heard| heard.announcement.worker.as_str()).collect();
    assert_eq!((left, view.models()[0].coordinators.len()), (vec!["b"], 0));
}

#[test]
fn somebody_of_another_version_is_told_by_it() {
    let mut view = FleetView::default();
    let found: MessageVersion = serde_json::from_str("5").expect("a version");
    let other = CodecError::Version { found, expected: MessageVersion::CURRENT };
    view.hear_stranger("a.b", &other);
    view.hear_stranger("a.b", &other);
    view.hear_stranger("a.c", &CodecError::Trailing { bytes: 1 });
    let versions: Vec<_> = view.strangers().map(|stranger| stranger.version).collect();
    assert_eq!(versions, [Some(5), None]);
    assert!(view.models().is_empty());
}

#[test]
fn the_description_names_everybody_and_every_problem() {
    let workers = vec![worker(0, "w0-a", "0123456789abcdef", WorkerState::Ready)];
    let coordinators = vec![coordinator("c-x", "0123456789abcdef", true)];
    let text = view(workers, coordinators)[0].describe();
    for part in ["m: CANNOT BE SERVED", "! stage 1 has nobody", "w0-a", "1/32", "5.25", "c-x"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    assert!(!text.contains("0123456789abcdef"), "fingerprints are shortened\n{text}");
}
