//! How the caches of a session are filled: which rows run, in which steps, and on which stages.
//!
//! Every stage holds some first rows of the session: of a cached prefix, or of itself before a
//! recovery. A row that a stage does not hold needs the hidden states of the stage before it, so
//! whatever one stage lacks runs on all stages before that one, whether they hold it or not. Stages
//! behind the last one that lacks a row pass its step on and keep what they have. So the rows fall
//! into ranges, from the first stage to the last:
//!
//! ```text
//! held by     all │ stages 1, 2 │ stage 2 │ none
//! run by     none │ stage 0     │ 0 and 1 │ all
//! ```
//! No step crosses the end of a range, and no step has a single row of a prompt.

use std::collections::VecDeque;

use stagebus_schemas::ids::StageIndex;
use stagebus_schemas::messages::forward::Phase;

use crate::prefill::{plan_chunks, usable_prefix};

/// Rows that fill the caches of a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    /// Position of the first row.
    pub(crate) start_pos: usize,
    /// The steps that are to be sent, in order.
    pub(crate) chunks: VecDeque<Chunk>,
}

/// Rows of one step that fills the caches: of the prompt or, in a replay, of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) phase: Phase,
    pub(crate) n_rows: usize,
    /// The first of the stages that hold the rows; nothing if none does.
    pub(crate) held_from: Option<StageIndex>,
}

/// Plans what fills the caches: the prompt in chunks of at most `max_rows` and, in a replay, the
/// output but for its last token, each row by the path that it took the first time. `cached` says
/// how many first rows each stage holds.
pub(crate) fn plan_fill(
    (n_prompt, n_output): (usize, usize),
    cached: &[usize],
    max_rows: usize,
) -> Fill {
    // The last token's row is the next decode step's.
    let n_rows = n_prompt + n_output.saturating_sub(1);
    let ends = held_ends((n_prompt, n_output), cached);
    let start_pos = ends.first().copied().unwrap_or(0);
    let mut chunks = VecDeque::new();
    let mut start = start_pos;
    let all_run = std::iter::once((n_rows, None));
    let held = (0_u16..).map(StageIndex::new).zip(ends).skip(1);
    for (end, held_from) in held.map(|(stage, end)| (end, Some(stage))).chain(all_run) {
        let prompt = end.min(n_prompt).saturating_sub(start);
        let output = end.saturating_sub(start.max(n_prompt));
        for (phase, n_rows) in [(Phase::Prefill, prompt), (Phase::Decode, output)] {
            let sizes = plan_chunks(n_rows, max_rows).into_iter();
            chunks.extend(sizes.map(|n_rows| Chunk { phase, n_rows, held_from }));
        }
        start = end;
    }
    Fill { start_pos, chunks }
}

/// Where the rows end, stage by stage, that this stage and all behind it hold.
fn held_ends((n_prompt, n_output): (usize, usize), cached: &[usize]) -> Vec<usize> {
    let n_rows = n_prompt + n_output.saturating_sub(1);
    let usable = |len: usize| match n_output == 0 || len < n_prompt {
        true => usable_prefix(len, n_prompt),
        false => len.min(n_rows),
    };
    let mut ends: Vec<usize> = cached.iter().copied().map(usable).collect();
    for stage in (1..ends.len()).rev() {
        ends[stage - 1] = ends[stage - 1].min(ends[stage]);
    }
    for stage in 1..ends.len() {
        // A single row of the prompt would have to run alone.
        if ends[stage].min(n_prompt).saturating_sub(ends[stage - 1]) == 1 {
            ends[stage] = ends[stage - 1];
        }
    }
    ends
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// First stage that holds, rows of the prompt, rows of the output, chunk by chunk.
    fn plan(lens: (usize, usize), cached: &[usize]) -> (usize, Vec<(Option<usize>, char, usize)>) {
        let Fill { start_pos, chunks } = plan_fill(lens, cached, 8);
        let of = |chunk: Chunk| {
            let phase = if chunk.phase == Phase::Prefill { 'p' } else { 'o' };
            (chunk.held_from.map(StageIndex::index), phase, chunk.n_rows)
        };
        (start_pos, chunks.into_iter().map(of).collect())
    }

    #[test]
    fn a_new_first_stage_runs_alone_what_the_others_hold() {
        assert_eq!(
            plan((20, 5), &[0, 24]),
            (0, vec![(Some(1), 'p', 7), (Some(1), 'p', 7), (Some(1), 'p', 6), (Some(1), 'o', 4)])
        );
        // The second stage lacks the last output row, then a part of the prompt too.
        assert_eq!(
            plan((6, 5), &[0, 9]),
            (0, vec![(Some(1), 'p', 6), (Some(1), 'o', 3), (None, 'o', 1)])
        );
        assert_eq!(
            plan((6, 5), &[0, 3]),
            (0, vec![(Some(1), 'p', 3), (None, 'p', 3), (None, 'o', 4)])
        );
    }

    #[test]
    fn a_new_last_stage_needs_the_hidden_states_of_all() {
        assert_eq!(plan((6, 5), &[10, 0]), (0, vec![(None, 'p', 6), (None, 'o', 4)]));
        assert_eq!(plan((6, 5), &[10, 10]), (10, vec![]));
        assert_eq!(
            plan((6, 3), &[8, 2, 6]),
            (2, vec![(Some(2), 'p', 4), (None, 'o', 2)]),
            "the first stage runs what the second lacks"
        );
    }

    #[test]
    fn a_longer_cached_prefix_of_a_later_stage_counts() {
        assert_eq!(plan((12, 0), &[4, 8]), (4, vec![(Some(1), 'p', 4), (None, 'p', 4)]));
        assert_eq!(plan((12, 0), &[8, 4]), (4, vec![(None, 'p', 8)]));
        // The last two rows of a prompt run everywhere: they choose the first token.
        assert_eq!(plan((12, 0), &[4, 12]), (4, vec![(Some(1), 'p', 6), (None, 'p', 2)]));
        assert_eq!(plan((1, 0), &[1, 1]), (0, vec![(None, 'p', 1)]));
    }

    #[test]
    fn no_row_of_a_prompt_runs_alone_at_the_end_of_what_a_stage_holds() {
        assert_eq!(plan((6, 3), &[2, 3]), (2, vec![(None, 'p', 4), (None, 'o', 2)]));
        assert_eq!(
            plan((6, 3), &[2, 3, 4]),
            (2, vec![(Some(2), 'p', 2), (None, 'p', 2), (None, 'o', 2)])
        );
        assert_eq!(
            plan((6, 3), &[5, 7]),
            (4, vec![(Some(1), 'p', 2), (Some(1), 'o', 1), (None, 'o', 1)])
        );
    }

    proptest! {
        #[test]
        fn every_row_runs_where_it_is_lacking(
            n_prompt in 2_usize..60,
            n_output in 0_usize..20,
            shares in prop::collection::vec(0_usize..=80, 1..5),
            max_rows in 3_usize..20,
        ) {
            let cached: Vec<usize> =
                shares.iter().map(|share| (*share).min(n_prompt + n_output)).collect();
            let Fill { start_pos, chunks } = plan_fill((n_prompt, n_output), &cached, max_rows);
            let mut pos = start_pos;
            for chunk in chunks {
                let end = pos + chunk.n_rows;
                prop_assert!((1..=max_rows).contains(&chunk.n_rows));
                match chunk.phase {
                    Phase::Prefill => prop_assert!(chunk.n_rows > 1 && end <= n_prompt),
                    Phase::Decode => prop_assert!(pos >= n_prompt),
                }
                let first = chunk.held_from.map_or(cached.len(), StageIndex::index);
                prop_assert!(first > 0);
                prop_assert!(cached[first..].iter().all(|held| *held >= end));
                pos = end;
            }
            prop_assert_eq!(pos, n_prompt + n_output.saturating_sub(1));
            prop_assert!(cached.iter().all(|held| *held >= start_pos));
        }
    }
}
