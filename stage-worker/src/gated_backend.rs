//! A backend that tells when a micro-batch starts and waits for leave to run it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use stagebus_engine::backend::{Backend, KvUse, OpenError, SessionKey, StepDone, StepRows};
use stagebus_engine::testing::TestBackend;

/// Longest wait for something that must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// The test's side.
pub(crate) struct Gate {
    entered: Receiver<()>,
    open: Sender<()>,
}

impl Gate {
    /// Waits until a micro-batch stands before the gate.
    pub(crate) fn entered(&self) {
        self.entered.recv_timeout(PATIENCE).expect("a micro-batch in time");
    }

    /// Lets one micro-batch pass.
    pub(crate) fn open(&self) {
        self.open.send(()).expect("the thread lives");
    }
}

/// The backend's side.
pub(crate) struct Gated {
    backend: TestBackend,
    entered: Sender<()>,
    opened: Receiver<()>,
}

/// Puts a gate before a backend.
pub(crate) fn gated(backend: TestBackend) -> (Gated, Gate) {
    let (entered, has_entered) = channel();
    let (open, opened) = channel();
    (Gated { backend, entered, opened }, Gate { entered: has_entered, open })
}

impl Backend for Gated {
    fn open(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        room: usize,
    ) -> Result<usize, OpenError> {
        self.backend.open(session, prompt, room)
    }

    fn close(&mut self, session: SessionKey) {
        self.backend.close(session);
    }

    /// Without a gate any more, the test is over and nothing runs.
    fn run(&mut self, steps: &[StepRows<'_>], done: &mut dyn FnMut(StepDone<'_>)) {
        if self.entered.send(()).is_ok() && self.opened.recv().is_ok() {
            self.backend.run(steps, done);
        }
    }

    fn kv_use(&self) -> KvUse {
        self.backend.kv_use()
    }
}
