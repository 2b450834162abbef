//! Steps and answers that are lost without a word, while everybody is busy and well.

use stagebus_schemas::messages::control::{MAX_ASKED, SessionProgress, StepProgress};

use super::*;

const GRACE: Duration = Duration::from_millis(250);

/// Lets a worker answer a question that was asked `ago`: steps below `expected` have come to it, and
/// those below `unsent` have left it.
fn hear(bench: &mut Bench, worker: &str, step: &Step, counts: Option<(u32, u32)>, ago: Duration) {
    let steps = counts.map(|(expected, unsent)| StepProgress {
        epoch: step.epoch,
        expected: StepNumber::new(expected),
        unsent: StepNumber::new(unsent),
    });
    let answer = CheckAnswer::Progress(vec![SessionProgress { session: step.session, steps }]);
    bench.act(Action::Checked { worker: id(worker), asked: bench.now - ago, answer });
}

/// Where steps were lost since the last call, as the client is told.
fn lost(bench: &mut Bench) -> Vec<String> {
    let message = |effect: &Effect| match effect {
        Effect::Event { event: Event::Status { message: Some(message), .. }, .. } => {
            Some(message.clone())
        }
        _ => None,
    };
    let lost = bench.effects.iter().filter_map(message).collect();
    bench.events();
    lost
}

const NOW: Duration = Duration::ZERO;

#[test]
fn a_step_that_does_not_reach_the_first_stage_is_replayed() {
    let mut bench = Bench::new();
    let step = bench.started("");
    bench.now += GRACE - Duration::from_millis(1);
    hear(&mut bench, "w0", &step, Some((0, 0)), NOW);
    bench.now += Duration::from_millis(5);
    // The question left too early to prove anything.
    hear(&mut bench, "w0", &step, Some((0, 0)), Duration::from_millis(5));
    assert!(bench.opens().is_empty());
    hear(&mut bench, "w0", &step, Some((0, 0)), NOW);
    assert_eq!(lost(&mut bench), ["a step was lost on its way to stage 0"]);
    bench.open_all();
    let again = bench.step();
    assert_eq!((again.epoch, &again.tokens), (Epoch::new(1), &step.tokens));
    // What is answered about the epoch before means nothing.
    bench.now += GRACE;
    hear(&mut bench, "w0", &step, Some((0, 0)), GRACE + Duration::from_millis(1));
    bench.answer(&again, 100);
    assert_eq!(bench.events(), [token_event(0, "d", &[100])]);
}

#[test]
fn a_step_that_does_not_reach_the_next_stage_is_replayed() {
    let mut bench = Bench::new();
    let prefill = bench.started("");
    bench.answer(&prefill, 100);
    let step = bench.step();
    bench.now += GRACE * 4;
    // As long as the first stage has it, the second cannot.
    hear(&mut bench, "w0", &step, Some((2, 1)), NOW);
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    bench.now += GRACE * 4;
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    // It leaves the first stage.
    hear(&mut bench, "w0", &step, Some((2, 2)), NOW);
    bench.now += GRACE - Duration::from_millis(1);
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    hear(&mut bench, "w0", &step, Some((2, 2)), NOW);
    assert!(bench.opens().is_empty());
    bench.now += Duration::from_millis(1);
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    assert_eq!(lost(&mut bench), ["a step was lost on its way to stage 1"]);
    assert_eq!(bench.opens().len(), 2);
}

#[test]
fn a_step_that_has_reached_every_stage_may_take_its_time() {
    let mut bench = Bench::new();
    let step = bench.started("");
    for _ in 0..10 {
        bench.now += GRACE;
        hear(&mut bench, "w0", &step, Some((1, 1)), NOW);
        hear(&mut bench, "w1", &step, Some((1, 0)), NOW);
    }
    assert!(bench.opens().is_empty());
    // What was known of this step says nothing of the next one.
    bench.answer(&step, 100);
    let next = bench.step();
    bench.now += GRACE;
    hear(&mut bench, "w0", &next, Some((2, 1)), NOW);
    hear(&mut bench, "w1", &next, Some((1, 1)), NOW);
    assert!(bench.opens().is_empty());
}

#[test]
fn an_answer_that_does_not_come_is_replayed() {
    let mut bench = Bench::new();
    let step = bench.started("");
    hear(&mut bench, "w0", &step, Some((1, 1)), NOW);
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    bench.now += GRACE - Duration::from_millis(1);
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    assert!(bench.opens().is_empty());
    bench.now += Duration::from_millis(1);
    hear(&mut bench, "w1", &step, Some((1, 1)), NOW);
    assert_eq!(lost(&mut bench), ["the answer to a step was lost"]);
    assert_eq!(bench.opens().len(), 2);
}

#[test]
fn a_worker_that_does_not_have_the_session_is_a_fault() {
    for other_epoch in [false, true] {
        let mut bench = Bench::new();
        let step = bench.started("");
        let answer = |bench: &mut Bench, ago| match other_epoch {
            true => {
                let other = Step { epoch: Epoch::new(7), ..step.clone() };
                hear(bench, "w1", &other, Some((0, 0)), ago);
            }
            false => hear(bench, "w1", &step, None, ago),
        };
        // Asked before it was open everywhere.
        answer(&mut bench, Duration::from_millis(1));
        bench.now += GRACE;
        answer(&mut bench, NOW);
        bench.now += GRACE - Duration::from_millis(1);
        answer(&mut bench, NOW);
        assert!(bench.opens().is_empty());
        bench.now += Duration::from_millis(1);
        answer(&mut bench, NOW);
        assert_eq!(lost(&mut bench), ["the worker of stage 1 does not have the session any more"]);
        assert_eq!(bench.opens().len(), 2);
    }
}

#[test]
fn slow_steps_get_more_time() {
    let mut bench = Bench::new();
    let prefill = bench.started("");
    bench.now += Duration::from_secs(2);
    bench.answer(&prefill, 100);
    let step = bench.step();
    bench.now += Duration::from_secs(8) - Duration::from_millis(1);
    hear(&mut bench, "w0", &step, Some((1, 1)), NOW);
    assert!(bench.opens().is_empty());
    bench.now += Duration::from_millis(1);
    hear(&mut bench, "w0", &step, Some((1, 1)), NOW);
    assert_eq!(bench.opens().len(), 2);
}

/// The sessions that the workers were asked for since the last call.
fn asked(bench: &mut Bench) -> Vec<(WorkerId, Vec<SessionId>)> {
    let mut asked = Vec::new();
    bench.effects.retain(|effect| {
        let Effect::Check { worker, sessions, .. } = effect else { return true };
        asked.push((worker.clone(), sessions.clone()));
        false
    });
    asked
}

#[test]
fn workers_are_asked_for_the_sessions_that_wait_longer_than_most() {
    let mut bench = Bench::new();
    let step = bench.started("");
    bench.wait(CHECK_PATIENCE);
    let both = [id("w0"), id("w1")].map(|worker| (worker, vec![step.session]));
    assert_eq!(asked(&mut bench), both);
    bench.now += Duration::from_millis(75);
    bench.answer(&step, 100);
    // Steps take 100 ms, so 199 are not unusual: only whether the workers live is asked.
    bench.wait(Duration::from_millis(199));
    assert_eq!(asked(&mut bench), [id("w0"), id("w1")].map(|worker| (worker, vec![])));
    bench.wait(CHECK_PATIENCE);
    assert_eq!(asked(&mut bench), both);
}

#[test]
fn a_question_names_as_many_sessions_as_a_message_may() {
    let n = MAX_ASKED + 3;
    let settings = CoordinatorSettings { max_sessions: n, max_per_client: n, ..without_drafts() };
    let mut bench = Bench::with(settings);
    let first = bench.started("").session;
    bench.now += Duration::from_millis(1);
    for _ in 1..n {
        bench.request(r#"{"tokens":[97,98,99]}"#);
        bench.open_all();
    }
    bench.wait(CHECK_PATIENCE);
    for (worker, sessions) in asked(&mut bench) {
        assert_eq!((sessions.len(), sessions[0]), (MAX_ASKED, first), "{worker}");
    }
}
