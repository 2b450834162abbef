//! OpenVINO with one infer request per session on one compiled model.
//!
//! A request keeps the session's KV cache as model state. Rows always go to the end of it; a
//! rewind masks what it leaves behind, while position ids follow the session's length. A step
//! that starts at position 0 gets a fresh request, so a replay from 0 also sheds masked slots.
//!
//! **Limits**: sessions of a micro-batch run one after the other. Rows of a step run as one
//! multi-token sequence whatever their [`RowPath`](crate::RowPath), so in the fast profile a
//! verified draft can differ from plain decoding in near ties; in the exact profile it does not.

mod error;
mod graph;
mod slots;

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use stagebus_shards::shard_set::StageFiles;

use crate::backend::{
    Backend, KvUse, OpenError, SessionKey, StageOutput, StepDone, StepError, StepRows, common_len,
};
use crate::load::{LoadError, compile};
use crate::openvino::{self, CompiledModel, InferRequest, InferenceError, Runtime};
use crate::options::EngineOptions;
use crate::properties;
use crate::stage::StageSpec;
use crate::validate::{check_alone, check_step};

use graph::{Graph, Rows};
use slots::Slots;

/// KV bytes of closed sessions after which memory is given back to the system: rarely enough that
/// the few milliseconds it takes do not count.
const TRIM_BYTES: u64 = 64 << 20;

/// The same for a stage without sessions, which has nothing better to do.
const IDLE_TRIM_BYTES: u64 = 8 << 20;

/// One stage on OpenVINO.
#[derive(Debug)]
pub struct StatefulBackend {
    sessions: HashMap<SessionKey, Session>,
    graph: Graph,
    spec: StageSpec,
    limits: Limits,
    info: StatefulInfo,
    /// KV bytes of closed sessions since memory was last given back.
    closed_bytes: u64,
    /// Last, so that requests go before it.
    model: CompiledModel,
}

/// What became of the options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatefulInfo {
    /// OpenVINO's version as it spells it.
    pub openvino: String,
    /// Precision of the KV caches that the device reports, for example `u8`; empty if it does not.
    pub kv_precision: String,
    /// Precision of the inference that the device reports, for example `f32`; empty if it does not.
    pub inference_precision: String,
    /// KV cache per token, in bytes: from dimensions and precision (f32 if that is not known), with
    /// scale and zero point of 8-bit caches. The device may reserve up to twice as much ahead.
    pub kv_bytes_per_token: u64,
    /// Time to read and compile, or to import from the cache folder.
    pub load_time: Duration,
}

#[derive(Debug)]
struct Session {
    request: InferRequest,
    slots: Slots,
    /// Token of every row.
    tokens: Vec<u32>,
}

#[derive(Debug)]
struct Limits {
    max_sessions: usize,
    context: usize,
    max_masked: usize,
    compact_at: usize,
}

impl Limits {
    /// Whether so many slots are masked that filling the session again pays.
    fn is_bloated(&self, slots: &Slots) -> bool {
        slots.masked() >= self.compact_at && slots.masked() > slots.len()
    }
}

impl StatefulBackend {
    /// Compiles a stage and runs one row of it, which proves that the graph fits the
    /// specification and spares the first session the device's warm-up.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(
        runtime: &Runtime,
        files: &StageFiles,
        spec: StageSpec,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let model = compile(runtime, files, options)?;
        let load_time = started.elapsed();
        let graph = Graph::new(&model, &files.xml, &spec)?;
        let report = |key| model.property(key).unwrap_or_default();
        let kv_precision = report("KV_CACHE_PRECISION");
        let info = StatefulInfo {
            openvino: runtime.build().to_owned(),
            kv_bytes_per_token: kv_bytes_per_token(&spec, &kv_precision),
            kv_precision,
            inference_precision: report("INFERENCE_PRECISION_HINT"),
            load_time,
        };
        let limits = Limits {
            max_sessions: options.max_sessions,
            context: options.context_limit(spec.context_length),
            max_masked: options.max_masked,
            compact_at: options.compact_at,
        };
        let mut backend =
            Self { sessions: HashMap::new(), graph, spec, limits, info, closed_bytes: 0, model };
        backend.probe(&files.xml)?;
        Ok(backend)
    }

    /// What became of the options.
    #[must_use]
    pub fn info(&self) -> &StatefulInfo {
        &self.info
    }

    /// Runs token 0 in a request of its own.
    fn probe(&mut self, xml: &Path) -> Result<(), LoadError> {
        let hidden = vec![0.0; self.spec.hidden_dim];
        let hidden = (!self.spec.is_first()).then_some(&hidden[..]);
        let mut slots = Slots::default();
        slots.append(1);
        let rows = Rows { start_pos: 0, tokens: &[0], hidden, wanted: &[0] };
        let device = |source| LoadError::Probe { xml: xml.to_owned(), source };
        let mut request = self.model.request().map_err(device)?;
        self.graph.infer(&mut request, &slots, &rows).map_err(device)?;
        let (expected, found) =
            (self.graph.row_width(), self.graph.output().map_err(device)?.len());
        if found != expected {
            return Err(LoadError::OutputWidth { xml: xml.to_owned(), expected, found });
        }
        Ok(())
    }

    /// Runs one step; its output is then in the graph's output tensor.
    fn step(&mut self, step: &StepRows<'_>) -> Result<Duration, StepError> {
        let key = step.session;
        let session =
            self.sessions.get_mut(&key).ok_or(StepError::UnknownSession { session: key })?;
        let kv_len = session.slots.len();
        let n_rows = check_step(step, &self.spec, kv_len, self.limits.context)?;
        let restart = step.start_pos == 0 && session.slots.physical() > 0;
        let mut slots = if restart { Slots::default() } else { session.slots.clone() };
        slots.truncate(step.start_pos);
        slots.append(n_rows);
        let (masked, limit) = (slots.masked(), self.limits.max_masked);
        if masked > limit {
            return Err(StepError::Bloated { session: key, masked, limit });
        }
        self.infer(step, &slots, restart).map_err(|error| {
            // What the request has stored by now is not known.
            self.sessions.remove(&key);
            StepError::Runtime(Box::new(error))
        })
    }

    /// The output of the step that ran last.
    fn output(&self) -> Result<StageOutput<'_>, StepError> {
        let rows = self.graph.output().map_err(|error| StepError::Runtime(Box::new(error)))?;
        Ok(match self.spec.is_last() {
            true => StageOutput::Logits(rows),
            false => StageOutput::Hidden(rows),
        })
    }

    fn infer(
        &mut self,
        step: &StepRows<'_>,
        slots: &Slots,
        restart: bool,
    ) -> Result<Duration, error::InferError> {
        let Some(session) = self.sessions.get_mut(&step.session) else {
            return Err(error::InferError::Closed);
        };
        if restart {
            session.request = self.model.request()?;
        }
        let (start_pos, tokens) = (step.start_pos, step.tokens);
        let rows = Rows { start_pos, tokens, hidden: step.hidden, wanted: step.wanted };
        let infer_time = self.graph.infer(&mut session.request, slots, &rows)?;
        let n_out = if self.spec.is_last() { step.wanted.len() } else { tokens.len() };
        let (expected, found) = (n_out * self.graph.row_width(), self.graph.output()?.len());
        if found != expected {
            return Err(error::InferError::Output { expected, found });
        }
        slots.clone_into(&mut session.slots);
        session.tokens.truncate(start_pos);
        session.tokens.extend_from_slice(tokens);
        Ok(infer_time)
    }
}

impl Backend for StatefulBackend {
    fn open(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        _room: usize,
    ) -> Result<usize, OpenError> {
        if let Some(open) = self.sessions.get(&session) {
            let is_bloated = self.limits.is_bloated(&open.slots);
            return Ok(if is_bloated { 0 } else { common_len(&open.tokens, prompt) });
        }
        let (n_sessions, max_sessions) = (self.sessions.len(), self.limits.max_sessions);
        if n_sessions >= max_sessions {
            return Err(OpenError::Full { n_sessions, max_sessions });
        }
        let request = self.model.request().map_err(|error| OpenError::Runtime(Box::new(error)))?;
        self.sessions
            .insert(session, Session { request, slots: Slots::default(), tokens: Vec::new() });
        Ok(0)
    }

    fn close(&mut self, session: SessionKey) {
        let Some(closed) = self.sessions.remove(&session) else { return };
        self.closed_bytes += closed.slots.physical() as u64 * self.info.kv_bytes_per_token;
        drop(closed);
        let enough = if self.sessions.is_empty() { IDLE_TRIM_BYTES } else { TRIM_BYTES };
        if self.closed_bytes >= enough {
            self.closed_bytes = 0;
            openvino::trim();
        }
    }

    fn run(&mut self, steps: &[StepRows<'_>], done: &mut dyn FnMut(StepDone<'_>)) {
        for (index, step) in steps.iter().enumerate() {
            let result = check_alone(steps, index).and_then(|()| self.step(step));
            let infer_time = result.as_ref().copied().unwrap_or_default();
            let output = result.and_then(|_| self.output());
            let masked = self.sessions.get(&step.session).map_or(0, |held| held.slots.masked());
            done(StepDone { index, output, infer_time, n_rows: step.tokens.len(), masked });
        }
    }

    fn kv_use(&self) -> KvUse {
        let mut kv_use = KvUse { n_sessions: self.sessions.len(), ..KvUse::default() };
        for session in self.sessions.values() {
            kv_use.tokens += session.slots.physical() as u64;
            kv_use.masked_tokens += session.slots.masked() as u64;
            kv_use.n_to_compact += usize::from(self.limits.is_bloated(&session.slots));
        }
        kv_use.bytes = kv_use.tokens * self.info.kv_bytes_per_token;
        kv_use
    }
}

fn kv_bytes_per_token(spec: &StageSpec, precision: &str) -> u64 {
    let (per_number, per_head) = properties::kv_bytes(precision).unwrap_or((4.0, 0.0));
    let n_heads = spec.layers.len() * 2 * spec.n_kv_heads;
    let bytes = n_heads as f64 * (spec.head_dim as f64 * per_number + per_head);
    bytes as u64
}

impl From<InferenceError> for error::InferError {
    fn from(error: InferenceError) -> Self {
        Self::OpenVino(error)
    }
}
