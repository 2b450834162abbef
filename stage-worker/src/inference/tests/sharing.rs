//! Sessions that share micro-batches, messages and the room for their caches.

use super::*;

fn together(max_kv_tokens: usize) -> Bench {
    let options = TestOptions { useful_batch: 4, max_kv_tokens, ..TestOptions::default() };
    Bench::new(options, usize::MAX)
}

impl Bench {
    fn job(&self, session: u64, epoch: u32, number: u32, start_pos: u32, tokens: &[u32]) -> Job {
        let step = step(session, epoch, number, start_pos, tokens);
        Job::new(step, None, Arc::clone(&self.route), Instant::now())
    }

    fn open_as(
        &mut self,
        session: u64,
        priority: Priority,
        n_prompt: usize,
    ) -> Result<u32, ErrorReply> {
        let prompt = vec![1; n_prompt];
        self.open_with(Open { priority, prompt, ..open(session, 0) })
    }

    /// Fills a session with `n_rows` rows.
    fn fill(&mut self, session: u64, priority: Priority, n_rows: u32) {
        self.open_as(session, priority, 0).expect("room");
        self.run(session, 0, 0, 0, &(0..n_rows).collect::<Vec<_>>());
        self.step_done();
    }
}

#[test]
fn steps_that_run_together_leave_together() {
    let mut bench = together(usize::MAX);
    let prompts: [&[u32]; 3] = [&[1, 2, 3], &[4, 5], &[6, 7, 8, 9]];
    for session in 0..3 {
        bench.open(session, 0).expect("room");
    }
    let jobs = (0..3).map(|idx| bench.job(idx as u64, 0, 0, 0, prompts[idx])).collect();
    bench.inference.send(Command::Run(jobs)).expect("room");
    let head = bench.head();
    let sessions: Vec<u64> = head.steps.iter().map(|step| step.session.as_u64()).collect();
    assert_eq!(sessions, [0, 1, 2]);
    for (step, prompt) in head.steps.iter().zip(prompts) {
        assert_eq!(vec![step.rows[0].token], model().expected(prompt, 1));
    }
    bench.open(9, 0).expect("room");
    assert_eq!((bench.inference.queued(), bench.inference.load().steps_completed), (0, 3));
}

#[test]
fn metrics_follow_steps_and_what_was_cached() {
    let mut bench = together(usize::MAX);
    for session in 0..2 {
        let (prompt, prompt_len) = (vec![1, 2, 3], 3);
        let open = Open { prompt, prompt_len, ..open(session, 0) };
        bench.open_with(open.clone()).expect("room");
        // The same open again is not counted again.
        bench.open_with(open).expect("room");
    }
    let prompts: [&[u32]; 2] = [&[1, 2, 3], &[4]];
    let jobs = (0..2).map(|idx| bench.job(idx as u64, 0, 0, 0, prompts[idx])).collect();
    bench.inference.send(Command::Run(jobs)).expect("room");
    assert_eq!(bench.head().steps.len(), 2);
    bench.run(0, 0, 7, 40, &[9]);
    bench.fault();
    bench.open(9, 0).expect("room");
    let metrics = &bench.inference.metrics;
    assert_eq!((metrics.steps_done.get(), metrics.steps_failed.get()), (2, 1));
    assert_eq!((metrics.rows.get(), metrics.queue_steps.get()), (4 + 1, 0));
    assert_eq!((metrics.prompt_tokens.get(), metrics.preemptions.get()), (6, 0));
}

#[test]
fn results_too_large_for_one_message_leave_in_several() {
    let options = TestOptions { useful_batch: 4, ..TestOptions::default() };
    let mut bench = Bench::new(options, 300);
    for session in 0..4 {
        bench.open(session, 0).expect("room");
    }
    let jobs = (0..4).map(|session| bench.job(session, 0, 0, 0, &[7, 8])).collect();
    bench.inference.send(Command::Run(jobs)).expect("room");
    let mut sessions = Vec::new();
    let mut n_messages = 0;
    while sessions.len() < 4 {
        let head = bench.head();
        assert!(head.faults.is_empty());
        sessions.extend(head.steps.iter().map(|step| step.session.as_u64()));
        n_messages += 1;
    }
    assert_eq!(sessions, [0, 1, 2, 3]);
    assert!(n_messages > 1);
}

#[test]
fn a_long_chunk_runs_in_parts_and_is_answered_once() {
    let mut bench = together(usize::MAX);
    bench.open(1, 0).expect("room");
    let tokens: Vec<u32> = (0..50).map(|i| (i * 7) % 50).collect();
    let mut chunk = bench.job(1, 0, 0, 0, &tokens[..40]);
    chunk.step.wanted = vec![];
    bench.inference.send(Command::Run(vec![chunk])).expect("room");
    assert_eq!(bench.step_done().rows, []);
    let mut rest = bench.job(1, 0, 1, 40, &tokens[40..]);
    rest.step.wanted = vec![0, 9];
    bench.inference.send(Command::Run(vec![rest])).expect("room");
    let done = bench.step_done();
    let chosen: Vec<(u32, u32)> = done.rows.iter().map(|row| (row.pos, row.token)).collect();
    let expected = [40, 49].map(|row| (row, model().expected(&tokens[..=row as usize], 1)[0]));
    assert_eq!(chosen, expected);
    // A replay of generated rows is cut as well.
    bench.open(1, 1).expect("room");
    let mut replay = bench.job(1, 1, 0, 2, &tokens[2..]);
    replay.step.phase = Phase::Decode;
    bench.inference.send(Command::Run(vec![replay])).expect("room");
    assert_eq!(bench.step_done().rows[0].token, chosen[1].1);
    // The load is written after the result has left; the next answer comes after both.
    bench.open(9, 0).expect("room");
    assert_eq!(bench.inference.load().kv_tokens, 50);
}

#[test]
fn a_failure_in_the_middle_of_a_chunk_is_told_once() {
    let faults = vec![Fault::FailAtStep { step: 1 }];
    let mut bench =
        Bench::new(TestOptions { useful_batch: 4, faults, ..Default::default() }, usize::MAX);
    bench.open(1, 0).expect("room");
    let tokens: Vec<u32> = (0..50).collect();
    let mut chunk = bench.job(1, 0, 0, 0, &tokens);
    chunk.step.wanted = vec![];
    bench.inference.send(Command::Run(vec![chunk])).expect("room");
    assert_eq!(bench.fault().error.class, ErrorClass::Internal);
    assert!(matches!(bench.events.blocking_recv(), Some(InferenceEvent::Lost { .. })));
    assert_eq!(bench.open(1, 1), Ok(0));
    assert_eq!(bench.generate(1, 1, &tokens[..3], 4), model().expected(&tokens[..3], 4));
    assert_eq!(bench.inference.queued(), 0);
}

#[test]
fn the_youngest_session_gives_way_and_loses_nothing() {
    let mut bench = together(20);
    bench.fill(1, Priority::Interactive, 9);
    bench.fill(2, Priority::Interactive, 9);
    let mine: Vec<u32> = (0..9).collect();
    let first = model().expected(&mine, 1)[0];
    // The older one needs room; its step runs and nobody is told of anything yet.
    bench.run(1, 0, 1, 9, &[first, 5, 6]);
    let token = bench.step_done().rows[0].token;
    assert_eq!(vec![token], model().expected(&[&mine[..], &[first, 5, 6]].concat(), 1));
    // The younger one hears of it with its next step, once.
    bench.run(2, 0, 1, 9, &[first]);
    bench.run(2, 0, 2, 10, &[3]);
    let fault = bench.fault();
    assert_eq!((fault.session.as_u64(), fault.step.number()), (2, 1));
    assert_eq!(fault.error.class, ErrorClass::Preempted);
    // It comes back when there is room.
    let prompt = [&mine[..], &[first]].concat();
    let again = |bench: &mut Bench, epoch| {
        let prompt = prompt.clone();
        bench.open_with(Open { prompt, ..open(2, epoch) })
    };
    assert_eq!(again(&mut bench, 1).expect_err("no room").class, ErrorClass::Overloaded);
    bench.inference.send(Command::Close { session: SessionId::from_u64(1) }).expect("room");
    assert_eq!(again(&mut bench, 2), Ok(0));
    assert_eq!(bench.generate(2, 2, &prompt, 5), model().expected(&prompt, 5));
    assert_eq!(bench.inference.queued(), 0);
}

#[test]
fn a_session_that_gave_way_comes_back_as_old_as_it_is() {
    let mut bench = together(20);
    bench.fill(1, Priority::Batch, 9);
    // It gives way to an interactive session, and a younger batch session takes what is left.
    bench.open_as(2, Priority::Interactive, 12).expect("the batch session's room");
    bench.run(1, 0, 1, 9, &[1]);
    assert_eq!(bench.fault().error.class, ErrorClass::Preempted);
    for session in [1, 2] {
        let session = SessionId::from_u64(session);
        bench.inference.send(Command::Close { session }).expect("room");
    }
    bench.fill(3, Priority::Batch, 9);
    bench.open_with(Open { priority: Priority::Batch, ..open(1, 1) }).expect("room");
    bench.run(1, 1, 0, 0, &(0..9).collect::<Vec<_>>());
    bench.step_done();
    // Session 3 came after it, so it gives way.
    bench.run(1, 1, 1, 9, &[1, 2, 3]);
    bench.step_done();
    bench.run(3, 0, 1, 9, &[1]);
    let fault = bench.fault();
    assert_eq!((fault.session.as_u64(), fault.error.class), (3, ErrorClass::Preempted));
}

#[test]
fn batch_sessions_give_way_first_and_the_youngest_before_itself() {
    let mut bench = together(24);
    bench.fill(1, Priority::Batch, 6);
    bench.fill(2, Priority::Batch, 6);
    bench.fill(3, Priority::Interactive, 6);
    bench.fill(4, Priority::Interactive, 6);
    // The oldest batch session needs room: the younger batch session goes.
    bench.run(1, 0, 1, 6, &[1, 2, 3]);
    bench.step_done();
    bench.run(2, 0, 1, 6, &[1]);
    assert_eq!(bench.fault().error.class, ErrorClass::Preempted);
    // An interactive one needs room: the other batch session goes.
    bench.run(3, 0, 1, 6, &[1, 2, 3, 4, 5]);
    bench.step_done();
    bench.run(1, 0, 2, 9, &[1]);
    assert_eq!(bench.fault().error.class, ErrorClass::Preempted);
    // Among interactive ones the youngest goes, even if it is the one that needs room.
    bench.run(4, 0, 1, 6, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bench.fault().error.class, ErrorClass::Preempted);
    bench.run(3, 0, 2, 11, &[1, 2, 3]);
    bench.step_done();
    // Alone it can have everything, but no more.
    bench.run(3, 0, 3, 14, &(0..11).collect::<Vec<_>>());
    assert_eq!(bench.fault().error.class, ErrorClass::Overloaded);
    assert_eq!(bench.inference.queued(), 0);
}

#[test]
fn an_open_is_refused_where_the_prompt_finds_no_room() {
    let mut bench = together(20);
    bench.fill(1, Priority::Batch, 12);
    let refused = bench.open_as(2, Priority::Batch, 9).expect_err("no room");
    assert_eq!(refused.class, ErrorClass::Overloaded);
    assert!(refused.retry_after_ms.is_some());
    let never = bench.open_as(2, Priority::Interactive, 21).expect_err("never any room");
    assert_eq!(never.class, ErrorClass::InvalidRequest);
    // An interactive session takes the place of a batch session.
    assert_eq!(bench.open_as(3, Priority::Interactive, 9), Ok(0));
    bench.run(1, 0, 1, 12, &[1]);
    assert_eq!(bench.fault().error.class, ErrorClass::Preempted);
}
