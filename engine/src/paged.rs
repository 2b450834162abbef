//! The paged backend: one compiled graph, one request, KV caches in blocks that sessions share.
//!
//! The stage graph is rewritten at load by OpenVINO's SDPAToPagedAttention pass. A micro-batch is
//! ragged: prompt rows of a step form one multi-token sequence; generated and drafted rows are one
//! sequence each, over the same blocks, so that a verify takes the path of plain decode and gives
//! its numbers bit for bit. Rewinding is a shorter length; an equal prefix is an equal block.
//!
//! **Source**: facts about both paths and the cache types in `docs/numerics.md`.

mod blocks;
pub(crate) mod native;
mod runs;
mod table;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use stagebus_shards::shard_set::StageFiles;

pub use native::NativeError;

use crate::backend::{
    Backend, KvUse, OpenError, RowPath, SessionKey, StageOutput, StepDone, StepError, StepRows,
};
use crate::memory::Memory;
use crate::openvino::Runtime;
use crate::options::EngineOptions;
use crate::properties;
use crate::stage::StageSpec;
use crate::validate::{check_alone, check_step};
use blocks::BlockPool;
use native::{CacheLayout, Library, NativeModel};
use runs::{PathBounds, RowBounds, RunShape, Runs};
use table::{BlockTable, HashSalt};

/// Why a paged backend cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PagedError {
    /// The library or OpenVINO refused.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The device quantises keys over several tokens: a rewind would change the numbers.
    #[error("the KV cache of type {dtype} is not stored token by token")]
    NotByToken {
        /// Element type of the keys.
        dtype: String,
    },
    /// The layers of a stage have different blocks.
    #[error("blocks of layer {layer} hold {found} tokens, those of layer 0 {expected}")]
    UnequalBlocks {
        /// The layer.
        layer: usize,
        /// Tokens of a block of layer 0.
        expected: usize,
        /// Tokens found.
        found: usize,
    },
    /// The memory given does not hold enough blocks to serve with.
    #[error("{kv_bytes} bytes of KV memory hold {n_blocks} blocks, at least {needed} are needed")]
    TooLittleMemory {
        /// Memory given.
        kv_bytes: u64,
        /// Blocks that fit.
        n_blocks: u64,
        /// Least blocks.
        needed: u64,
    },
    /// The graph gives rows of another width.
    #[error("the graph gives rows of {found} numbers, the manifest says {expected}")]
    OutputWidth {
        /// Width from the manifest.
        expected: usize,
        /// Width found.
        found: usize,
    },
}

/// Runs one stage with paged attention.
pub struct PagedBackend {
    spec: StageSpec,
    model: NativeModel,
    layout: BlockLayout,
    pool: BlockPool,
    salt: HashSalt,
    sessions: HashMap<SessionKey, BlockTable>,
    max_sessions: usize,
    context: usize,
    invariant_prefill: bool,
    info: PagedInfo,
    /// The micro-batch under way.
    runs: Runs,
    /// What is read of the output of several runs, one behind the other.
    gathered: Vec<f32>,
}

/// What became of the options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagedInfo {
    /// Element type of the KV blocks, for example `u8`.
    pub kv_precision: String,
    /// KV cache per token over the stage's layers, in bytes.
    pub kv_bytes_per_token: u64,
    /// Blocks of the pool.
    pub n_blocks: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Time to read, rewrite and compile.
    pub load_time: Duration,
    /// Least and most rows of a run with generated rows, so that the bits of a row do not depend
    /// on the others; `None` where they never do.
    pub decode_rows: Option<(usize, usize)>,
    /// Whether they are independent at all.
    pub rows_agree: bool,
}

impl std::fmt::Debug for PagedBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagedBackend")
            .field("spec", &self.spec)
            .field("layout", &self.layout)
            .field("n_sessions", &self.sessions.len())
            .finish_non_exhaustive()
    }
}

/// A block over all layers of the stage.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BlockLayout {
    bytes: usize,
    tokens: usize,
    dtype: String,
}

impl BlockLayout {
    fn of(layers: &[CacheLayout]) -> Result<Self, PagedError> {
        let tokens = layers.first().map_or(0, |layer| layer.block_tokens);
        for (idx, layer) in layers.iter().enumerate() {
            if layer.block_tokens != tokens {
                let found = layer.block_tokens;
                return Err(PagedError::UnequalBlocks { layer: idx, expected: tokens, found });
            }
            if !layer.by_token {
                return Err(PagedError::NotByToken { dtype: layer.dtype.clone() });
            }
        }
        let dtype = layers.first().map_or_else(String::new, |layer| layer.dtype.clone());
        Ok(Self { bytes: layers.iter().map(|layer| layer.block_bytes).sum(), tokens, dtype })
    }
}

/// Place of a step's rows in the output of the micro-batch.
#[derive(Debug, Clone, Copy)]
struct Placed {
    index: usize,
    first: usize,
    n_out: usize,
}

impl PagedBackend {
    /// Reads, rewrites and compiles a stage, and makes its pool of KV blocks.
    ///
    /// `fingerprint` is the shard set's: blocks of other weights are never shared. The runtime is
    /// an argument because it must be loaded first.
    ///
    /// # Errors
    /// [`PagedError`]: the stateful backend may still run the stage.
    pub fn load(
        _runtime: &Runtime,
        files: &StageFiles,
        spec: StageSpec,
        fingerprint: &str,
        options: &EngineOptions,
    ) -> Result<Self, PagedError> {
        let started = Instant::now();
        let library = Library::open()?;
        let list = properties::properties(options, None);
        let mut model = NativeModel::load(library, &files.xml, &options.device, &list)?;
        let layout = BlockLayout::of(&model.layouts()?)?;
        let context = options.context_limit(spec.context_length);
        let n_blocks = count_blocks(&layout, context, options)?;
        model.allocate(n_blocks as usize + 1)?;
        let shape = RunShape {
            block_tokens: layout.tokens,
            n_threads: model.n_threads()?,
            spare_block: n_blocks,
            width: if spec.is_first() { 0 } else { spec.hidden_dim },
        };
        let info = PagedInfo {
            kv_precision: layout.dtype.clone(),
            kv_bytes_per_token: (layout.bytes / layout.tokens) as u64,
            n_blocks: n_blocks as usize,
            block_tokens: layout.tokens,
            load_time: Duration::ZERO,
            decode_rows: None,
            rows_agree: true,
        };
        let mut backend = Self {
            pool: BlockPool::new(n_blocks),
            salt: HashSalt::new(&[fingerprint, &layout.dtype]),
            sessions: HashMap::new(),
            max_sessions: options.max_sessions,
            context,
            invariant_prefill: options.invariant_prefill,
            runs: Runs::new(shape),
            gathered: Vec::new(),
            spec,
            model,
            layout,
            info,
        };
        backend.probe(options.same_rows)?;
        backend.info.load_time = started.elapsed();
        Ok(backend)
    }

    /// What became of the options.
    #[must_use]
    pub fn info(&self) -> &PagedInfo {
        &self.info
    }

    /// Runs rows, which proves that the graph fits the specification and spares the first session
    /// the device's warm-up, and bounds the runs if the numbers of a row depend on how many rows
    /// run with it. Of two paths of the layers or of the head, a row alone always has its own.
    fn probe(&mut self, same_rows: bool) -> Result<(), PagedError> {
        let alone = self.run_probe(1)?;
        let (expected, found) = (self.row_width(), self.model.output().len());
        if found != expected {
            return Err(PagedError::OutputWidth { expected, found });
        }
        if !same_rows || bits(&self.run_probe(RowBounds::MANY.least)?[..expected]) == bits(&alone) {
            return Ok(());
        }
        let few = RowBounds::few(self.runs.n_threads());
        let many_agree = self.rows_agree_within(RowBounds::MANY)?;
        let few_agree = self.rows_agree_within(few)?;
        self.info.rows_agree = many_agree;
        self.runs.bounds =
            PathBounds::both(if many_agree { RowBounds::MANY } else { RowBounds::ANY });
        if many_agree && few_agree {
            self.runs.bounds.decode = few;
        }
        if many_agree {
            let RowBounds { least, most } = self.runs.bounds.decode;
            self.info.decode_rows = Some((least, most));
        }
        Ok(())
    }

    /// Whether rows have the same bits in runs of any number of rows within bounds.
    fn rows_agree_within(&mut self, bounds: RowBounds) -> Result<bool, NativeError> {
        self.runs.bounds = PathBounds::both(bounds);
        let among = bits(&self.run_probe(bounds.most)?);
        for n_rows in [1, bounds.least, bounds.most / 2] {
            let found = bits(&self.run_probe(n_rows)?);
            if found.iter().zip(&among).any(|(a, b)| a != b) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs rows of no meaning as one-token sequences in the first blocks, which no session has
    /// yet, and returns what comes out.
    fn run_probe(&mut self, n_rows: usize) -> Result<Vec<f32>, NativeError> {
        let (first, width) = (self.spec.is_first(), self.spec.hidden_dim);
        let scattered = |idx: usize| idx.wrapping_mul(7919) % 1021;
        let tokens: Vec<u32> =
            (0..n_rows).map(|row| (scattered(row) % self.spec.vocab_size) as u32).collect();
        let hidden: Vec<f32> =
            (0..n_rows * width).map(|idx| scattered(idx) as f32 / 512.0 - 1.0).collect();
        let wanted: Vec<u32> = (0..n_rows as u32).collect();
        let blocks: Vec<u32> = (0..n_rows.div_ceil(self.layout.tokens) as u32).collect();
        let step = StepRows {
            session: SessionKey(0),
            start_pos: 0,
            path: RowPath::Decode,
            tokens: &tokens,
            hidden: (!first).then_some(&hidden[..]),
            wanted: if self.spec.is_last() { &wanted } else { &[] },
        };
        self.runs.clear();
        self.runs.push(&step, true, &blocks);
        // A row without rows before it has no context that threads could share out.
        if n_rows > 1 || self.runs.bounds != PathBounds::both(RowBounds::ANY) {
            self.runs.fill_up(self.spec.is_last());
        }
        self.infer()?;
        Ok(self.output()[..n_rows * self.row_width()].to_vec())
    }

    fn row_width(&self) -> usize {
        if self.spec.is_last() { self.spec.n_head_rows } else { self.spec.hidden_dim }
    }

    /// Checks one step, moves its session's table and puts its rows into the batch.
    fn place(&mut self, steps: &[StepRows<'_>], index: usize) -> Result<Placed, StepError> {
        let step = &steps[index];
        check_alone(steps, index)?;
        let session = step.session;
        let table = self.sessions.get_mut(&session).ok_or(StepError::UnknownSession { session })?;
        let n_rows = check_step(step, &self.spec, table.len(), self.context)?;
        table.truncate(step.start_pos, self.layout.tokens, &mut self.pool);
        let needed = table.blocks_needed(n_rows, self.layout.tokens, &self.pool);
        let available = self.pool.n_available();
        if needed > available {
            return Err(StepError::OutOfBlocks { session, needed, available });
        }
        let copy = table
            .append(step.tokens, step.path, self.layout.tokens, &mut self.pool)
            .ok_or(StepError::OutOfBlocks { session, needed, available: 0 })?;
        if let Some(copy) = copy {
            self.model
                .copy_block(copy.from as usize, copy.to as usize)
                .map_err(|error| StepError::Runtime(Box::new(error)))?;
        }
        let one_token = step.path == RowPath::Decode || self.invariant_prefill;
        let is_last = self.spec.is_last();
        let first = self.runs.n_out(is_last);
        // Only the head looks at the wanted rows.
        let wanted = if is_last { step.wanted } else { &[] };
        self.runs.push(&StepRows { wanted, ..*step }, one_token, &table.blocks);
        Ok(Placed { index, first, n_out: if is_last { wanted.len() } else { n_rows } })
    }

    /// Makes the runs, which are filled up, and returns the time. [`Self::output`] has what came out.
    fn infer(&mut self) -> Result<Duration, NativeError> {
        let (is_last, width) = (self.spec.is_last(), self.row_width());
        self.gathered.clear();
        let started = Instant::now();
        for run in self.runs.used() {
            self.model.run(&run.batch, self.spec.hidden_dim)?;
            if self.runs.used().len() > 1 {
                let output = self.model.output();
                self.gathered.extend_from_slice(&output[..run.n_out(is_last) * width]);
            }
        }
        Ok(started.elapsed())
    }

    /// Rows that came out, those of all runs; behind the rows of a single run may be others.
    fn output(&self) -> &[f32] {
        if self.runs.used().len() > 1 { &self.gathered } else { self.model.output() }
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Sessions of a micro-batch: throughput still grows up to here on the CPU, and a row more costs
/// less than a tenth of a step.
const USEFUL_BATCH: usize = 32;

/// Least blocks that are worth serving with: 512 tokens of the usual 32-token blocks.
const MIN_BLOCKS: u64 = 16;

/// Share of the free memory that KV blocks take when nothing is configured: several stages and the
/// weights of each may have to share one machine.
const MEMORY_SHARE: u64 = 4;

/// Blocks that memory, sessions and context allow.
fn count_blocks(
    layout: &BlockLayout,
    context: usize,
    options: &EngineOptions,
) -> Result<u32, PagedError> {
    let kv_bytes =
        options.kv_bytes.unwrap_or_else(|| Memory::look().available_bytes / MEMORY_SHARE);
    let fits = kv_bytes / layout.bytes as u64;
    let usable =
        (context.div_ceil(layout.tokens) as u64).saturating_mul(options.max_sessions as u64);
    // Block numbers are i32 in the graph.
    let n_blocks = fits.min(usable).min(i32::MAX as u64);
    let needed = MIN_BLOCKS.min(usable);
    if n_blocks < needed {
        return Err(PagedError::TooLittleMemory { kv_bytes, n_blocks, needed });
    }
    Ok(n_blocks as u32)
}

impl Backend for PagedBackend {
    fn open(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        room: usize,
    ) -> Result<usize, OpenError> {
        if let Some(table) = self.sessions.get(&session) {
            return Ok(table.common_len(prompt));
        }
        let n_sessions = self.sessions.len();
        if n_sessions >= self.max_sessions {
            return Err(OpenError::Full { n_sessions, max_sessions: self.max_sessions });
        }
        let block_tokens = self.layout.tokens;
        let mut table = BlockTable::with_prefix(prompt, block_tokens, &self.salt, &mut self.pool);
        table.promise(prompt.len().max(room).div_ceil(block_tokens));
        let promised: usize = self.sessions.values().map(BlockTable::n_promised).sum();
        let needed = table.n_promised();
        let available = self.pool.n_available().saturating_sub(promised);
        if needed > available {
            table.release(&mut self.pool);
            let total = self.info.n_blocks;
            return Err(OpenError::OutOfBlocks { needed, available, total });
        }
        let cached_len = table.len();
        self.sessions.insert(session, table);
        Ok(cached_len)
    }

    fn close(&mut self, session: SessionKey) {
        if let Some(table) = self.sessions.remove(&session) {
            table.release(&mut self.pool);
        }
    }

    fn run(&mut self, steps: &[StepRows<'_>], done: &mut dyn FnMut(StepDone<'_>)) {
        self.runs.clear();
        let mut placed = Vec::with_capacity(steps.len());
        let mut order: Vec<usize> = (0..steps.len()).collect();
        if self.runs.bounds.are_apart() {
            order.sort_by_key(|index| steps[*index].path == RowPath::Prefill);
        }
        for index in order {
            match self.place(steps, index) {
                Ok(place) => placed.push(place),
                Err(error) => {
                    done(StepDone::failed(index, error));
                }
            }
        }
        if placed.is_empty() {
            return;
        }
        let n_rows = self.runs.n_rows();
        self.runs.fill_up(self.spec.is_last());
        let infer_time = match self.infer() {
            Ok(time) => time,
            Err(error) => {
                let message = error.to_string();
                for Placed { index, .. } in placed {
                    self.close(steps[index].session);
                    let source = Box::<dyn std::error::Error + Send + Sync>::from(message.clone());
                    done(StepDone::failed(index, StepError::Runtime(source)));
                }
                return;
            }
        };
        for Placed { index, .. } in &placed {
            if let Some(table) = self.sessions.get_mut(&steps[*index].session) {
                let (every_row, tokens) = (self.invariant_prefill, self.layout.tokens);
                table.name_full_blocks(every_row, tokens, &self.salt, &mut self.pool);
            }
        }
        let (width, is_last) = (self.row_width(), self.spec.is_last());
        let output = self.output();
        for Placed { index, first, n_out } in placed {
            let rows = &output[first * width..(first + n_out) * width];
            let output =
                if is_last { StageOutput::Logits(rows) } else { StageOutput::Hidden(rows) };
            done(StepDone { index, output: Ok(output), infer_time, n_rows, masked: 0 });
        }
    }

    fn useful_batch(&self) -> usize {
        USEFUL_BATCH.min(self.runs.bounds.decode.most)
    }

    fn kv_use(&self) -> KvUse {
        let n_held = self.pool.n_held() as u64;
        KvUse {
            n_sessions: self.sessions.len(),
            tokens: self.sessions.values().map(|table| table.len() as u64).sum(),
            masked_tokens: 0,
            bytes: n_held * self.layout.bytes as u64,
            max_bytes: self.info.n_blocks as u64 * self.layout.bytes as u64,
            n_to_compact: 0,
        }
    }
}
