//! Fleets with one fault each.

use stagebus_schemas::codec::CodecError;
use stagebus_schemas::messages::fleet::{
    CoordinatorAnnouncement, WorkerAnnouncement, WorkerLoad, WorkerState,
};
use stagebus_schemas::version::MessageVersion;
use stagebus_view::testing;

use super::*;

const UNMEASURED: Duration = Duration::from_secs(30);

fn worker(stage: u16, name: &str) -> WorkerAnnouncement {
    testing::worker("m", stage, name)
}

fn coordinator() -> CoordinatorAnnouncement {
    testing::coordinator("m", "c")
}

/// A sound fleet, heard at `start`.
fn fleet(start: Instant) -> FleetView {
    let mut view = FleetView::default();
    view.hear_coordinator(coordinator(), start);
    view.hear_worker(worker(0, "a"), start);
    view.hear_worker(worker(1, "b"), start);
    view
}

/// The faults of a view 600 ms after `start`.
fn faults(view: &FleetView, start: Instant) -> Vec<Fault> {
    let mut findings = Findings::default();
    let known = Known { model: None, shards: None, unmeasured: UNMEASURED };
    judge(view, known, start + Duration::from_millis(600), &mut findings);
    findings.all().iter().filter_map(|finding| finding.fault).collect()
}

#[test]
fn a_sound_fleet_has_no_fault_and_an_empty_one_has_nobody() {
    let start = Instant::now();
    assert_eq!(faults(&fleet(start), start), []);
    assert_eq!(faults(&FleetView::default(), start), [Fault::NobodyThere]);
}

#[test]
fn each_change_of_a_sound_fleet_is_told_by_its_fault() {
    let start = Instant::now();
    let check = |change: &dyn Fn(&mut FleetView), expected: &[Fault]| {
        let mut view = fleet(start);
        change(&mut view);
        assert_eq!(faults(&view, start), expected, "{view:?}");
    };
    let leaving = WorkerAnnouncement { state: WorkerState::Leaving, ..worker(1, "b") };
    check(&|view| view.hear_worker(leaving.clone(), start), &[Fault::StageMissing]);
    let other = WorkerAnnouncement { fingerprint: "g".to_owned(), ..worker(1, "b") };
    check(&|view| view.hear_worker(other.clone(), start), &[Fault::FingerprintsDiffer]);
    let more = WorkerAnnouncement { fingerprint: "g".to_owned(), ..worker(1, "d") };
    check(&|view| view.hear_worker(more.clone(), start), &[Fault::FingerprintsDiffer]);
    let deaf = CoordinatorAnnouncement { accepting: false, ..coordinator() };
    check(&|view| view.hear_coordinator(deaf.clone(), start), &[Fault::CoordinatorMissing]);
    let load = WorkerLoad { busy_ms: 1001, expected_ms: 3, ..WorkerLoad::default() };
    let wedged = WorkerAnnouncement { load, ..worker(1, "b") };
    check(&|view| view.hear_worker(wedged.clone(), start), &[Fault::WorkerWedged]);
    let hasty = WorkerAnnouncement { interval_ms: 200, ..worker(1, "b") };
    check(&|view| view.hear_worker(hasty.clone(), start), &[Fault::WorkerSilent]);
    let found = serde_json::from_str("5").expect("a version");
    let version = CodecError::Version { found, expected: MessageVersion::CURRENT };
    check(&|view| view.hear_stranger("a.b", &version, start), &[Fault::VersionsDiffer]);
    let trailing = CodecError::Trailing { bytes: 1 };
    check(&|view| view.hear_stranger("a.b", &trailing, start), &[Fault::AnnouncementInvalid]);
}

#[test]
fn who_is_late_is_waited_for_until_it_counts_as_silent() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let view = fleet(start);
    assert_eq!(later(&view, at(700)), None, "nobody is late");
    assert_eq!(later(&view, at(800)), Some(at(1500)));
    assert_eq!(later(&view, at(1500)), None, "the wait is over");
}
