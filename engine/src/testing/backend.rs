//! The [`Backend`] that runs a [`TestModel`].

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::backend::{
    Backend, KvUse, OpenError, SessionKey, StageOutput, StepDone, StepError, StepRows, common_len,
};
use crate::stage::StageSpec;
use crate::testing::fault::{Fault, InjectedFault};
use crate::testing::model::{TestModel, next_chain};
use crate::validate::{check_alone, check_step};

/// How a test backend behaves besides computing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestOptions {
    /// Most open sessions.
    pub max_sessions: usize,
    /// Sessions that one micro-batch runs together; 1 runs them one by one.
    pub useful_batch: usize,
    /// Positions that all sessions together can hold; a block is one of them.
    pub max_kv_tokens: usize,
    /// Time of every call of [`Backend::run`], on top of the rows.
    pub delay_per_run: Duration,
    /// Time of every row.
    pub delay_per_row: Duration,
    /// What goes wrong, and when.
    pub faults: Vec<Fault>,
}

impl Default for TestOptions {
    fn default() -> Self {
        Self {
            max_sessions: 256,
            useful_batch: 1,
            max_kv_tokens: usize::MAX,
            delay_per_run: Duration::ZERO,
            delay_per_row: Duration::ZERO,
            faults: Vec::new(),
        }
    }
}

/// One stage of a [`TestModel`].
#[derive(Debug)]
pub struct TestBackend {
    model: TestModel,
    spec: StageSpec,
    options: TestOptions,
    sessions: HashMap<SessionKey, Session>,
    output: Vec<f32>,
    n_opens: u64,
    n_steps: u64,
}

/// What the stage's layers have seen of a session: per layer the chain after each position.
#[derive(Debug, Default)]
struct Session {
    chains: Vec<Vec<u64>>,
    tokens: Vec<u32>,
}

impl TestBackend {
    /// One stage of `model`. `spec` must come from [`TestModel::stage`] or from the manifest that
    /// gave the model.
    #[must_use]
    pub fn new(model: TestModel, spec: StageSpec, options: TestOptions) -> Self {
        let (sessions, output) = (HashMap::new(), Vec::new());
        Self { model, spec, options, sessions, output, n_opens: 0, n_steps: 0 }
    }

    /// All stages of `model`, cut into `n_stages` nearly equal parts.
    #[must_use]
    pub fn pipeline(model: &TestModel, n_stages: usize, options: &TestOptions) -> Vec<Self> {
        let cut = |stage: usize| stage * model.n_layers / n_stages;
        (0..n_stages)
            .map(|stage| {
                let spec = model.stage(cut(stage)..cut(stage + 1));
                Self::new(model.clone(), spec, options.clone())
            })
            .collect()
    }

    fn kv_tokens(&self) -> usize {
        self.sessions.values().map(|session| session.tokens.len()).sum()
    }

    /// The faults of the step that runs now.
    fn next_faults(&mut self) -> Vec<Fault> {
        let now = self.n_steps;
        self.n_steps += 1;
        let strikes = |fault: &Fault| match *fault {
            Fault::FailAtOpen { .. } => false,
            Fault::FailAtStep { step }
            | Fault::HangAtStep { step, .. }
            | Fault::PanicAtStep { step }
            | Fault::CorruptAtStep { step } => step == now,
        };
        self.options.faults.iter().copied().filter(strikes).collect()
    }

    /// Runs one step; its output is then in `self.output`.
    fn step(&mut self, step: &StepRows<'_>) -> Result<(), StepError> {
        let key = step.session;
        let session = self.sessions.get(&key).ok_or(StepError::UnknownSession { session: key })?;
        let limit = self.model.context_length;
        let n_rows = check_step(step, &self.spec, session.tokens.len(), limit)?;
        let held = self.kv_tokens() - session.tokens.len();
        let available = self.options.max_kv_tokens.saturating_sub(held + step.start_pos);
        if n_rows > available {
            return Err(StepError::OutOfBlocks { session: key, needed: n_rows, available });
        }
        let faults = self.next_faults();
        for &fault in &faults {
            match fault {
                Fault::HangAtStep { hold, .. } => block(hold),
                Fault::PanicAtStep { .. } => raise(fault),
                Fault::FailAtStep { .. } => {
                    self.sessions.remove(&key);
                    return Err(StepError::Runtime(Box::new(InjectedFault(fault))));
                }
                Fault::FailAtOpen { .. } | Fault::CorruptAtStep { .. } => {}
            }
        }
        block(self.options.delay_per_row.saturating_mul(n_rows as u32));
        let states = self.append(step);
        self.emit(&states, step.wanted);
        if faults.iter().any(|fault| matches!(fault, Fault::CorruptAtStep { .. })) {
            // A number above every logit and outside the range of hidden states.
            if let Some(value) = self.output.first_mut() {
                *value += 512.0;
            }
        }
        Ok(())
    }

    /// Truncates, appends, and returns the rows' states behind the stage's last layer.
    fn append(&mut self, step: &StepRows<'_>) -> Vec<u64> {
        let (model, hidden_dim) = (&self.model, self.spec.hidden_dim);
        let mut states: Vec<u64> = match step.hidden {
            None => step.tokens.iter().map(|&token| model.embed(token)).collect(),
            Some(hidden) => {
                hidden.chunks_exact(hidden_dim).map(|row| model.read_hidden(row)).collect()
            }
        };
        let session = self.sessions.entry(step.session).or_default();
        for (layer, chain) in self.spec.layers.clone().zip(&mut session.chains) {
            chain.truncate(step.start_pos);
            for (row, state) in states.iter_mut().enumerate() {
                let next = next_chain(chain.last().copied().unwrap_or(0), *state, step.tokens[row]);
                chain.push(next);
                *state = model.layer(layer, next, step.start_pos + row);
            }
        }
        session.tokens.truncate(step.start_pos);
        session.tokens.extend_from_slice(step.tokens);
        states
    }

    fn emit(&mut self, states: &[u64], wanted: &[u32]) {
        self.output.clear();
        if self.spec.is_last() {
            for &row in wanted {
                self.model.push_logits(states[row as usize], &mut self.output);
            }
        } else {
            for &state in states {
                self.model.push_hidden(state, &mut self.output);
            }
        }
    }
}

impl Backend for TestBackend {
    fn open(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        room: usize,
    ) -> Result<usize, OpenError> {
        if let Some(open) = self.sessions.get(&session) {
            return Ok(common_len(&open.tokens, prompt));
        }
        let now = self.n_opens;
        self.n_opens += 1;
        let fault = Fault::FailAtOpen { open: now };
        if self.options.faults.contains(&fault) {
            return Err(OpenError::Runtime(Box::new(InjectedFault(fault))));
        }
        let (n_sessions, max_sessions) = (self.sessions.len(), self.options.max_sessions);
        if n_sessions >= max_sessions {
            return Err(OpenError::Full { n_sessions, max_sessions });
        }
        let (needed, total) = (prompt.len().max(room), self.options.max_kv_tokens);
        let available = total.saturating_sub(self.kv_tokens());
        if needed > available {
            return Err(OpenError::OutOfBlocks { needed, available, total });
        }
        let chains = vec![Vec::new(); self.spec.layers.len()];
        self.sessions.insert(session, Session { chains, tokens: Vec::new() });
        Ok(0)
    }

    fn close(&mut self, session: SessionKey) {
        self.sessions.remove(&session);
    }

    fn run(&mut self, steps: &[StepRows<'_>], done: &mut dyn FnMut(StepDone<'_>)) {
        block(self.options.delay_per_run);
        for (index, step) in steps.iter().enumerate() {
            let started = Instant::now();
            let result = check_alone(steps, index).and_then(|()| self.step(step));
            let infer_time = started.elapsed();
            let output = result.map(|()| match self.spec.is_last() {
                true => StageOutput::Logits(&self.output),
                false => StageOutput::Hidden(&self.output),
            });
            done(StepDone { index, output, infer_time, n_rows: step.tokens.len(), masked: 0 });
        }
    }

    fn useful_batch(&self) -> usize {
        self.options.useful_batch
    }

    fn kv_use(&self) -> KvUse {
        let tokens = self.kv_tokens() as u64;
        let chain_bytes = (self.spec.layers.len() * size_of::<u64>()) as u64;
        KvUse {
            n_sessions: self.sessions.len(),
            tokens,
            bytes: tokens * chain_bytes,
            ..KvUse::default()
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "stands for inference, which blocks its thread")]
fn block(time: Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

#[expect(clippy::panic, reason = "the fault is a panic")]
fn raise(fault: Fault) -> ! {
    panic!("{}", InjectedFault(fault))
}
