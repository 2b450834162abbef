//! Fleets with and without gaps.

use stagebus_schemas::version::MessageVersion;

use super::*;
use crate::testing;

fn worker(stage: u16, name: &str, fingerprint: &str, state: WorkerState) -> WorkerAnnouncement {
    let fingerprint = fingerprint.to_owned();
    WorkerAnnouncement { fingerprint, state, interval_ms: 300, ..testing::worker("m", stage, name) }
}

fn coordinator(name: &str, fingerprint: &str, accepting: bool) -> CoordinatorAnnouncement {
    let fingerprint = fingerprint.to_owned();
    CoordinatorAnnouncement {
        fingerprint,
        accepting,
        interval_ms: 300,
        ..testing::coordinator("m", name)
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
    let empty = |n_starting, n_leaving, n_other_shards| {
        [Problem::StageEmpty { stage: 1, n_starting, n_leaving, n_other_shards }]
    };
    let first = || worker(0, "a", "f", ready);
    let coordinators = || vec![coordinator("x", "f", true)];
    check(vec![first()], coordinators(), false, &empty(0, 0, 0));
    check(vec![first(), worker(1, "b", "f", draining)], coordinators(), false, &empty(0, 1, 0));
    check(vec![first(), worker(1, "b", "other", ready)], coordinators(), false, &empty(0, 0, 1));
    for starting in [WorkerState::Joining, WorkerState::Starting] {
        let workers = vec![first(), worker(1, "b", "f", starting)];
        check(workers, coordinators(), false, &empty(1, 0, 0));
    }
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
fn somebody_of_another_version_is_told_by_it_and_forgotten_after_a_while() {
    let (mut view, start) = (FleetView::default(), Instant::now());
    let found: MessageVersion = serde_json::from_str("5").expect("a version");
    let other = CodecError::Version { found, expected: MessageVersion::CURRENT };
    view.hear_stranger("a.b", &other, start);
    view.hear_stranger("a.b", &other, start + Duration::from_secs(5));
    view.hear_stranger("a.c", &CodecError::Trailing { bytes: 1 }, start);
    let versions = |view: &FleetView| view.strangers().map(|s| s.version).collect::<Vec<_>>();
    assert_eq!(versions(&view), [Some(5), None]);
    assert!(view.models().is_empty());
    view.forget_silent(start + Duration::from_secs(10));
    assert_eq!(versions(&view), [Some(5)]);
}

#[test]
fn messages_are_taken_in_by_their_subjects() {
    let (mut view, now) = (FleetView::default(), Instant::now());
    let ready = worker(0, "w0-a", "f", WorkerState::Ready);
    let subjects = Subjects::new(&ready.model);
    let subject = subjects.worker(ready.stage, &ready.worker);
    let payload = codec::encode(&ready).expect("a message");
    assert_eq!(view.hear(&subject, &payload, now).expect("a worker"), subjects);
    let chief = coordinator("c-x", "f", true);
    let payload = codec::encode(&chief).expect("a message");
    view.hear(&subjects.coordinator(&chief.coordinator), &payload, now).expect("a coordinator");
    assert_eq!((view.workers().count(), view.coordinators().count()), (1, 1));

    let unreadable = view.hear(&subject, &payload, now);
    assert!(matches!(unreadable, Err(HearError::Unreadable { .. })), "{unreadable:?}");
    assert_eq!(view.strangers().next().map(|stranger| &stranger.subject), Some(&subject));
    for stray in [subjects.prompt(), "a.b".to_owned()] {
        let refused = view.hear(&stray, &payload, now);
        assert!(matches!(refused, Err(HearError::Subject { .. })), "{refused:?}");
    }
}

#[test]
fn what_is_remembered_has_a_bound() {
    let (mut view, now) = (FleetView::default(), Instant::now());
    for n in 0..=MAX_MEMBERS {
        view.hear_coordinator(coordinator(&format!("c-{n}"), "f", true), now);
    }
    assert_eq!(view.coordinators().count(), MAX_MEMBERS);
    view.hear_coordinator(coordinator("c-0", "f", false), now);
    let first = view.coordinators().next().map(|heard| heard.announcement.accepting);
    assert_eq!(first, Some(false), "those that are known are followed");
}
