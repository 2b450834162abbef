//! What a worker says of how far its sessions are.

use stagebus_schemas::messages::control::StepProgress;

use super::*;
use crate::results::Manner;

/// What the worker answers of sessions: epoch, steps that have come, steps that have left.
fn progress(bench: &mut Bench, sessions: &[u64]) -> Vec<Option<(u32, u32, u32)>> {
    let asked: Vec<_> = sessions.iter().copied().map(SessionId::from_u64).collect();
    bench.control(ControlAction::Progress(asked.clone()));
    let outcomes = bench.outcomes();
    let [ControlOutcome::Progress(found)] = outcomes.as_slice() else {
        panic!("expected the progress, got {outcomes:?}");
    };
    assert!(found.iter().map(|entry| entry.session).eq(asked));
    let numbers = |StepProgress { epoch, expected, unsent }: StepProgress| {
        (epoch.number(), expected.number(), unsent.number())
    };
    found.iter().map(|entry| entry.steps.map(numbers)).collect()
}

#[test]
fn a_worker_says_which_steps_have_come_and_which_have_left() {
    let mut bench = Bench::with_sessions(&[1, 2]);
    assert_eq!(progress(&mut bench, &[]), []);
    bench.steps(vec![step(1, 0, 0, 1), step(2, 0, 0, 1)]);
    bench.steps(vec![step(1, 0, 1, 1)]);
    assert_eq!(progress(&mut bench, &[2, 1]), [Some((0, 1, 0)), Some((0, 2, 0))]);
    let jobs = |command| match command {
        Command::Run(jobs) => jobs,
        Command::Open(..) | Command::Close { .. } => vec![],
    };
    let mut jobs: Vec<Job> = bench.commands().into_iter().flat_map(jobs).collect();
    let last = jobs.pop().expect("three steps");
    let stage = Arc::clone(&bench.worker.stage);
    let refused = |message: Outgoing, _: Manner| {
        let bytes = message.payload.len();
        Err(stagebus_bus::PublishError::PayloadTooLarge { bytes, limit: 0 })
    };
    results::send(&stage, Dtype::F32, jobs, &mut |_, _| Ok(()));
    results::send(&stage, Dtype::F32, vec![last], &mut refused.clone());
    assert_eq!(progress(&mut bench, &[1, 2]), [Some((0, 2, 1)), Some((0, 1, 1))]);
}

#[test]
fn steps_that_are_refused_or_come_again_do_not_count() {
    let mut bench = Bench::with_sessions(&[1]);
    bench.steps(vec![step(1, 0, 0, 1)]);
    for repeated in [step(1, 0, 0, 1), step(1, 0, 2, 1), step(1, 4, 1, 1)] {
        bench.steps(vec![repeated]);
    }
    bench.sent();
    assert_eq!(progress(&mut bench, &[1]), [Some((0, 1, 0))]);
    bench.control(ControlAction::Open(open(1, 3)));
    assert_eq!(progress(&mut bench, &[1]), [Some((3, 0, 0))], "a new epoch begins anew");
    bench.control(close(1, 3));
    assert_eq!(bench.outcomes(), [ControlOutcome::Closed]);
    assert_eq!(progress(&mut bench, &[1, 2]), [None, None]);
}
