//! Which rows run in which call of a static graph, and what they see.

use stagebus_shards::StaticForm;

/// What is added to the score of a column that a row does not see: exp() of it is zero in every
/// precision.
const MASKED: f32 = -65504.0;

/// A step of a session in a bank, to be run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    /// Its place in the micro-batch.
    pub(super) step: usize,
    /// The session's slot.
    pub(super) slot: usize,
    /// Position of the first row.
    pub(super) start_pos: usize,
    pub(super) n_rows: usize,
}

/// Rows of one step that run in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The step's place in the micro-batch.
    pub(super) step: usize,
    /// The session's slot.
    pub(super) slot: usize,
    /// The first of these rows, counted in the step.
    pub(super) first: usize,
    /// Its position in the session.
    pub(super) position: usize,
    /// Its row in the call.
    pub(super) row: usize,
    pub(super) n_rows: usize,
}

/// Cuts the steps of a bank into as few calls of `n_rows` rows as there can be. Short steps come
/// first, so that prompts delay them by no call.
pub(super) fn calls(steps: &[Waiting], n_rows: usize) -> Vec<Vec<Piece>> {
    let mut order: Vec<&Waiting> = steps.iter().collect();
    order.sort_by_key(|step| step.n_rows);
    let mut calls: Vec<Vec<Piece>> = Vec::new();
    let mut free = 0;
    for waiting in order {
        let Waiting { step, slot, start_pos, .. } = *waiting;
        let mut first = 0;
        while first < waiting.n_rows {
            if free == 0 {
                calls.push(Vec::new());
                free = n_rows;
            }
            let taken = free.min(waiting.n_rows - first);
            let (row, position) = (n_rows - free, start_pos + first);
            let piece = Piece { step, slot, first, position, row, n_rows: taken };
            if let Some(call) = calls.last_mut() {
                call.push(piece);
            }
            first += taken;
            free -= taken;
        }
    }
    calls
}

/// Writes what the rows of a call see: of their own slot the positions before the call, of their
/// own piece the rows up to themselves. A row that nobody uses sees itself.
///
/// **Shape**: `mask` is `[rows, n_columns]`, row-major.
pub(super) fn write_mask(form: StaticForm, pieces: &[Piece], mask: &mut [f32]) {
    mask.fill(MASKED);
    let n_cached = form.n_cached();
    for (row, columns) in mask.chunks_exact_mut(form.n_columns()).enumerate() {
        let own = |piece: &&Piece| (piece.row..piece.row + piece.n_rows).contains(&row);
        let since = match pieces.iter().find(own) {
            Some(piece) => {
                columns[piece.slot * form.window..][..piece.position].fill(0.0);
                piece.row
            }
            None => row,
        };
        columns[n_cached + since..=n_cached + row].fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(step: usize, start_pos: usize, n_rows: usize) -> Waiting {
        Waiting { step, slot: step, start_pos, n_rows }
    }

    #[test]
    fn short_steps_run_first_and_no_row_is_left_free() {
        let steps = [waiting(0, 10, 9), waiting(1, 7, 1), waiting(2, 0, 3)];
        let found = calls(&steps, 4);
        let piece = |step: usize, first: usize, row: usize, n_rows: usize| {
            let position = steps[step].start_pos + first;
            Piece { step, slot: step, first, position, row, n_rows }
        };
        let expected = [
            vec![piece(1, 0, 0, 1), piece(2, 0, 1, 3)],
            vec![piece(0, 0, 0, 4)],
            vec![piece(0, 4, 0, 4)],
            vec![piece(0, 8, 0, 1)],
        ];
        assert_eq!(found, expected);
        let expected = [vec![piece(1, 0, 0, 1), piece(2, 0, 1, 2)], vec![piece(2, 2, 0, 1)]];
        assert_eq!(calls(&steps[1..], 3), expected);
        assert!(calls(&[], 4).is_empty());
    }

    #[test]
    fn rows_see_their_own_past_and_the_rows_before_them() {
        let form = StaticForm { window: 3, rows: 4, slots: 2 };
        let pieces = [
            Piece { step: 0, slot: 1, first: 0, position: 2, row: 0, n_rows: 1 },
            Piece { step: 1, slot: 0, first: 0, position: 1, row: 1, n_rows: 2 },
        ];
        let mut mask = vec![7.0; form.rows * form.n_columns()];
        write_mask(form, &pieces, &mut mask);
        let text = |columns: &[f32]| -> String {
            columns.iter().map(|score| if *score == 0.0 { 'x' } else { '.' }).collect()
        };
        let rows: Vec<String> = mask.chunks(form.n_columns()).map(text).collect();
        let expected = ["...xx.x...", "x......x..", "x......xx.", ".........x"];
        assert_eq!(rows, expected);
        assert!(mask.iter().all(|score| [0.0, MASKED].contains(score)));
    }
}
