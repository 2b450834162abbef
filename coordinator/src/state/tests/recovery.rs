//! What sessions survive, and what ends them.

use super::*;

/// What a session asks for after a fault, once its workers have opened it again.
fn replayed(bench: &mut Bench) -> Vec<Step> {
    assert_eq!(bench.closed(), [], "workers keep what they have");
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
    assert_eq!(bench.closed(), []);
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
    assert_eq!(bench.events(), [], "no token is lost or comes twice");
    assert_eq!(bench.told, [(RequestState::Recovering, Some(StageIndex::FIRST))]);
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
        assert_eq!(bench.closed(), [id("w0"), id("w1")], "it makes room everywhere");
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
            _ => bench.gone("w1"),
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
    assert_eq!(
        bench.told,
        [RequestState::Recovering, RequestState::Waiting]
            .map(|state| (state, Some(StageIndex::new(1))))
    );
    bench.wait(bench.state.settings.recovery_wait());
    let (class, message, _) = bench.error();
    assert_eq!(bench.closed(), [id("w0"), id("w1")], "whoever has it need not keep it");
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
    assert_eq!(bench.state.next_deadline(), Some(bench.now + CHECK_PATIENCE));
    let asked = |bench: &mut Bench| {
        bench.wait(CHECK_PATIENCE);
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
    // No answer is no proof, and no reason to stop asking.
    bench.act(Action::Checked { worker: id("w0"), asked: bench.now, answer: CheckAnswer::Silent });
    assert_eq!(asked(&mut bench), [id("w0"), id("w1")]);
    bench.gone("w1");
    assert_eq!(bench.closed(), []);
    bench.worker("x1", 1);
    assert_eq!(bench.closed(), [id("w1")], "should it live, it need not keep the session");
    let opens = bench.opens();
    assert_eq!(opens.len(), 2);
    bench.answer_open(&opens[0], Ok(1));
    assert_eq!(asked(&mut bench), [id("w0"), id("x1")], "those that open it are asked as well");
    bench.gone("x1");
    bench.worker("y1", 1);
    let opens = bench.opens();
    assert_eq!(opens[0].2.route, [id("w0"), id("y1")]);
    assert_eq!(bench.closed(), [], "the first stage keeps what it has");
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
    bench.wait(super::super::LOSS_GRACE);
    assert!(bench.opens().is_empty());
    bench.act(Action::Reconnected);
    bench.wait(super::super::LOSS_GRACE);
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

/// Lets a worker announce what its inference does.
fn busy(bench: &mut Bench, name: &str, stage: u16, change: impl FnOnce(&mut WorkerLoad)) {
    let mut announcement = bench.announcement(name, stage, WorkerState::Ready);
    change(&mut announcement.load);
    bench.act(Action::Worker(announcement));
}

#[test]
fn a_stuck_worker_is_left_until_its_inference_goes_on() {
    let mut bench = Bench::new();
    bench.started("");
    let stuck = |load: &mut WorkerLoad| (load.busy_ms, load.expected_ms) = (1_001, 5);
    // What takes long by what was measured, or was never measured, may take its time.
    busy(&mut bench, "w1", 1, |load| (load.busy_ms, load.expected_ms) = (9_000, 500));
    busy(&mut bench, "w1", 1, |load| (load.busy_ms, load.expected_ms) = (9_000, 0));
    assert!(bench.opens().is_empty());
    busy(&mut bench, "w1", 1, stuck);
    assert!(bench.opens().is_empty() && !bench.state.has_all_stages(bench.now));
    busy(&mut bench, "w1", 1, stuck);
    bench.events();
    assert_eq!(
        bench.told,
        [RequestState::Recovering, RequestState::Waiting]
            .map(|state| (state, Some(StageIndex::new(1))))
    );
    bench.worker("w1", 1);
    assert_eq!(bench.opens().len(), 2, "it may be used again");
}

#[test]
fn steps_get_a_short_grace_when_messages_may_be_lost() {
    for of_worker in [true, false] {
        let mut bench = Bench::new();
        bench.started("");
        match of_worker {
            true => busy(&mut bench, "w1", 1, |load| load.losses = 1),
            false => bench.act(Action::MessagesLost),
        }
        bench.wait(super::super::LOSS_GRACE - Duration::from_millis(1));
        assert!(bench.opens().is_empty());
        bench.wait(Duration::from_millis(1));
        assert_eq!(bench.opens().len(), 2);
    }
}

#[test]
fn what_all_workers_still_have_is_not_computed_again() {
    let mut bench = Bench::new();
    let mut step = bench.started("");
    for token in [100, 101, 102] {
        bench.answer(&step, token);
        step = bench.step();
    }
    // Both have the prompt and two generated tokens; the last step is lost behind the first stage.
    bench.act(Action::Head(fault(&step, ErrorClass::StepGap)));
    let opens = bench.opens();
    bench.answer_open(&opens[0], Ok(6));
    bench.answer_open(&opens[1], Ok(5));
    let next = bench.step();
    assert_eq!((next.start_pos, &next.tokens[..], &next.wanted[..]), (5, &[102][..], &[0][..]));
    // One that has only one generated token needs the other again, by itself.
    bench.act(Action::Head(fault(&next, ErrorClass::StepGap)));
    let opens = bench.opens();
    bench.answer_open(&opens[0], Ok(6));
    bench.answer_open(&opens[1], Ok(4));
    let fill = bench.step();
    assert_eq!((fill.start_pos, fill.phase, &fill.tokens[..]), (4, Phase::Decode, &[101][..]));
}

#[test]
fn only_a_new_first_stage_computes_what_the_others_still_have() {
    let mut bench = Bench::new();
    let mut step = bench.started("");
    for token in [100, 101, 102] {
        bench.answer(&step, token);
        step = bench.step();
    }
    bench.gone("w0");
    bench.worker("x0", 0);
    let opens = bench.opens();
    assert_eq!(opens[0].2.route, [id("x0"), id("w1")]);
    bench.answer_open(&opens[0], Ok(0));
    bench.answer_open(&opens[1], Ok(4));
    let second = Some(StageIndex::new(1));
    let fill = bench.steps();
    let of = |step: &Step| (step.start_pos, step.phase, step.tokens.clone(), step.held_from);
    assert_eq!(of(&fill[0]), (0, Phase::Prefill, vec![97, 98, 99], second));
    assert_eq!(of(&fill[1]), (3, Phase::Decode, vec![100], second));
    assert_eq!(of(&fill[2]), (4, Phase::Decode, vec![101], None), "both lack it");
    assert!(fill.iter().all(|step| step.wanted.is_empty()));
    fill.iter().for_each(|step| bench.answer(step, 0));
    let next = bench.step();
    assert_eq!(of(&next), (5, Phase::Decode, vec![102], None));
    // A new last stage needs the hidden states of all rows, whatever the first one has.
    bench.gone("w1");
    bench.worker("x1", 1);
    let opens = bench.opens();
    bench.answer_open(&opens[0], Ok(5));
    bench.answer_open(&opens[1], Ok(0));
    let fill = bench.steps();
    assert_eq!(of(&fill[0]), (0, Phase::Prefill, vec![97, 98, 99], None));
    assert_eq!(of(&fill[1]), (3, Phase::Decode, vec![100, 101], None));
}

#[test]
fn a_client_hears_every_second_that_somebody_works_for_it() {
    let mut bench = Bench::new();
    let step = bench.started("");
    let second = super::super::STATUS_INTERVAL;
    bench.wait(second - Duration::from_millis(1));
    bench.wait(Duration::from_millis(1));
    bench.answer(&step, 100);
    bench.wait(second / 2);
    bench.wait(second / 2);
    bench.wait(second);
    bench.events();
    let states = [RequestState::Prefilling, RequestState::Generating, RequestState::Generating];
    assert_eq!(bench.told, states.map(|state| (state, None)));
}

#[test]
fn a_client_that_does_not_listen_any_more_frees_all_stages() {
    let mut bench = Bench::new();
    bench.started("");
    bench.events();
    bench.act(Action::ClientGone("other".into()));
    assert!(!bench.state.is_idle());
    bench.act(Action::ClientGone("inbox".into()));
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    assert!(bench.state.is_idle() && bench.events().is_empty());
    assert_eq!(bench.state.counters.clients_gone, 1);
}

#[test]
fn after_a_broken_connection_workers_hear_which_sessions_to_keep() {
    let mut bench = Bench::new();
    let session = bench.started("").session;
    bench.act(Action::Disconnected);
    bench.act(Action::Reconnected);
    let keeps = bench.effects.iter().filter_map(|effect| match effect {
        Effect::Keep { worker, sessions, .. } => Some((worker.clone(), sessions.clone())),
        _ => None,
    });
    let mut keeps: Vec<_> = keeps.collect();
    keeps.sort();
    assert_eq!(keeps, [(id("w0"), vec![session]), (id("w1"), vec![session])]);
}
