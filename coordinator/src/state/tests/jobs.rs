//! Jobs: going on after what is stored, giving back, room.

use stagebus_schemas::messages::public::PromptRequest;

use super::*;
use crate::jobs::{JobKey, JobStart, StoredAnswer};

const KEY: JobKey = JobKey::new(1);

fn job(extra: &str, stored: &[Event], cancelled: bool) -> Action {
    let json = format!(r#"{{"tokens":[97,98,99]{extra}}}"#);
    let mut answer = StoredAnswer::default();
    for event in stored {
        answer.add(event.clone());
    }
    let prompt: PromptRequest = serde_json::from_str(&json).unwrap();
    let client = Client::new("result".into(), &PublicHeaders::default(), b"{}");
    Action::Job(Box::new(JobStart {
        client: Client { job: Some(KEY), ..client },
        request: RequestId::new("r").unwrap(),
        prompt: Ok(prompt),
        trace: None,
        cancelled,
        stored: answer,
    }))
}

/// Runs a job after the events that are stored of it, with a model that says `tokens`; returns
/// the events that it adds.
fn run(extra: &str, tokens: &[u32], stored: &[Event]) -> Vec<Event> {
    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    bench.act(job(extra, stored, false));
    if !bench.state.is_idle() {
        bench.open_all();
    }
    while !bench.state.is_idle() {
        for step in bench.steps() {
            // The row at position p chooses token p - 2 of the output: the prompt has three.
            let wanted = step.wanted.first().map_or(0, |row| (step.start_pos + row) as usize - 2);
            bench.answer(&step, tokens[wanted]);
        }
    }
    let mut events = bench.events();
    assert_eq!(events.pop(), Some(None));
    events.into_iter().flatten().collect()
}

/// An event without its times.
fn timeless(event: &Event) -> Event {
    match event.clone() {
        Event::Done { finish_reason, usage, text, tokens, logprobs, .. } => {
            let (timings, usage) = (Timings::default(), Usage { steps: 0, ..usage });
            Event::Done { finish_reason, usage, timings, text, tokens, logprobs }
        }
        event => event,
    }
}

/// An answer gives the same text, tokens and end, wherever it is cut and taken up again.
#[track_caller]
fn check(extra: &str, text: &str, end: Option<u32>) {
    let tokens: Vec<u32> = text.bytes().map(u32::from).chain(end).chain([0; 8]).collect();
    let whole = run(extra, &tokens, &[]);
    assert!(whole.len() > 3, "{whole:?}");
    for cut in 0..whole.len() {
        let rest = run(extra, &tokens, &whole[..cut]);
        let found: Vec<Event> = whole[..cut].iter().chain(&rest).map(timeless).collect();
        let expected: Vec<Event> = whole.iter().map(timeless).collect();
        assert_eq!(found, expected, "cut after {cut} events");
    }
}

#[test]
fn an_answer_is_the_same_wherever_it_is_taken_up() {
    check(r#","max_tokens":20"#, "hello", Some(END));
    check(r#","max_tokens":6"#, "hello wor", None);
    // Characters of several tokens, and one that the end cuts off.
    check(r#","max_tokens":20"#, "h\u{e9}l\u{20ac}\u{1f600}o", Some(END));
    check(r#","max_tokens":6"#, "ab\u{20ac}\u{1f600}", None);
    // Text that is held back because a stop text may begin with it, which comes or does not.
    check(r#","max_tokens":20,"stop":["world"]"#, "hello wo wor world!", None);
    check(r#","max_tokens":12,"stop":["lo wonder"]"#, "hello world and more", None);
    check(r#","max_tokens":20,"stop":["lo wonder"]"#, "hello wo", Some(END));
}

#[test]
fn the_output_that_is_stored_is_replayed_in_one_go() {
    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    let accepted = Event::Accepted {
        request_id: RequestId::new("r").unwrap(),
        prompt_tokens: 3,
        seed: Some(5),
    };
    let stored = [accepted, token_event(0, "de", &[100, 101]).unwrap()];
    bench.act(job(r#","temperature":1.0"#, &stored, false));
    let opens = bench.opens();
    let open = &opens[0].2;
    assert_eq!((&open.prompt[..], open.prompt_len), (&[97, 98, 99, 100, 101][..], 3));
    assert_eq!((open.sampling.seed, open.priority), (5, Priority::Batch));
    for open in &opens {
        bench.answer_open(open, Ok(0));
    }
    let fill = bench.steps();
    let phases: Vec<_> = fill.iter().map(|step| (step.phase, step.tokens.len())).collect();
    assert_eq!(phases, [(Phase::Prefill, 3), (Phase::Decode, 1)]);
    for step in &fill {
        bench.answer(step, 0);
    }
    let next = bench.step();
    assert_eq!((next.start_pos, &next.tokens[..]), (4, &[101][..]));
    assert_eq!(bench.events(), []);
    bench.answer(&next, 102);
    assert_eq!(bench.events(), [token_event(1, "f", &[102])]);
}

#[test]
fn a_job_that_was_cancelled_in_the_queue_ends_before_it_runs() {
    let mut bench = Bench::new();
    bench.act(job("", &[], true));
    assert!(bench.state.is_idle() && bench.opens().is_empty());
    let events = bench.events();
    assert!(matches!(events[0], Some(Event::Accepted { prompt_tokens: 3, .. })), "{events:?}");
    assert_eq!(finish_reason(&events[1]), (FinishReason::Cancelled, 0));
}

#[test]
fn jobs_are_given_back_at_a_drain_and_dropped_when_lost() {
    for (action, given_back) in [(Action::Drain, true), (Action::JobLost(KEY), false)] {
        let mut bench = Bench::new();
        bench.worker("w0", 0);
        bench.worker("w1", 1);
        bench.act(job("", &[], false));
        bench.open_all();
        bench.events();
        bench.act(action);
        assert_eq!(bench.closed(), [id("w0"), id("w1")]);
        assert!(bench.state.is_idle());
        assert_eq!(bench.events(), []);
        let back = |effect: &Effect| matches!(effect, Effect::GiveBack(key) if *key == KEY);
        assert_eq!(bench.effects.iter().any(back), given_back);
    }
}

#[test]
fn there_is_room_for_a_job_only_where_it_would_run_at_once() {
    let mut bench = Bench::with(CoordinatorSettings { max_sessions: 2, ..without_drafts() });
    let room = |bench: &Bench| bench.state.has_job_room(bench.now);
    assert!(!room(&bench), "no stage has a worker");
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    assert!(room(&bench));
    bench.state.settings.jobs.max_running = 1;
    bench.act(job("", &[], false));
    assert!(!room(&bench), "as many jobs run as may");
    bench.state.settings.jobs.max_running = 9;
    assert!(room(&bench));
    bench.request(r#"{"tokens":[97]}"#);
    assert!(!room(&bench), "no place is free");
    bench.act(Action::JobLost(KEY));
    assert!(room(&bench));
    bench.act(Action::Disconnected);
    assert!(!room(&bench));
    bench.act(Action::Reconnected);
    bench.act(Action::Drain);
    assert!(!room(&bench));
}
