//! The head mode `full`: the last stage sends whole rows of logits, and tokens are chosen here.
//!
//! It exists to measure what choosing at the last stage saves; the same sampler gives the same
//! tokens.

use stagebus_draft::constraint::Guide;
use stagebus_draft::sampling::{History, Sampler, SamplingError};
use stagebus_schemas::messages::head::HeadRow;
use stagebus_schemas::tensor::{Dtype, Tensor};

use crate::fault::Fault;
use crate::session::Session;

/// What stands of a session, as far as its parameters look at it.
pub(crate) fn history(session: &Session, guide: Option<Guide>) -> History {
    let mut history = History::new(session.prompt.len()).with_guide(guide);
    if session.sampling.needs_history() {
        session.prompt.iter().chain(&session.output).for_each(|token| history.push(*token));
    }
    history
}

/// Chooses the tokens that follow the wanted rows of a step.
///
/// **Shape**: `logits` is `[n_wanted, vocab_size]`. `history` is what stands. `wanted` are the rows'
/// positions: the last row of what stands, and then those of `drafted`. What was sent in earlier
/// windows stands by now.
///
/// # Errors
/// [`Fault::WrongRows`] for logits of another shape, [`Fault::NoToken`].
pub(crate) fn choose(
    sampler: &mut Sampler,
    session: &Session,
    history: &mut History,
    (wanted, drafted): (&[u32], &[u32]),
    logits: &Tensor,
    vocab_size: u32,
) -> Result<Vec<HeadRow>, Fault> {
    let shape = (logits.n_rows as usize, logits.hidden_dim, logits.dtype);
    if shape != (wanted.len(), vocab_size, Dtype::F32) || wanted.len() > drafted.len() + 1 {
        return Err(Fault::WrongRows);
    }
    let sampling = &session.sampling;
    let row_bytes = Dtype::F32.row_bytes(vocab_size as usize);
    let mut row = Vec::with_capacity(vocab_size as usize);
    let mut rows = Vec::with_capacity(wanted.len());
    let mut counts = true;
    for (index, (pos, bytes)) in wanted.iter().zip(logits.data.chunks_exact(row_bytes)).enumerate()
    {
        if index > 0 && sampling.needs_history() {
            history.push(drafted[index - 1]);
        }
        let follows = rows.last().is_none_or(|row: &HeadRow| row.token == drafted[index - 1]);
        if sampling.constraint.is_some() && !(counts && follows) {
            // What is chosen behind a wrong token is for nobody, and there may be nothing to choose.
            counts = false;
            rows.push(HeadRow { pos: *pos, token: 0, logprob: None, top: Vec::new() });
            continue;
        }
        row.clear();
        row.extend(bytes.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)));
        let choice = sampler
            .choose(&row, pos + 1, sampling, history)
            .map_err(|source| no_token(session, source))?;
        let (token, logprob, top) = (choice.token, choice.logprob, choice.top);
        rows.push(HeadRow { pos: *pos, token, logprob, top });
    }
    Ok(rows)
}

fn no_token(session: &Session, source: SamplingError) -> Fault {
    let by = if session.sampling.constraint.is_some() {
        Some("the constraint")
    } else {
        (!session.sampling.logit_bias.is_empty()).then_some("logit_bias")
    };
    Fault::NoToken { by, source }
}
