//! Sessions whose constraints are compiled while they open.

use super::*;
use crate::guide_fixture::guide;

/// An open under a constraint.
fn constrained(session: u64, epoch: u32) -> Open {
    let pattern = Constraint::Regex { pattern: "ab".to_owned() };
    let sampling = Sampling { constraint: Some(Arc::new(pattern)), ..Sampling::default() };
    Open { sampling, ..open(session, epoch) }
}

impl Bench {
    /// The opens that wait for their constraints.
    fn uncompiled(&mut self) -> Vec<Open> {
        self.worker.take_uncompiled().into_iter().map(|(order, _)| order.open).collect()
    }

    fn compiled(&mut self, open: Open) {
        let order = Box::new(OpenOrder { open, trace: None });
        self.apply(Action::Compiled { order, guide: Ok(guide("ab")) });
    }

    /// Epochs of the opens that the inference thread gets with a guide.
    fn guided_opens(&self) -> Vec<u32> {
        let epoch = |command| match command {
            Command::Open(order, Some(_)) => Some(order.open.epoch.number()),
            Command::Open(_, None) | Command::Close { .. } | Command::Run(_) => None,
        };
        self.commands().into_iter().filter_map(epoch).collect()
    }

    /// Classes of the failures that were answered.
    fn failures(&mut self) -> Vec<ErrorClass> {
        let class = |outcome| match outcome {
            ControlOutcome::Failed(error) => Some(error.class),
            _ => None,
        };
        self.outcomes().into_iter().filter_map(class).collect()
    }
}

#[test]
fn an_open_waits_for_its_constraint() {
    let mut bench = Bench::new();
    bench.control(ControlAction::Open(constrained(1, 0)));
    assert!(bench.commands().is_empty());
    let mut opens = bench.uncompiled();
    assert_eq!(opens[0], constrained(1, 0));
    bench.compiled(opens.remove(0));
    assert_eq!(bench.guided_opens(), [0]);
    bench.opened(1, 0, Ok(2));
    assert_eq!(bench.outcomes(), [ControlOutcome::Opened { cached_len: 2 }]);
}

#[test]
fn who_does_not_choose_does_not_wait() {
    let mut bench = Bench::new();
    let full = Open { head: HeadMode::Full, ..constrained(1, 0) };
    bench.control(ControlAction::Open(full));
    assert!(bench.uncompiled().is_empty());
    assert!(matches!(bench.commands().as_slice(), [Command::Open(_, None)]));
}

#[test]
fn a_constraint_that_cannot_be_compiled_leaves_no_session() {
    let mut bench = Bench::new();
    bench.control(ControlAction::Open(constrained(1, 0)));
    let order = Box::new(OpenOrder { open: bench.uncompiled().remove(0), trace: None });
    bench.apply(Action::Compiled { order, guide: Err(ConstraintError::NoEnd) });
    assert_eq!(bench.failures(), [ErrorClass::Internal]);
    bench.steps(vec![step(1, 0, 0, 1)]);
    assert_eq!(bench.fault_classes(), [ErrorClass::UnknownSession]);
    assert!(bench.commands().is_empty());
}

#[test]
fn a_session_that_has_gone_on_or_ended_meanwhile_stays_as_it_is() {
    let mut bench = Bench::new();
    bench.control(ControlAction::Open(constrained(1, 0)));
    bench.control(ControlAction::Open(constrained(1, 1)));
    let opens = bench.uncompiled();
    assert_eq!(opens.len(), 2);
    opens.into_iter().for_each(|open| bench.compiled(open));
    assert_eq!(bench.guided_opens(), [1]);
    assert_eq!(bench.failures(), [ErrorClass::StaleEpoch]);
    bench.opened(1, 1, Ok(0));
    assert_eq!(bench.outcomes(), [ControlOutcome::Opened { cached_len: 0 }]);

    bench.control(ControlAction::Open(constrained(2, 0)));
    bench.control(close(2, 0));
    bench.outcomes();
    bench.commands();
    let open = bench.uncompiled().remove(0);
    bench.compiled(open);
    assert!(bench.guided_opens().is_empty());
    assert_eq!(bench.failures(), [ErrorClass::StaleEpoch]);
}
