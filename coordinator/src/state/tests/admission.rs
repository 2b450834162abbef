//! Who is taken, who starts, and what the others hear.

use super::*;

fn settings() -> CoordinatorSettings {
    CoordinatorSettings { prefill_chunk: 64, ..without_drafts() }
}

fn ask(bench: &mut Bench, reply: &str, json: &str) {
    bench.act(super::ask(reply, json));
}

/// Two workers whose caches hold `room` positions of ten bytes.
fn workers(bench: &mut Bench, room: u64, held: u64) {
    for (name, stage) in [("w0", 0), ("w1", 1)] {
        let identity = bench.state.model.identity.clone();
        bench.act(Action::Worker(WorkerAnnouncement {
            version: MessageVersion::CURRENT,
            worker: id(name),
            model: identity.model,
            fingerprint: identity.fingerprint,
            stage: StageIndex::new(stage),
            n_stages: N_STAGES,
            first_layer: 0,
            end_layer: 1,
            device: "CPU".to_owned(),
            profile: "fast".to_owned(),
            host: "h".to_owned(),
            state: WorkerState::Ready,
            interval_ms: 60_000,
            load: WorkerLoad {
                n_sessions: 0,
                max_sessions: 8,
                queue_depth: 0,
                kv_tokens: held,
                kv_bytes: held * 10,
                kv_max_bytes: room * 10,
                steps_completed: 0,
                rows_completed: 0,
                decode_us: 0,
                prefill_row_us: 0,
                busy_ms: 0,
                expected_ms: 0,
                losses: 0,
            },
        }));
    }
}

/// Runs the only open session to its end after `time`.
fn run(bench: &mut Bench, time: Duration) {
    bench.open_all();
    let step = bench.step();
    bench.now += time;
    bench.answer(&step, END);
    bench.events();
}

#[test]
fn the_hint_is_the_time_of_a_place_times_the_queue_over_the_places() {
    let mut bench =
        Bench::with(CoordinatorSettings { max_sessions: 2, max_queued: 3, ..settings() });
    workers(&mut bench, 0, 0);
    bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
    run(&mut bench, Duration::from_secs(4));
    for _ in 0..5 {
        bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
    }
    bench.events();
    bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
    let (class, message, retry_after_ms) = bench.error();
    assert_eq!((class, retry_after_ms), (ErrorClass::Overloaded, Some(8_000)), "{message}");
}

#[test]
fn a_wait_that_is_too_long_is_refused_before_the_queue_is_full() {
    let limits = CoordinatorSettings { max_sessions: 1, max_wait_ms: 9_000, ..settings() };
    let mut bench = Bench::with(limits);
    workers(&mut bench, 0, 0);
    bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
    run(&mut bench, Duration::from_secs(4));
    // One runs, one waits for 4 s, one for 8 s; the next would wait for 12 s.
    for _ in 0..3 {
        bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
        assert_eq!(bench.events(), []);
    }
    bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
    let (class, message, retry_after_ms) = bench.error();
    assert_eq!((class, retry_after_ms), (ErrorClass::Overloaded, Some(12_000)), "{message}");
}

#[test]
fn a_client_has_its_share_and_those_without_a_name_have_one() {
    let mut bench = Bench::with(CoordinatorSettings { max_per_client: 1, ..settings() });
    workers(&mut bench, 0, 0);
    let (ann, ben) = ("_INBOX.client.ANN", "_INBOX.client.BEN");
    for reply in [format!("{ann}.x1"), format!("{ben}.x1"), "_INBOX.x1".to_owned()] {
        ask(&mut bench, &reply, r#"{"tokens":[97],"request_id":"r"}"#);
        assert_eq!(bench.events(), [], "{reply}");
    }
    for reply in [format!("{ann}.x2"), format!("{ben}.x2"), "my.events".to_owned()] {
        ask(&mut bench, &reply, r#"{"tokens":[97]}"#);
        let (class, message, retry_after_ms) = bench.error();
        assert_eq!(class, ErrorClass::Overloaded, "{reply}");
        assert!(message.contains("of this client") && retry_after_ms.is_some(), "{message}");
    }
    bench.act(Action::Cancel(RequestId::new("r").unwrap()));
    bench.events();
    ask(&mut bench, &format!("{ann}.x3"), r#"{"tokens":[97]}"#);
    assert_eq!(bench.events(), []);
}

#[test]
fn a_session_waits_until_the_caches_have_room_for_it() {
    let mut bench = Bench::with(settings());
    workers(&mut bench, 100, 1);
    // The first starts whatever it needs, the second fits beside it, the third does not.
    bench.request(r#"{"tokens":[97],"max_tokens":49}"#);
    bench.request(r#"{"tokens":[98],"max_tokens":40}"#);
    bench.request(r#"{"tokens":[99],"max_tokens":20}"#);
    let opens = bench.opens();
    assert_eq!(opens.len(), 4, "two sessions on two stages");
    for open in &opens {
        bench.answer_open(open, Ok(0));
    }
    // The first ends early: there is room now.
    let step = bench.steps().remove(0);
    bench.answer(&step, END);
    assert_eq!(bench.opens().len(), 2);
    assert_eq!(bench.state.n_sessions(), 2);
}

#[test]
fn what_other_coordinators_hold_counts_and_no_limit_is_none() {
    let percents = [(100, 1), (0, 2), (1000, 2)];
    for (kv_percent, n_started) in percents {
        let mut bench = Bench::with(CoordinatorSettings { kv_percent, ..settings() });
        workers(&mut bench, 100, 90);
        bench.request(r#"{"tokens":[97],"max_tokens":9}"#);
        bench.request(r#"{"tokens":[98],"max_tokens":9}"#);
        assert_eq!(bench.opens().len(), 2 * n_started, "{kv_percent} %");
    }
}

#[test]
fn sessions_that_end_early_let_more_start() {
    let mut bench = Bench::with(settings());
    workers(&mut bench, 100, 1);
    for _ in 0..40 {
        bench.request(r#"{"tokens":[97],"max_tokens":90}"#);
        run(&mut bench, Duration::from_secs(1));
    }
    for _ in 0..3 {
        bench.request(r#"{"tokens":[97],"max_tokens":90}"#);
    }
    assert_eq!(bench.opens().len(), 6);
}
