//! OpenVINO with graphs of fixed shapes, the form that NPUs take.
//!
//! A call takes a fixed number of rows, the caches of a bank of slots, and a mask that says which
//! columns each row sees; it gives the keys and values of its rows back. Sessions of a bank share
//! calls, longer steps become several, and rows that nobody needs fill the rest. The caches are
//! tensors of this process: rewinding is forgetting rows, and the first rows of a session can be
//! those of another one, copied.
//!
//! **Limits**: a session holds as many positions as a slot's window. Which rows of a call are a
//! session's, and in which slot, moves the last bits of its numbers: where the device rounds
//! activations, tokens can differ in near ties.

mod banks;
mod calls;
mod graph;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stagebus_shards::StaticForm;
use stagebus_shards::shard_set::StageFiles;

use crate::backend::{
    Backend, KvUse, OpenError, RowPath, SessionKey, StageOutput, StepDone, StepError, StepRows,
    common_len,
};
use crate::load::{LoadError, compile};
use crate::openvino::{self, CompiledModel, InferenceError, Runtime};
use crate::options::EngineOptions;
use crate::stage::StageSpec;
use crate::validate::{check_alone, check_step};

use banks::{Banks, Copied};
use calls::{Piece, Waiting, calls};
use graph::{Caches, Graph};

/// One stage on OpenVINO, of fixed shapes.
#[derive(Debug)]
pub struct StaticBackend {
    banks: Banks<Caches>,
    graph: Graph,
    spec: StageSpec,
    form: StaticForm,
    max_sessions: usize,
    context: usize,
    info: StaticInfo,
    /// Last, so that the request goes before it.
    _model: CompiledModel,
}

/// What became of the options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticInfo {
    /// OpenVINO's version as it spells it.
    pub openvino: String,
    /// Precision of the inference that the device reports, for example `f32`; empty if it does not.
    pub inference_precision: String,
    /// Memory of the caches of one bank, in bytes. There are as many banks as the open sessions
    /// need, and at least one.
    pub bank_bytes: u64,
    /// Time to read and compile, or to import from the cache folder.
    pub load_time: Duration,
}

/// What a step has given so far.
#[derive(Debug, Default)]
struct Gathered {
    /// Rows that leave; empty where one call gives them all.
    rows: Vec<f32>,
    infer_time: Duration,
    n_rows: usize,
}

impl StaticBackend {
    /// Compiles a stage and runs one row of it, which proves that the graph fits the
    /// specification and spares the first session the device's warm-up.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(
        runtime: &Runtime,
        files: &StageFiles,
        spec: StageSpec,
        form: StaticForm,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let model = compile(runtime, files, options)?;
        let load_time = started.elapsed();
        let xml = &files.xml;
        let mut graph = Graph::new(&model, xml, &spec, form)?;
        let caches = probe(&mut graph, &spec, xml)?;
        let info = StaticInfo {
            openvino: runtime.build().to_owned(),
            inference_precision: model.property("INFERENCE_PRECISION_HINT").unwrap_or_default(),
            bank_bytes: graph.cache_bytes(),
            load_time,
        };
        Ok(Self {
            banks: Banks::new(form.slots, caches),
            graph,
            form,
            max_sessions: options.max_sessions,
            context: options.context_limit(spec.context_length).min(form.window),
            spec,
            info,
            _model: model,
        })
    }

    /// What became of the options.
    #[must_use]
    pub fn info(&self) -> &StaticInfo {
        &self.info
    }

    /// Copies the rows that a new session begins with.
    fn copy(&mut self, copied: Copied) -> Result<(), InferenceError> {
        let Copied { from, to, n_rows } = copied;
        let mut part = Vec::new();
        for index in 0..2 * self.spec.layers.len() {
            part.clear();
            let caches = self.banks.caches(from.bank);
            self.graph.read(&caches[index], (from.slot, n_rows), &mut part)?;
            let caches = self.banks.caches(to.bank);
            self.graph.write(&mut caches[index], (to.slot, n_rows), &part)?;
        }
        Ok(())
    }

    /// Checks a step and takes back what it replaces; returns its bank and what waits there.
    fn prepare(
        &mut self,
        steps: &[StepRows<'_>],
        step: usize,
    ) -> Result<(usize, Waiting), StepError> {
        check_alone(steps, step)?;
        let StepRows { session, start_pos, .. } = steps[step];
        let (Some(place), Some(held)) = (self.banks.place(session), self.banks.tokens(session))
        else {
            return Err(StepError::UnknownSession { session });
        };
        let n_rows = check_step(&steps[step], &self.spec, held.len(), self.context)?;
        self.banks.truncate(session, start_pos);
        Ok((place.bank, Waiting { step, slot: place.slot, start_pos, n_rows }))
    }

    /// Runs the steps of one bank.
    fn run_bank(
        &mut self,
        (bank, waiting): (usize, &[Waiting]),
        steps: &[StepRows<'_>],
        done: &mut dyn FnMut(StepDone<'_>),
    ) {
        let mut gathered: HashMap<usize, Gathered> = HashMap::new();
        for mut pieces in calls(waiting, self.form.rows) {
            // A call that failed has closed its sessions.
            pieces.retain(|piece| self.banks.place(steps[piece.step].session).is_some());
            if pieces.is_empty() {
                continue;
            }
            match self.call(bank, &pieces, steps) {
                Ok(infer_time) => {
                    let n_rows = pieces.iter().map(|piece| piece.n_rows).sum::<usize>();
                    for piece in &pieces {
                        let so_far = gathered.entry(piece.step).or_default();
                        so_far.infer_time += infer_time;
                        so_far.n_rows += n_rows;
                        let step = &steps[piece.step];
                        if let Err(error) = self.report(piece, step, so_far, done) {
                            self.banks.discard(step.session);
                            let error = StepError::Runtime(Box::new(error));
                            done(StepDone::failed(piece.step, error));
                        }
                    }
                }
                Err(error) => {
                    let error = Arc::new(error);
                    for piece in &pieces {
                        self.banks.discard(steps[piece.step].session);
                        let error = StepError::Runtime(Box::new(Arc::clone(&error)));
                        done(StepDone::failed(piece.step, error));
                    }
                }
            }
        }
    }

    fn call(
        &mut self,
        bank: usize,
        pieces: &[Piece],
        steps: &[StepRows<'_>],
    ) -> Result<Duration, InferenceError> {
        let infer_time = self.graph.infer(self.banks.caches(bank), pieces, steps)?;
        for piece in pieces {
            let step = &steps[piece.step];
            let tokens = &step.tokens[piece.first..][..piece.n_rows];
            self.banks.append(step.session, tokens);
        }
        Ok(infer_time)
    }

    /// Takes what a call gave for a step, and reports the step if that was the last of it.
    fn report(
        &self,
        piece: &Piece,
        step: &StepRows<'_>,
        so_far: &mut Gathered,
        done: &mut dyn FnMut(StepDone<'_>),
    ) -> Result<(), InferenceError> {
        let (all, width) = (self.graph.output()?, self.graph.row_width());
        let is_last = self.spec.is_last();
        let runs = leaving(piece, is_last.then_some(step.wanted));
        let rows = |run: &Range<usize>| &all[run.start * width..run.end * width];
        let is_end = piece.first + piece.n_rows == step.tokens.len();
        let given = if piece.first == 0 && is_end && runs.len() <= 1 {
            runs.first().map(rows).unwrap_or_default()
        } else {
            runs.iter().for_each(|run| so_far.rows.extend_from_slice(rows(run)));
            &so_far.rows
        };
        if is_end {
            let output =
                Ok(if is_last { StageOutput::Logits(given) } else { StageOutput::Hidden(given) });
            let (infer_time, n_rows) = (so_far.infer_time, so_far.n_rows);
            done(StepDone { index: piece.step, output, infer_time, n_rows, masked: 0 });
        }
        Ok(())
    }
}

/// Rows of a call that leave for a piece, in runs: all of them, or the wanted ones.
fn leaving(piece: &Piece, wanted: Option<&[u32]>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let Some(wanted) = wanted else {
        runs.push(piece.row..piece.row + piece.n_rows);
        return runs;
    };
    let within = |row: &u32| (*row as usize).checked_sub(piece.first);
    for at in wanted.iter().filter_map(within).filter(|at| *at < piece.n_rows) {
        let row = piece.row + at;
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}

/// Runs token 0 alone and gives the caches back that it ran with.
fn probe(graph: &mut Graph, spec: &StageSpec, xml: &Path) -> Result<Caches, LoadError> {
    let device = |source| LoadError::Probe { xml: xml.to_owned(), source };
    let hidden = vec![0.0; spec.hidden_dim];
    let step = StepRows {
        session: SessionKey(0),
        start_pos: 0,
        path: RowPath::Decode,
        tokens: &[0],
        hidden: (!spec.is_first()).then_some(&hidden[..]),
        wanted: &[0],
    };
    let waiting = Waiting { step: 0, slot: 0, start_pos: 0, n_rows: 1 };
    let mut caches = graph.caches().map_err(device)?;
    for pieces in calls(&[waiting], 1) {
        graph.infer(&mut caches, &pieces, &[step]).map_err(device)?;
    }
    Ok(caches)
}

impl Backend for StaticBackend {
    fn open(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        _room: usize,
    ) -> Result<usize, OpenError> {
        if let Some(held) = self.banks.tokens(session) {
            return Ok(common_len(held, prompt));
        }
        let (n_sessions, max_sessions) = (self.banks.n_sessions(), self.max_sessions);
        if n_sessions >= max_sessions {
            return Err(OpenError::Full { n_sessions, max_sessions });
        }
        let failed = |error: InferenceError| OpenError::Runtime(Box::new(error));
        let make = || self.graph.caches();
        let (n_cached, copied) = self.banks.open(session, prompt, make).map_err(failed)?;
        if let Some(copied) = copied
            && let Err(error) = self.copy(copied)
        {
            self.banks.discard(session);
            return Err(failed(error));
        }
        Ok(n_cached)
    }

    fn close(&mut self, session: SessionKey) {
        let n_banks = self.banks.n_banks();
        self.banks.close(session);
        if self.banks.n_banks() < n_banks {
            openvino::trim();
        }
    }

    fn run(&mut self, steps: &[StepRows<'_>], done: &mut dyn FnMut(StepDone<'_>)) {
        let mut by_bank: BTreeMap<usize, Vec<Waiting>> = BTreeMap::new();
        for index in 0..steps.len() {
            match self.prepare(steps, index) {
                Ok((bank, waiting)) => by_bank.entry(bank).or_default().push(waiting),
                Err(error) => done(StepDone::failed(index, error)),
            }
        }
        for (bank, waiting) in by_bank {
            self.run_bank((bank, &waiting), steps, done);
        }
    }

    fn useful_batch(&self) -> usize {
        self.form.slots.min(self.form.rows)
    }

    fn kv_use(&self) -> KvUse {
        KvUse {
            n_sessions: self.banks.n_sessions(),
            tokens: self.banks.n_rows() as u64,
            // What a bank without sessions remembers gives way to the next one.
            bytes: self.banks.n_used() as u64 * self.info.bank_bytes,
            ..KvUse::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_a_call_is_in_runs() {
        let piece = Piece { step: 0, slot: 0, first: 4, position: 9, row: 2, n_rows: 3 };
        let runs = |wanted: Option<&[u32]>| -> Vec<(usize, usize)> {
            leaving(&piece, wanted).into_iter().map(|run| (run.start, run.end)).collect()
        };
        assert_eq!(runs(None), [(2, 5)]);
        assert!(runs(Some(&[])).is_empty());
        assert!(runs(Some(&[1, 3, 7])).is_empty());
        assert_eq!(runs(Some(&[3, 4, 5, 6, 7])), [(2, 5)]);
        assert_eq!(runs(Some(&[4, 6])), [(2, 3), (4, 5)]);
    }
}
