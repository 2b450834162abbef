//! Checks that every backend makes before it touches a session.

use crate::backend::{StepError, StepRows};
use crate::stage::StageSpec;

/// Checks a step against its stage and returns the number of rows.
///
/// `kv_len` is the session's length, `limit` the most positions that it may reach.
pub(crate) fn check_step(
    step: &StepRows<'_>,
    spec: &StageSpec,
    kv_len: usize,
    limit: usize,
) -> Result<usize, StepError> {
    let n_rows = check_rows(step, spec)?;
    let (session, start_pos) = (step.session, step.start_pos);
    if start_pos > kv_len {
        return Err(StepError::Gap { session, kv_len, start_pos });
    }
    // Both parts are bounded: kv_len by the limit, the rows by the memory they came in.
    let len = start_pos + n_rows;
    if len > limit {
        return Err(StepError::ContextFull { session, len, limit });
    }
    if spec.is_last() {
        check_wanted(step.wanted, n_rows)?;
    }
    Ok(n_rows)
}

/// Checks that no earlier step of the micro-batch moves the same session.
pub(crate) fn check_alone(steps: &[StepRows<'_>], index: usize) -> Result<(), StepError> {
    let session = steps[index].session;
    let earlier = steps[..index].iter().filter(|step| step.session == session).count();
    if earlier > 0 {
        let what = "steps of one session in a micro-batch";
        return Err(StepError::Shape { what, expected: 1, found: earlier + 1 });
    }
    Ok(())
}

fn check_rows(step: &StepRows<'_>, spec: &StageSpec) -> Result<usize, StepError> {
    let n_rows = step.tokens.len();
    if n_rows == 0 {
        return Err(StepError::Shape { what: "rows of a step", expected: 1, found: 0 });
    }
    let vocab_size = spec.vocab_size;
    if let Some(&token) = step.tokens.iter().find(|token| **token as usize >= vocab_size) {
        return Err(StepError::Token { token, vocab_size });
    }
    let expected = if spec.is_first() { 0 } else { n_rows * spec.hidden_dim };
    let found = step.hidden.map_or(0, <[f32]>::len);
    if found != expected {
        return Err(StepError::Shape { what: "numbers of hidden states", expected, found });
    }
    Ok(n_rows)
}

fn check_wanted(wanted: &[u32], n_rows: usize) -> Result<(), StepError> {
    for (place, &row) in wanted.iter().enumerate() {
        let lowest = place.checked_sub(1).map_or(0, |before| wanted[before] as usize + 1);
        let row = row as usize;
        if row < lowest {
            let what = "wanted rows must ascend: next row at least";
            return Err(StepError::Shape { what, expected: lowest, found: row });
        }
        if row >= n_rows {
            let what = "wanted row must be one of the step: rows";
            return Err(StepError::Shape { what, expected: n_rows, found: row + 1 });
        }
    }
    Ok(())
}
