//! A micro-batch as runs of the graph, each with a number of rows for which a row's numbers do
//! not depend on the others.
//!
//! Two things in the CPU plugin look at the whole batch. Attention shares out the context of a row
//! among threads where a batch has one-token sequences only, and fewer of them than threads. And
//! on a processor without AVX-512 or AVX-VNNI, compressed weights are multiplied by kernels that
//! sum in another order for 1 row, for 2 to 6, for 7 to 80, and for more. The last bits then
//! differ from those that the same row has in another batch. So a batch gets rows that nobody
//! reads, and is cut where it has too many. Rows of the two paths then run apart: few generated
//! rows should not cost as much as many, and prompts have many.

use super::native::Batch;
use crate::backend::{RowPath, SessionKey, StepRows};

/// Numbers of rows of a run, for its layers and for its head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowBounds {
    /// Least rows; a run with fewer is filled up.
    pub(super) least: usize,
    /// Most rows; a longer micro-batch becomes several runs. At least 3, so that a cut leaves two
    /// rows on either side.
    pub(super) most: usize,
}

impl RowBounds {
    /// Every number of rows takes one path.
    pub(super) const ANY: Self = Self { least: 1, most: usize::MAX };

    /// Many rows on one path on processors with AVX2 and nothing newer. Measured with OpenVINO
    /// 2026.4, weights of 4 and 8 bits, 576 to 5,632 inputs: 7 to 80 rows. The bounds keep off the
    /// edges.
    pub(super) const MANY: Self = Self { least: 8, most: 64 };

    /// Few rows on one path there: 2 to 6, with those for idle threads ([`Runs::fill_up`]).
    pub(super) fn few(n_threads: usize) -> Self {
        Self { least: 2, most: if n_threads > 6 { 4 } else { 6 } }
    }
}

/// Bounds for both paths of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PathBounds {
    /// For generated and drafted rows.
    pub(super) decode: RowBounds,
    /// For prompt rows.
    pub(super) prefill: RowBounds,
}

impl PathBounds {
    /// The same for both.
    pub(super) fn both(bounds: RowBounds) -> Self {
        Self { decode: bounds, prefill: bounds }
    }

    /// Whether rows of the two paths run apart.
    pub(super) fn are_apart(self) -> bool {
        self.decode != self.prefill
    }

    fn of(self, one_token: bool) -> RowBounds {
        if one_token { self.decode } else { self.prefill }
    }
}

/// One run of the graph.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) batch: Batch,
    bounds: RowBounds,
    /// Rows that are read; those that fill the run up are behind them.
    n_rows: usize,
    n_logit_rows: usize,
}

impl Run {
    /// Rows of output that are read.
    pub(super) fn n_out(&self, is_last: bool) -> usize {
        if is_last { self.n_logit_rows } else { self.n_rows }
    }
}

/// The runs of a micro-batch. Their memory is kept from one micro-batch to the next.
#[derive(Debug)]
pub(super) struct Runs {
    runs: Vec<Run>,
    n_used: usize,
    pub(super) bounds: PathBounds,
    block_tokens: usize,
    n_threads: usize,
    /// A block that no session gets, for the rows that nobody reads.
    spare_block: u32,
    /// Numbers of a row of hidden states; 0 on the first stage.
    width: usize,
    /// Hidden states for the rows that nobody reads.
    zeros: Vec<f32>,
}

/// What the runs of a stage must know about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunShape {
    /// Tokens of a KV block.
    pub(super) block_tokens: usize,
    /// Threads of the inference.
    pub(super) n_threads: usize,
    /// A block that no session gets.
    pub(super) spare_block: u32,
    /// Numbers of a row of hidden states that comes in; 0 on the first stage.
    pub(super) width: usize,
}

impl Runs {
    pub(super) fn new(shape: RunShape) -> Self {
        let RunShape { block_tokens, n_threads, spare_block, width } = shape;
        let zeros = Vec::new();
        let bounds = PathBounds::both(RowBounds::ANY);
        Self {
            runs: Vec::new(),
            n_used: 0,
            bounds,
            block_tokens,
            n_threads,
            spare_block,
            width,
            zeros,
        }
    }

    /// Threads of the inference.
    pub(super) fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Forgets the micro-batch.
    pub(super) fn clear(&mut self) {
        self.n_used = 0;
    }

    /// The runs to make, in this order.
    pub(super) fn used(&self) -> &[Run] {
        &self.runs[..self.n_used]
    }

    /// Rows that are read, over all runs.
    pub(super) fn n_rows(&self) -> usize {
        self.used().iter().map(|run| run.n_rows).sum()
    }

    /// Rows of output that are read, over all runs.
    pub(super) fn n_out(&self, is_last: bool) -> usize {
        self.used().iter().map(|run| run.n_out(is_last)).sum()
    }

    /// Adds the rows of a step, as one-token sequences or as one sequence, which is cut where a
    /// run is full. `blocks` are those of the session.
    pub(super) fn push(&mut self, step: &StepRows<'_>, one_token: bool, blocks: &[u32]) {
        let n_rows = step.tokens.len();
        let bounds = self.bounds.of(one_token);
        let mut from = 0;
        while from < n_rows {
            let left = n_rows - from;
            let room = self.room(bounds);
            let n_next = if one_token { left.min(room) } else { piece(left, room) };
            if n_next == 0 {
                self.begin(bounds);
                continue;
            }
            let width = self.width;
            let part = StepRows {
                start_pos: step.start_pos + from,
                tokens: &step.tokens[from..from + n_next],
                hidden: step.hidden.map(|hidden| &hidden[from * width..(from + n_next) * width]),
                ..*step
            };
            let block_tokens = self.block_tokens;
            let run = &mut self.runs[self.n_used - 1];
            let wanted = |row: &&u32| (from..from + n_next).contains(&(**row as usize));
            let first = run.n_rows;
            let rows = step.wanted.iter().filter(wanted);
            run.batch.logit_rows.extend(rows.map(|row| (first + *row as usize - from) as i64));
            push_rows(&mut run.batch, &part, one_token, blocks, block_tokens);
            run.n_rows = run.batch.positions.len();
            run.n_logit_rows = run.batch.logit_rows.len();
            from += n_next;
        }
    }

    /// Adds the rows that nobody reads.
    pub(super) fn fill_up(&mut self, is_last: bool) {
        for run in &mut self.runs[..self.n_used] {
            let batch = &mut run.batch;
            let n_sequences = batch.n_sequences();
            let all_one_token = run.n_rows == n_sequences;
            let for_threads = match self.n_threads.saturating_sub(n_sequences) {
                1 => 1,
                // Two tokens in one sequence take the batch off the path of one-token sequences.
                2.. => 2,
                0 => 0,
            };
            let for_threads = if all_one_token { for_threads } else { 0 };
            let least = run.bounds.least;
            let n_fill = for_threads.max(least.saturating_sub(run.n_rows));
            if n_fill > 0 {
                self.zeros.resize(FILL_TOKENS.len() * self.width, 0.0);
                let step = StepRows {
                    session: SessionKey(0),
                    start_pos: 0,
                    path: RowPath::Prefill,
                    tokens: &FILL_TOKENS[..n_fill],
                    hidden: (self.width > 0).then(|| &self.zeros[..n_fill * self.width]),
                    wanted: &[],
                };
                push_rows(batch, &step, false, &[self.spare_block], self.block_tokens);
            }
            if is_last {
                // The head runs on at least one row.
                batch.logit_rows.resize(run.n_logit_rows.max(least), 0);
            }
        }
    }

    /// Rows that the last run still takes of a path with these bounds.
    fn room(&self, bounds: RowBounds) -> usize {
        let last = self.used().last().filter(|run| run.bounds == bounds);
        last.map_or(0, |run| bounds.most - run.n_rows)
    }

    fn begin(&mut self, bounds: RowBounds) {
        if self.runs.len() == self.n_used {
            let batch = Batch::default();
            self.runs.push(Run { batch, bounds, n_rows: 0, n_logit_rows: 0 });
        }
        let run = &mut self.runs[self.n_used];
        run.batch.clear();
        run.bounds = bounds;
        run.n_rows = 0;
        run.n_logit_rows = 0;
        self.n_used += 1;
    }
}

/// As many as a run is filled up with at most.
const FILL_TOKENS: [u32; RowBounds::MANY.least] = [0; RowBounds::MANY.least];

/// How many of `left` rows of one sequence go into a run with `room`, so that neither part has a
/// single row: it would take the path of decoding.
fn piece(left: usize, room: usize) -> usize {
    if left <= room {
        return left;
    }
    let n_next = if left - room == 1 { room.saturating_sub(1) } else { room };
    if n_next == 1 { 0 } else { n_next }
}

fn push_rows(
    batch: &mut Batch,
    step: &StepRows<'_>,
    one_token: bool,
    blocks: &[u32],
    block_tokens: usize,
) {
    let n_rows = step.tokens.len();
    match step.hidden {
        Some(hidden) => batch.hidden.extend_from_slice(hidden),
        None => batch.token_ids.extend(step.tokens.iter().map(|token| i64::from(*token))),
    }
    batch.positions.extend((step.start_pos..step.start_pos + n_rows).map(|pos| pos as i64));
    let rows_per_sequence = if one_token { 1 } else { n_rows };
    for past_len in (step.start_pos..step.start_pos + n_rows).step_by(rows_per_sequence) {
        let end = past_len + rows_per_sequence;
        batch.past_lens.push(past_len as i32);
        let begin = batch.sequence_begins.last().copied().unwrap_or(0);
        batch.sequence_begins.push(begin + rows_per_sequence as i32);
        let held = &blocks[..end.div_ceil(block_tokens)];
        batch.block_indices.extend(held.iter().map(|id| *id as i32));
        batch.block_begins.push(batch.block_indices.len() as i32);
        batch.max_context_len = batch.max_context_len.max(end as i32);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MOST: usize = 9;

    fn runs(width: usize, bounds: PathBounds) -> Runs {
        let shape = RunShape { block_tokens: 16, n_threads: 2, spare_block: 99, width };
        Runs { bounds, ..Runs::new(shape) }
    }

    /// Rows of the runs that are read, as (position, token, whether it is a sequence of its own,
    /// whether its logits are wanted).
    fn read(runs: &Runs) -> Vec<(i64, i64, bool, bool)> {
        let mut rows = Vec::new();
        for run in runs.used() {
            let batch = &run.batch;
            for (idx, begin) in batch.sequence_begins.windows(2).enumerate() {
                assert_eq!(batch.positions[begin[0] as usize], i64::from(batch.past_lens[idx]));
                for row in begin[0]..begin[1] {
                    let wanted = &batch.logit_rows[..run.n_logit_rows];
                    rows.push((
                        batch.positions[row as usize],
                        batch.token_ids[row as usize],
                        begin[1] - begin[0] == 1,
                        wanted.contains(&i64::from(row)),
                    ));
                }
            }
        }
        rows
    }

    fn step<'a>(start_pos: usize, tokens: &'a [u32], wanted: &'a [u32]) -> StepRows<'a> {
        let path = RowPath::Prefill;
        StepRows { session: SessionKey(1), start_pos, path, tokens, hidden: None, wanted }
    }

    proptest! {
        #[test]
        fn cutting_changes_neither_rows_nor_their_paths(
            steps in proptest::collection::vec((0_usize..20, 1_usize..30, any::<bool>()), 1..8),
        ) {
            let whole = PathBounds::both(RowBounds::ANY);
            let together = PathBounds::both(RowBounds { least: 3, most: MOST });
            let apart = PathBounds { decode: RowBounds { least: 2, most: 4 }, ..together };
            let [whole, together, apart] = [whole, together, apart].map(|bounds| {
                let mut runs = runs(0, bounds);
                for (start_pos, n_rows, one_token) in &steps {
                    let tokens: Vec<u32> = (7..).take(*n_rows).collect();
                    let wanted: Vec<u32> = (0..*n_rows as u32).step_by(2).collect();
                    let blocks: Vec<u32> = (0..20).collect();
                    runs.push(&step(*start_pos, &tokens, &wanted), *one_token, &blocks);
                }
                runs
            });
            for cut in [&together, &apart] {
                prop_assert_eq!(read(cut), read(&whole));
                prop_assert_eq!(cut.n_rows(), whole.n_rows());
                prop_assert_eq!(cut.n_out(true), whole.n_out(true));
                let fits = |run: &Run| (1..=run.bounds.most).contains(&run.n_rows);
                prop_assert!(cut.used().iter().all(fits));
            }
            for run in apart.used() {
                let decodes = run.bounds == apart.bounds.decode;
                let begins = &run.batch.sequence_begins;
                prop_assert!(!decodes || begins.windows(2).all(|begin| begin[1] - begin[0] == 1));
            }
        }
    }

    #[test]
    fn a_short_run_gets_rows_and_head_rows_that_nobody_reads() {
        let mut runs = runs(2, PathBounds::both(RowBounds::MANY));
        let hidden = [0.5; 6];
        runs.push(&StepRows { hidden: Some(&hidden), ..step(5, &[1, 2, 3], &[2]) }, true, &[0, 1]);
        runs.fill_up(true);
        let [run] = runs.used() else { panic!("one run") };
        assert_eq!(run.batch.positions, [5, 6, 7, 0, 1, 2, 3, 4]);
        assert_eq!(run.batch.sequence_begins, [0, 1, 2, 3, 8]);
        assert_eq!(run.batch.hidden.len(), 16);
        assert_eq!(run.batch.logit_rows, [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((run.n_out(true), run.n_out(false)), (1, 3));
    }

    #[test]
    fn one_token_sequences_are_as_many_as_threads() {
        for (n_threads, expected) in [(1, 1), (2, 2), (3, 3), (8, 3)] {
            let mut runs = runs(0, PathBounds::both(RowBounds::ANY));
            runs.n_threads = n_threads;
            runs.push(&step(3, &[1], &[]), true, &[0]);
            runs.fill_up(false);
            assert_eq!(runs.used()[0].batch.positions.len(), expected, "{n_threads} threads");
        }
    }

    #[test]
    fn few_rows_stay_few_for_any_number_of_threads() {
        for n_threads in 1..20 {
            for n_rows in 1..20 {
                let decode = RowBounds::few(n_threads);
                let mut runs = runs(0, PathBounds { decode, prefill: RowBounds::MANY });
                runs.n_threads = n_threads;
                runs.push(&step(0, &vec![1; n_rows], &[0]), true, &[0, 1]);
                runs.fill_up(true);
                for run in runs.used() {
                    let n_rows = (run.batch.positions.len(), run.batch.logit_rows.len());
                    assert!((2..=6).contains(&n_rows.0) && (2..=6).contains(&n_rows.1));
                }
            }
        }
    }
}
