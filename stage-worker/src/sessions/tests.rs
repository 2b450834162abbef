//! The rules of the session table, driven by hand.

use stagebus_schemas::ids::StageIndex;
use stagebus_schemas::messages::control::{HeadMode, Priority};
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::messages::sampling::Sampling;

use super::*;
use crate::stage_fixture::{FINGERPRINT, stage, worker};

const SESSION: SessionId = SessionId::from_u64(1);

fn open_at(epoch: u32) -> Open {
    Open {
        session: SESSION,
        epoch: Epoch::new(epoch),
        coordinator: CoordinatorId::new("c0").expect("valid"),
        route: vec![worker(0), worker(1), worker(2)],
        fingerprint: FINGERPRINT.to_owned(),
        prompt: vec![1, 2],
        prompt_len: 2,
        max_len: 32,
        sampling: Sampling::default(),
        head: HeadMode::Token,
        priority: Priority::Interactive,
    }
}

fn step(epoch: u32, number: u32) -> Step {
    Step {
        session: SESSION,
        epoch: Epoch::new(epoch),
        step: StepNumber::new(number),
        start_pos: 0,
        phase: Phase::Decode,
        tokens: vec![7],
        wanted: vec![0],
        held_from: None,
        trace: vec![],
    }
}

/// A table of stage 1 of 3 with one session at `epoch` that has run `n_steps` steps.
fn sessions(epoch: u32, n_steps: u32, now: Instant) -> Sessions {
    let mut sessions = Sessions::new(stage(1, 3), 2);
    sessions.open(&open_at(epoch), true, now).expect("room");
    for _ in 0..n_steps {
        sessions.advance(SESSION, now);
    }
    sessions
}

fn class(admission: Admission) -> Option<ErrorClass> {
    match admission {
        Admission::Refused(error) => Some(error.class),
        Admission::Run(_) | Admission::Duplicate => None,
    }
}

#[test]
fn every_epoch_and_step_number_has_its_verdict() {
    let sessions = sessions(5, 3, Instant::now());
    let from = worker(0);
    let verdict = |epoch, number| sessions.admit(&step(epoch, number), Some(&from));
    assert!(matches!(verdict(5, 3), Admission::Run(_)));
    for repeated in 0..3 {
        assert!(matches!(verdict(5, repeated), Admission::Duplicate));
    }
    assert_eq!(class(verdict(5, 4)), Some(ErrorClass::StepGap));
    assert_eq!(class(verdict(4, 3)), Some(ErrorClass::StaleEpoch));
    assert_eq!(class(verdict(6, 0)), Some(ErrorClass::UnknownSession));
    let mut other = step(5, 3);
    other.session = SessionId::from_u64(2);
    assert_eq!(class(sessions.admit(&other, Some(&from))), Some(ErrorClass::UnknownSession));
}

#[test]
fn a_step_from_outside_the_route_is_refused() {
    let sessions = sessions(0, 0, Instant::now());
    for from in [None, Some(worker(2)), Some(worker(1))] {
        let verdict = sessions.admit(&step(0, 0), from.as_ref());
        assert_eq!(class(verdict), Some(ErrorClass::InvalidRequest), "{from:?}");
    }
}

#[test]
fn the_route_names_the_neighbours() {
    let table = sessions(0, 0, Instant::now());
    let Admission::Run(route) = table.admit(&step(0, 0), Some(&worker(0))) else {
        panic!("the expected step runs");
    };
    assert_eq!(route.previous, Some(worker(0)));
    let next = route.next.as_ref().expect("a stage behind it");
    assert_eq!(next.step, "stagebus.v1.tiny.stage.2.w2.step");
    assert_eq!(next.bulk, "stagebus.v1.tiny.stage.2.w2.bulk");
    assert_eq!(route.head_subject, "stagebus.v1.tiny.head.c0");
    for (index, has_next) in [(0, true), (2, false)] {
        let mut table = Sessions::new(stage(index, 3), 1);
        table.open(&open_at(0), true, Instant::now()).expect("room");
        let from = (index > 0).then(|| worker(index - 1));
        let Admission::Run(route) = table.admit(&step(0, 0), from.as_ref()) else {
            panic!("the expected step runs");
        };
        assert_eq!(route.next.is_some(), has_next);
    }
}

#[test]
fn a_higher_epoch_starts_the_numbers_again() {
    let now = Instant::now();
    let mut sessions = sessions(1, 9, now);
    assert_eq!(sessions.open(&open_at(3), false, now), Ok(Opening::Raised));
    assert!(matches!(sessions.admit(&step(3, 0), Some(&worker(0))), Admission::Run(_)));
    assert_eq!(class(sessions.admit(&step(1, 9), Some(&worker(0)))), Some(ErrorClass::StaleEpoch));
    assert_eq!(sessions.len(), 1);
}

#[test]
fn a_repeated_open_changes_nothing() {
    let now = Instant::now();
    let mut sessions = sessions(1, 2, now);
    assert_eq!(sessions.open(&open_at(1), true, now), Ok(Opening::Repeated));
    assert!(matches!(sessions.admit(&step(1, 2), Some(&worker(0))), Admission::Run(_)));
    let mut elsewhere = open_at(1);
    elsewhere.coordinator = CoordinatorId::new("c9").expect("valid");
    let error = sessions.open(&elsewhere, true, now).expect_err("another owner, same epoch");
    assert_eq!(error.class, ErrorClass::StaleEpoch);
}

#[test]
fn opens_that_do_not_fit_are_refused() {
    type Spoil = fn(&mut Open);
    let cases: [(ErrorClass, Spoil); 7] = [
        (ErrorClass::VersionMismatch, |open| open.fingerprint = "beef".to_owned()),
        (ErrorClass::InvalidRequest, |open| open.route.swap(0, 1)),
        (ErrorClass::InvalidRequest, |open| open.route.truncate(2)),
        (ErrorClass::InvalidRequest, |open| open.route.push(worker(3))),
        (ErrorClass::InvalidRequest, |open| open.max_len = 65),
        (ErrorClass::InvalidRequest, |open| open.prompt = vec![1; 65]),
        (ErrorClass::StaleEpoch, |open| open.epoch = Epoch::new(1)),
    ];
    for (expected, spoil) in cases {
        let now = Instant::now();
        let mut sessions = sessions(2, 0, now);
        let mut open = open_at(2);
        spoil(&mut open);
        let error = sessions.open(&open, true, now).expect_err("does not fit");
        assert_eq!(error.class, expected, "{error}");
        assert_eq!(sessions.len(), 1);
    }
}

#[test]
fn a_full_or_draining_worker_names_a_time_to_retry() {
    let now = Instant::now();
    let mut table = sessions(0, 0, now);
    let mut other = open_at(0);
    other.session = SessionId::from_u64(2);
    let error = table.open(&other, false, now).expect_err("draining");
    assert_eq!((error.class, error.retry_after_ms), (ErrorClass::Overloaded, Some(RETRY_AFTER_MS)));
    assert_eq!(table.open(&other, true, now), Ok(Opening::New));
    other.session = SessionId::from_u64(3);
    let error = table.open(&other, true, now).expect_err("full");
    assert_eq!((error.class, error.retry_after_ms), (ErrorClass::Overloaded, Some(RETRY_AFTER_MS)));
}

#[test]
fn only_the_current_epoch_closes() {
    let mut sessions = sessions(4, 0, Instant::now());
    let close = |epoch| Close { session: SESSION, epoch: Epoch::new(epoch) };
    assert_eq!(sessions.close(&close(3)).map_err(|e| e.class), Err(ErrorClass::StaleEpoch));
    assert_eq!(sessions.close(&close(4)), Ok(true));
    assert_eq!(sessions.close(&close(4)), Ok(false));
}

#[test]
fn only_the_epoch_that_failed_to_open_is_forgotten() {
    let mut sessions = sessions(4, 0, Instant::now());
    sessions.forget(SESSION, Epoch::new(3));
    assert_eq!(sessions.len(), 1);
    sessions.forget(SESSION, Epoch::new(4));
    assert_eq!(sessions.len(), 0);
}

#[test]
fn sessions_without_activity_expire() {
    let start = Instant::now();
    let mut sessions = sessions(0, 0, start);
    let mut other = open_at(0);
    other.session = SessionId::from_u64(2);
    sessions.open(&other, true, start).expect("room");
    let idle = Duration::from_secs(10);
    sessions.advance(SESSION, start + Duration::from_secs(6));
    assert_eq!(sessions.take_idle(idle, start + Duration::from_secs(9)), vec![]);
    assert_eq!(sessions.take_idle(idle, start + Duration::from_secs(10)), vec![other.session]);
    assert_eq!(sessions.take_idle(idle, start + Duration::from_secs(16)), vec![SESSION]);
}

#[test]
fn a_flood_of_coordinators_hides_none_that_has_a_session() {
    let now = Instant::now();
    let mut sessions = sessions(0, 0, now);
    let mut lives = |name: &str| {
        let coordinator = CoordinatorId::new(name).expect("valid");
        sessions.coordinator_lives(&coordinator, Duration::from_millis(500), now)
    };
    for n in 0..MAX_COORDINATORS {
        assert!(lives(&format!("other-{n}")));
    }
    assert!(!lives("one-too-many"));
    assert!(lives("other-7") && lives("c0"));
    assert_eq!(sessions.coordinators.len(), MAX_COORDINATORS + 1);
    assert_eq!(sessions.take_orphans(now + ORPHAN_SILENCE), [SESSION]);
    assert!(sessions.coordinators.is_empty());
}

#[test]
fn a_lost_message_concerns_everybody_on_the_same_way() {
    let now = Instant::now();
    let mut sessions = Sessions::new(stage(1, 3), 8);
    let mut add = |id: u64, coordinator: &str, next: u16, n_steps: u32| {
        let session = SessionId::from_u64(id);
        let coordinator = CoordinatorId::new(coordinator).expect("valid");
        let route = vec![worker(0), worker(1), worker(next)];
        let open = Open { session, coordinator, route, ..open_at(4) };
        sessions.open(&open, true, now).expect("room");
        (0..n_steps).for_each(|_| sessions.advance(session, now));
    };
    add(1, "c0", 2, 3);
    add(2, "c0", 2, 7);
    add(3, "c1", 2, 1);
    // Another next worker, and a session without any step.
    add(4, "c0", 5, 3);
    add(5, "c0", 2, 0);
    let lost = LostStep {
        session: SESSION,
        epoch: Epoch::new(4),
        step: StepNumber::new(2),
        stage: StageIndex::new(2),
    };
    let told = |sessions: &Sessions| {
        let mut told: Vec<(String, u64, u32)> = sessions
            .lost_with(&lost)
            .into_iter()
            .map(|(coordinator, lost)| {
                assert_eq!((lost.epoch, lost.stage), (Epoch::new(4), StageIndex::new(2)));
                (coordinator.to_string(), lost.session.as_u64(), lost.step.number())
            })
            .collect();
        told.sort();
        told
    };
    let expected = vec![("c0".to_owned(), 2, 6), ("c1".to_owned(), 3, 0)];
    assert_eq!(told(&sessions), expected);
    // The session that the broker's answer names may have ended meanwhile.
    let close = Close { session: SESSION, epoch: Epoch::new(4) };
    assert_eq!(sessions.close(&close), Ok(true));
    assert_eq!(told(&sessions), expected);
}
