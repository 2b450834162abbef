//! What sessions survive, and what ends them.

use super::*;

/// What a session asks for after a fault, once its workers have opened it again.
fn replayed(bench: &mut Bench) -> Vec<Step> {
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    bench.open_all();
    bench.steps()
}

#[test]
fn a_session_that_a_stage_lost_is_replayed_row_by_row_as_before() {
    let mut bench = Bench::new();
    let mut step = bench.started("");
    for token in [100, 101, 102] {
        bench.answer(&step, token);
        step = bench.step();
    }
    bench.events();
    bench.act(Action::Head(fault(&step, ErrorClass::UnknownSession)));
    let opens = bench.opens();
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    let open = &opens[0].2;
    assert_eq!((open.epoch, open.prompt_len), (Epoch::new(1), 3));
    assert_eq!(open.prompt, [97, 98, 99, 100, 101, 102]);
    for open in &opens {
        bench.answer_open(open, Ok(0));
    }
    let fill = bench.steps();
    assert_eq!(fill.len(), 2);
    assert_eq!((fill[0].phase, &fill[0].tokens[..]), (Phase::Prefill, &[97, 98, 99][..]));
    assert_eq!((fill[1].phase, &fill[1].tokens[..]), (Phase::Decode, &[100, 101][..]));
    assert!(fill.iter().all(|step| step.wanted.is_empty() && step.epoch == Epoch::new(1)));
    bench.answer(&fill[0], 0);
    assert!(bench.steps().is_empty());
    bench.answer(&fill[1], 0);
    let next = bench.step();
    assert_eq!((next.start_pos, &next.tokens[..], &next.wanted[..]), (5, &[102][..], &[0][..]));
    assert_eq!(bench.events(), [], "the client notices nothing");
    bench.answer(&next, 103);
    assert_eq!(bench.events(), [token_event(3, "g", &[103])]);
    assert_eq!(bench.state.counters.recoveries, 1);
}

#[test]
fn a_cached_prefix_shortens_the_replay() {
    let mut bench = Bench::new();
    let step = bench.started("");
    bench.act(Action::Head(fault(&step, ErrorClass::StepGap)));
    for open in &bench.opens() {
        bench.answer_open(open, Ok(1));
    }
    let step = bench.step();
    assert_eq!((step.start_pos, &step.wanted[..]), (1, &[1][..]));
}

#[test]
fn a_session_that_is_lost_again_and_again_fails() {
    let mut bench = Bench::new();
    let mut step = bench.started("");
    for _ in 0..super::super::ending::MAX_RECOVERIES {
        bench.act(Action::Head(fault(&step, ErrorClass::UnknownSession)));
        step = replayed(&mut bench).remove(0);
    }
    bench.act(Action::Head(fault(&step, ErrorClass::UnknownSession)));
    let (class, message, _) = bench.error();
    assert_eq!(class, ErrorClass::StageUnavailable);
    assert!(message.contains("stage 0"), "{message}");
    assert!(bench.state.is_idle());
}

#[test]
fn a_session_may_give_way_any_number_of_times() {
    let mut bench = Bench::new();
    let mut step = bench.started("");
    for _ in 0..super::super::ending::MAX_RECOVERIES + 5 {
        bench.act(Action::Head(fault(&step, ErrorClass::Preempted)));
        step = replayed(&mut bench).remove(0);
    }
    bench.answer(&step, 100);
    assert_eq!(bench.step().tokens, [100]);
}

#[test]
fn other_faults_of_a_stage_end_the_session_with_their_class() {
    for class in [ErrorClass::Internal, ErrorClass::Overloaded, ErrorClass::InvalidRequest] {
        let mut bench = Bench::new();
        let step = bench.started("");
        bench.act(Action::Head(fault(&step, class)));
        let (found, message, _) = bench.error();
        assert_eq!(found, class);
        assert!(message.contains("stage 0"), "{message}");
        assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    }
}

#[test]
fn a_session_whose_worker_is_gone_goes_on_with_another() {
    let lost = |step: &Step| LostStep {
        session: step.session,
        epoch: step.epoch,
        step: step.step,
        stage: StageIndex::new(1),
    };
    for how in 0..3 {
        let mut bench = Bench::new();
        let step = bench.started("");
        match how {
            0 => bench.act(Action::Lost(lost(&step))),
            1 => bench.announce("w1", 1, WorkerState::Leaving),
            _ => bench.act(Action::Checked { worker: id("w1"), gone: true }),
        }
        assert!(!bench.state.has_all_stages(bench.now), "way {how}");
        bench.act(Action::Lost(lost(&step)));
        bench.worker("x1", 1);
        let opens = bench.opens();
        assert_eq!(opens[0].2.route, [id("w0"), id("x1")], "way {how}");
        for open in &opens {
            bench.answer_open(open, Ok(0));
        }
        assert_eq!(bench.step().tokens, [97, 98, 99]);
    }
}

#[test]
fn without_another_worker_the_session_ends_after_a_while() {
    let mut bench = Bench::new();
    bench.started("");
    bench.events();
    bench.announce("w1", 1, WorkerState::Leaving);
    assert_eq!(bench.events(), []);
    bench.wait(bench.state.settings.recovery_wait());
    let (class, message, _) = bench.error();
    assert_eq!(class, ErrorClass::StageUnavailable);
    assert!(message.contains("stage 1"), "{message}");
}

#[test]
fn a_session_that_has_begun_waits_for_room() {
    let mut bench = Bench::new();
    let step = bench.started("");
    bench.act(Action::Head(fault(&step, ErrorClass::UnknownSession)));
    let full = ErrorReply {
        class: ErrorClass::Overloaded,
        message: "full".to_owned(),
        retry_after_ms: Some(70),
    };
    let refuse = |bench: &mut Bench| {
        let opens = bench.opens();
        bench.answer_open(&opens[0], Err(OpenFailure::Refused(full.clone())));
        bench.answer_open(&opens[1], Ok(0));
    };
    bench.events();
    refuse(&mut bench);
    assert!(bench.opens().is_empty());
    bench.wait(Duration::from_millis(69));
    assert!(bench.opens().is_empty());
    bench.wait(Duration::from_millis(1));
    bench.now += bench.state.settings.preempted_wait();
    refuse(&mut bench);
    assert_eq!(bench.error().0, ErrorClass::Overloaded);
}

#[test]
fn a_step_without_answer_is_replayed() {
    let mut bench = Bench::new();
    bench.started("");
    let timeout = bench.state.settings.step_timeout();
    bench.wait(timeout - Duration::from_millis(1));
    assert!(bench.opens().is_empty());
    bench.wait(Duration::from_millis(1));
    assert_eq!(bench.opens().len(), 2);
}

#[test]
fn workers_of_a_silent_session_are_asked_whether_they_live() {
    let mut bench = Bench::new();
    bench.started("");
    assert_eq!(bench.state.next_deadline(), Some(bench.now + super::super::CHECK_PATIENCE));
    let asked = |bench: &mut Bench| {
        bench.wait(super::super::CHECK_PATIENCE);
        let asked: Vec<_> = bench
            .effects
            .drain(..)
            .filter_map(|effect| match effect {
                Effect::Check { worker, .. } => Some(worker),
                _ => None,
            })
            .collect();
        asked
    };
    assert_eq!(asked(&mut bench), [id("w0"), id("w1")]);
    // One that has not answered is not asked again.
    bench.act(Action::Checked { worker: id("w0"), gone: false });
    assert_eq!(asked(&mut bench), [id("w0")]);
    bench.act(Action::Checked { worker: id("w1"), gone: true });
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
}

#[test]
fn after_a_broken_connection_answers_get_a_short_grace() {
    let mut bench = Bench::new();
    let prefill = bench.started("");
    bench.act(Action::Disconnected);
    bench.act(Action::Reconnected);
    // An answer that was not lost lets the session go on.
    bench.answer(&prefill, 100);
    let step = bench.step();
    bench.wait(super::super::RECONNECT_GRACE);
    assert!(bench.opens().is_empty());
    bench.act(Action::Reconnected);
    bench.wait(super::super::RECONNECT_GRACE);
    let fill = replayed(&mut bench);
    assert_eq!(fill.len(), 1);
    bench.events();
    bench.answer(&step, 1);
    assert_eq!(bench.events(), [], "an answer of the old epoch");
}

#[test]
fn a_missing_answer_is_replayed_and_wrong_rows_and_tokens_are_faults() {
    let mut bench = Bench::new();
    let prefill = bench.started("");
    let mut ahead = head(&prefill, 1);
    ahead.steps[0].step = StepNumber::new(3);
    bench.act(Action::Head(ahead));
    assert_eq!(bench.opens().len(), 2);

    type Spoil = fn(&mut Head);
    let spoils: [Spoil; 2] =
        [|head| head.steps[0].rows[0].pos = 7, |head| head.steps[0].rows[0].token = 9999];
    for spoil in spoils {
        let mut bench = Bench::new();
        let prefill = bench.started("");
        let mut head = head(&prefill, 1);
        spoil(&mut head);
        bench.act(Action::Head(head));
        assert_eq!(bench.error().0, ErrorClass::Internal);
    }
}
