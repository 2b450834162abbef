//! Which results go as bulk, and what counts as sent then.

use std::sync::atomic::{AtomicU32, Ordering};

use stagebus_schemas::ids::CoordinatorId;

use super::*;
use crate::sessions::NextSubjects;
use crate::stage_fixture::{HIDDEN_DIM, stage};

fn route() -> Arc<Route> {
    Arc::new(Route {
        coordinator: CoordinatorId::new("c").expect("valid"),
        head_subject: "head".to_owned(),
        previous: None,
        next: Some(NextSubjects { step: "next.step".to_owned(), bulk: "next.bulk".to_owned() }),
        unsent: AtomicU32::default(),
        bulk_end: AtomicU32::default(),
    })
}

/// A step that has run on the first stage.
fn ran(stage: &Stage, route: &Arc<Route>, number: u32, phase: Phase, n_rows: usize) -> Job {
    let step = Step {
        session: SessionId::from_u64(1),
        epoch: Epoch::new(0),
        step: StepNumber::new(number),
        start_pos: 0,
        phase,
        tokens: vec![0; n_rows],
        wanted: vec![u32_of(n_rows) - 1],
        held_from: None,
        trace: vec![],
    };
    let mut job = Job::new(step, None, Arc::clone(route), Instant::now());
    let numbers = vec![0.5; n_rows * HIDDEN_DIM];
    let (rows, hidden) = (0..n_rows, StageOutput::Hidden(&numbers));
    let found = output(stage, Dtype::F32, &mut Heads::default(), &job, &rows, hidden);
    let time = RunTime { started: Instant::now(), infer: Duration::ZERO, n_rows, masked: 0 };
    assert!(job.advance(n_rows, found.expect("it fits"), time));
    job
}

/// What has left, and what is to be called when bulk has arrived.
#[derive(Default)]
struct Sent {
    /// Subject and steps of every message.
    messages: Vec<(String, Vec<u32>)>,
    arrivals: Vec<Box<dyn FnOnce() + Send>>,
}

impl Sent {
    fn send(&mut self, stage: &Stage, jobs: Vec<Job>) {
        let unsent = send(stage, Dtype::F32, jobs, &mut |message, manner| {
            let forward: Forward = codec::decode(&message.payload).expect("a step message");
            let steps = forward.steps.iter().map(|step| step.step.number()).collect();
            self.messages.push((message.subject, steps));
            if let Manner::Bulk(on_arrival) = manner {
                self.arrivals.push(on_arrival);
            }
            Ok(())
        });
        assert!(unsent.is_empty(), "{unsent:?}");
    }

    fn take(&mut self) -> Vec<(String, Vec<u32>)> {
        std::mem::take(&mut self.messages)
    }
}

fn messages<const N: usize>(all: [(&str, &[u32]); N]) -> Vec<(String, Vec<u32>)> {
    all.into_iter().map(|(subject, steps)| (subject.to_owned(), steps.to_vec())).collect()
}

/// Rows whose hidden states are just not large.
const FEW: usize = LARGE / 4 / HIDDEN_DIM;

#[test]
fn large_results_go_as_bulk_and_nothing_of_their_session_overtakes_them() {
    let (stage, mut sent) = (stage(0, 2), Sent::default());
    let (filling, other) = (route(), route());
    let unsent = || filling.unsent.load(Ordering::Relaxed);
    sent.send(&stage, vec![ran(&stage, &filling, 0, Phase::Prefill, FEW)]);
    assert_eq!((sent.take(), unsent()), (messages([("next.step", &[0])]), 1));
    // In one micro-batch with a step of another session that nobody may hold up.
    let jobs = vec![
        ran(&stage, &filling, 1, Phase::Prefill, FEW + 1),
        ran(&stage, &other, 0, Phase::Decode, 1),
        ran(&stage, &filling, 2, Phase::Prefill, 2),
    ];
    sent.send(&stage, jobs);
    sent.send(&stage, vec![ran(&stage, &filling, 3, Phase::Decode, 1)]);
    let expected = [("next.bulk", &[1, 2][..]), ("next.step", &[0]), ("next.bulk", &[3])];
    assert_eq!((sent.take(), unsent()), (messages(expected), 1), "bulk has not arrived");
    assert_eq!(other.unsent.load(Ordering::Relaxed), 1);
    let mut arrivals = std::mem::take(&mut sent.arrivals).into_iter();
    arrivals.next().expect("two messages")();
    assert_eq!(unsent(), 3);
    sent.send(&stage, vec![ran(&stage, &filling, 4, Phase::Decode, 1)]);
    assert_eq!(sent.take(), messages([("next.bulk", &[4])]), "step 3 has not arrived");
    arrivals.chain(std::mem::take(&mut sent.arrivals)).for_each(|arrives| arrives());
    sent.send(&stage, vec![ran(&stage, &filling, 5, Phase::Decode, 1)]);
    assert_eq!((sent.take(), unsent()), (messages([("next.step", &[5])]), 6));
}

#[test]
fn rows_of_an_answer_are_never_bulk_and_those_of_a_replay_are() {
    let (stage, route, mut sent) = (stage(0, 2), route(), Sent::default());
    sent.send(&stage, vec![ran(&stage, &route, 0, Phase::Decode, FEW + 1)]);
    let mut replay = ran(&stage, &route, 1, Phase::Decode, FEW + 1);
    replay.step.wanted.clear();
    sent.send(&stage, vec![replay]);
    assert_eq!(sent.take(), messages([("next.step", &[0]), ("next.bulk", &[1])]));
}
