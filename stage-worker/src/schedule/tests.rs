//! Single decisions.

use super::*;

const ALONE: Policy = Policy {
    n_stages: 1,
    max_sessions: 4,
    batch_rows: 128,
    mixes: false,
    prefill_percent: 60,
    decodes_per_prefill: 8,
};

const MIXED: Policy = Policy { mixes: true, max_sessions: 32, ..ALONE };

const T: Duration = Duration::from_millis(10);

/// Pushes a step written as `d1`, `f2` or `p3` (class, session), with a colon and rows if it is not one,
/// `!` for a batch session.
fn push(schedule: &mut Schedule<String>, text: &str, now: Duration) {
    let (text, priority) = match text.strip_suffix('!') {
        Some(text) => (text, Priority::Batch),
        None => (text, Priority::Interactive),
    };
    let (name, rows) = text.split_once(':').unwrap_or((text, "1"));
    let class = match name.as_bytes()[0] {
        b'd' => Class::Decode,
        b'f' => Class::FirstToken,
        _ => Class::Prefill { least: 2 },
    };
    let session = SessionKey(name[1..].parse().expect("number"));
    schedule.open(session, priority);
    let n_rows = rows.parse().expect("number");
    schedule.push(session, Waiting { class, n_rows, step: name.to_owned() }, now);
}

/// Runs one micro-batch, at once or after the time that it waits for others, and returns it in the
/// same notation.
fn run_one(schedule: &mut Schedule<String>, now: Duration, takes: Duration) -> String {
    let mut batch = Vec::new();
    let now = match schedule.next(now, &mut batch) {
        Next::WaitUntil(until) => {
            assert_eq!(schedule.next(until, &mut batch), Next::Run);
            until
        }
        next => {
            assert_eq!(next, Next::Run);
            now
        }
    };
    let names: Vec<String> = batch
        .iter()
        .map(|part| match part.n_rows {
            1 => part.waiting.step.clone(),
            n_rows => format!("{}:{n_rows}", part.waiting.step),
        })
        .collect();
    for Part { session, n_rows, waiting } in batch {
        let left = waiting.n_rows - n_rows;
        if left > 0 {
            schedule.put_back(session, Waiting { n_rows: left, ..waiting });
        }
    }
    schedule.ran(now + takes, takes);
    names.join("+")
}

/// Pushes steps and returns the micro-batches in which they leave.
fn check(policy: Policy, pushed: &str, expected: &str) {
    let mut schedule = Schedule::new(policy);
    for text in pushed.split(' ') {
        push(&mut schedule, text, Duration::ZERO);
    }
    let mut batches = Vec::new();
    let mut now = Duration::ZERO;
    while schedule.decode.len() + schedule.prefill.len() > 0 {
        batches.push(run_one(&mut schedule, now, T));
        now += T;
    }
    assert_eq!(batches.join(" "), expected);
}

#[test]
fn one_by_one_steps_keep_their_order() {
    let single = Policy { max_sessions: 1, ..ALONE };
    check(single, "d1 d2 d3", "d1 d2 d3");
    check(single, "p1:9 d1 d2", "d2 p1:9 d1");
    check(ALONE, "d1 d2 d1 d3 d4 d5 d1", "d1+d2+d3+d4 d5+d1 d1");
    check(MIXED, "p1:9 p1:8 d1 p2:7", "p1:9+p2:7 p1:8 d1");
    check(MIXED, "d1 p1:9 d2", "d1+d2 p1:9");
}

#[test]
fn one_by_one_a_prompt_is_passed_over_so_often_and_runs_alone() {
    let single = Policy { max_sessions: 1, decodes_per_prefill: 2, ..ALONE };
    check(single, "p9:9 p9:8 d1 d2 d3 d4 d5", "d1 d2 p9:9 d3 d4 p9:8 d5");
    check(Policy { decodes_per_prefill: 0, ..single }, "p1:5 p2:5 d3 d3", "d3 p1:5 d3 p2:5");
    check(ALONE, "p1:5 p1:5 p2:5 p2:5", "p1:5 p2:5 p1:5 p2:5");
}

#[test]
fn the_cap_is_a_fair_share_of_the_sessions_that_decode() {
    let sessions = |n: u32| (1..=n).map(|i| format!("d{i}")).collect::<Vec<_>>().join(" ");
    let stages = |n_stages| Policy { n_stages, ..MIXED };
    check(stages(2), &sessions(5), "d1+d2+d3 d4+d5");
    check(stages(3), &sessions(4), "d1+d2 d3+d4");
    check(stages(3), &sessions(2), "d1 d2");
    check(stages(1), &sessions(3), "d1+d2+d3");
    check(Policy { max_sessions: 2, ..MIXED }, &sessions(3), "d1+d2 d3");
}

#[test]
fn a_session_that_stays_away_does_not_count() {
    let mut schedule = Schedule::new(Policy { n_stages: 2, ..MIXED });
    let mut now = Duration::ZERO;
    for _ in 0..3 {
        (1..=8).for_each(|i| push(&mut schedule, &format!("d{i}"), now));
        run_one(&mut schedule, now, T);
        run_one(&mut schedule, now + T, T);
        now += 3 * T;
    }
    assert_eq!(schedule.n_decoding(now), 8);
    // Two go on, six wait for their clients.
    for _ in 0..8 {
        (1..=2).for_each(|i| push(&mut schedule, &format!("d{i}"), now));
        while !schedule.decode.is_empty() {
            run_one(&mut schedule, now, T);
            now += T;
        }
        now += T;
    }
    assert_eq!(schedule.n_decoding(now), 2);
}

#[test]
fn prefill_fills_the_room_beside_decodes() {
    check(MIXED, "d1 p9:40", "d1+p9:16 p9:16 p9:8");
    check(MIXED, "p1:100 p2:100 p3:20", "p1:100+p2:28 p2:72+p3:20");
    // Neither a part nor a rest of one row.
    check(MIXED, "p1:129", "p1:127 p1:2");
    check(MIXED, "p1:127 p2:9", "p1:127 p2:9");
    check(MIXED, "p1:126 p2:3", "p1:126 p2:3");
    check(MIXED, "p1:1 p2:1", "p1+p2");
}

#[test]
fn short_prompts_go_first_and_whole_until_a_micro_batch_has_enough_of_them() {
    check(MIXED, "d1 p9:24 f2:40 f3:30 f4:20", "d1+f2:40 f3:30+f4:20 p9:16 p9:8");
    check(MIXED, "f1:60 p2:100", "f1:60+p2:68 p2:32");
    let rows = (1..=4).map(|i| format!("d{i}:30")).collect::<Vec<_>>().join(" ");
    let all = "d1:30+d2:30+d3:30+d4:30+f9:40";
    check(MIXED, &format!("{rows} f9:40"), all);
}

#[test]
fn verify_rows_count_against_the_budget() {
    let rows = |n: u32| (1..=n).map(|i| format!("d{i}:30")).collect::<Vec<_>>().join(" ");
    check(MIXED, &rows(5), "d1:30+d2:30+d3:30+d4:30 d5:30");
    // Prefill keeps a share.
    let expected = "d1:30+d2:30+d3:30+d4:30+p9:8 d5:30+p9:16";
    check(MIXED, &format!("{} p9:24", rows(5)), expected);
}

#[test]
fn a_chunk_that_was_begun_ends_before_the_next_prompt() {
    check(MIXED, "p1:200 p1:200 p2:60", "p1:128 p1:72+p2:56 p2:4+p1:124 p1:76");
}

#[test]
fn batch_sessions_take_what_is_left_and_do_not_starve() {
    let two = Policy { max_sessions: 2, ..MIXED };
    check(two, "d1! d2! d3 d4 d5", "d3+d4 d5+d1 d2");
    let one = Policy { max_sessions: 1, ..MIXED };
    let pushed = format!("d9! {}", ["d1"; 10].join(" "));
    check(one, &pushed, "d1 d1 d1 d1 d1 d1 d1 d1 d9 d1 d1");
    check(MIXED, "p9:200! p1:200 p2:200", "p1:128 p1:72+p2:56 p2:128 p2:16+p9:112 p9:88");
}

#[test]
fn a_group_that_left_together_is_waited_for() {
    let mut schedule = Schedule::new(MIXED);
    let ms = Duration::from_millis;
    for cycle in 0..4 {
        (1..=4).for_each(|i| push(&mut schedule, &format!("d{i}"), cycle * 2 * T));
        assert_eq!(run_one(&mut schedule, cycle * 2 * T, T), "d1+d2+d3+d4");
    }
    // They left at 70 ms and come back after 10.
    let mut batch = Vec::new();
    push(&mut schedule, "d1", ms(79));
    let Next::WaitUntil(until) = schedule.next(ms(79), &mut batch) else { panic!("waits") };
    assert!(until > ms(80) && until <= ms(84), "{until:?}");
    push(&mut schedule, "d2", ms(80));
    push(&mut schedule, "d3", ms(80));
    assert!(matches!(schedule.next(ms(80), &mut batch), Next::WaitUntil(_)));
    // The fourth does not come.
    let Next::WaitUntil(until) = schedule.next(ms(81), &mut batch) else { panic!("waits") };
    assert_eq!(run_one(&mut schedule, until, T), "d1+d2+d3");
    // Nobody is due, so nobody is waited for.
    push(&mut schedule, "d4", until + T);
    assert_eq!(run_one(&mut schedule, until + T, T), "d4");
}

#[test]
fn few_sessions_never_wait() {
    let mut schedule = Schedule::new(Policy { n_stages: 2, ..MIXED });
    for cycle in 0..9 {
        push(&mut schedule, "d1", cycle * 3 * T);
        assert_eq!(run_one(&mut schedule, cycle * 3 * T, T), "d1");
        push(&mut schedule, "d2", cycle * 3 * T + T);
        assert_eq!(run_one(&mut schedule, cycle * 3 * T + T, T), "d2");
    }
}

#[test]
fn a_removed_session_leaves_nothing_behind() {
    let mut schedule = Schedule::new(MIXED);
    for text in ["d1", "d1", "p2:7"] {
        push(&mut schedule, text, Duration::ZERO);
    }
    assert_eq!(schedule.clear(SessionKey(1)).len(), 2);
    assert_eq!(schedule.close(SessionKey(1)).len(), 0);
    assert_eq!(run_one(&mut schedule, T, T), "p2:7");
    assert_eq!(schedule.next(2 * T, &mut Vec::new()), Next::Nothing);
    // The session may come back under the same key.
    push(&mut schedule, "d1", 3 * T);
    assert_eq!(run_one(&mut schedule, 3 * T, T), "d1");
}

#[test]
fn windows_of_a_session_run_one_by_one_between_those_of_others() {
    check(MIXED, "d1:2 d1:3 d1:4 d2 d2 d3", "d1:2+d2+d3 d1:3+d2 d1:4");
    check(Policy { n_stages: 2, ..MIXED }, "d1:2 d1:3 d2 d2", "d1:2 d2 d1:3 d2");
}

#[test]
fn needless_steps_are_taken_out_in_order_and_keep_the_turn() {
    let mut schedule = Schedule::new(MIXED);
    for text in ["d1:2", "d1:3", "d1:4", "p1:9", "d2", "p3:5"] {
        push(&mut schedule, text, Duration::ZERO);
    }
    let (one, two) = (SessionKey(1), SessionKey(2));
    assert_eq!(schedule.waiting(one).count(), 4);
    assert!(schedule.take_needless(one, |step| step == "d2").is_empty());
    let mut n_left = 2;
    for step in schedule.waiting(one).take(2) {
        step.push('!');
        n_left -= 1;
    }
    assert_eq!(n_left, 0);
    assert_eq!(schedule.take_needless(one, |step| step.ends_with('!')), ["d1!", "d1!"]);
    assert_eq!(run_one(&mut schedule, Duration::ZERO, T), "d1:4+d2+p3:5");
    // What is left of the first session is a prompt.
    assert_eq!(run_one(&mut schedule, T, T), "p1:9");
    assert!(schedule.take_needless(two, |_| true).is_empty());
    push(&mut schedule, "d1", 2 * T);
    push(&mut schedule, "p1:9", 2 * T);
    push(&mut schedule, "d2", 2 * T);
    assert_eq!(schedule.take_needless(one, |step| step == "d1"), ["d1"]);
    assert_eq!(schedule.take_needless(two, |_| true), ["d2"]);
    assert_eq!(schedule.decode.len() + schedule.prefill.len(), 1);
    assert_eq!(run_one(&mut schedule, 2 * T, T), "p1:9");
}
