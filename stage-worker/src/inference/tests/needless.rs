//! Steps that a later step of their session takes back.

use super::*;

/// Session, step and number of rows of the next `n` answers, in order.
fn answers(bench: &Bench, n: usize) -> Vec<(u64, u32, usize)> {
    let mut all = Vec::new();
    while all.len() < n {
        let head = bench.head();
        assert_eq!(head.faults, vec![]);
        let one = |step: HeadStep| (step.session.as_u64(), step.step.number(), step.rows.len());
        all.extend(head.steps.into_iter().map(one));
    }
    all
}

#[test]
fn steps_that_are_taken_back_are_answered_in_order_without_running() {
    let (mut bench, gate) = Bench::gated();
    bench.open(1, 0).expect("room");
    bench.open(2, 0).expect("room");
    bench.run(2, 0, 0, 0, &[9]);
    gate.entered();
    let prompt = [3, 1, 4, 1, 5];
    bench.run(1, 0, 0, 0, &prompt);
    for (number, pos) in [(1, 5), (2, 6), (3, 7), (4, 6)] {
        bench.run(1, 0, number, pos, &[number]);
    }
    assert_eq!(bench.inference.queued(), 6);
    for _ in 0..3 {
        gate.open();
        gate.entered();
    }
    // The steps behind the one that runs have been answered; the last one waits for the gate.
    let expected = [(2, 0, 1), (1, 0, 1), (1, 1, 1), (1, 2, 0), (1, 3, 0)];
    assert_eq!(answers(&bench, 5), expected);
    gate.open();
    let row = bench.step_done().rows.pop().expect("a row");
    let text = [&prompt[..], &[1, 4]].concat();
    assert_eq!((row.pos, row.token), (6, model().expected(&text, 1)[0]));
    assert_eq!(bench.open(1, 0), Ok(0));
    assert_eq!(bench.inference.queued(), 0);
}

#[test]
fn a_step_that_replaces_the_one_that_would_run_next_needs_no_micro_batch_for_it() {
    let mut bench = Bench::new(TestOptions::default(), usize::MAX);
    bench.open(1, 0).expect("room");
    let jobs = [(0, 0, &[7_u32, 8][..]), (1, 2, &[5]), (2, 2, &[6]), (3, 2, &[4])];
    let jobs = jobs.map(|(number, pos, tokens)| {
        let step = step(1, 0, number, pos, tokens);
        Job::new(step, None, Arc::clone(&bench.route), Instant::now())
    });
    bench.inference.send(Command::Run(jobs.into())).expect("room");
    assert_eq!(answers(&bench, 3), [(1, 0, 1), (1, 1, 0), (1, 2, 0)]);
    let row = bench.step_done().rows.pop().expect("a row");
    assert_eq!(row.token, model().expected(&[7, 8, 4], 1)[0]);
}
