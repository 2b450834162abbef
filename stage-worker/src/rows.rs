//! Checks of what the rows of a forward message claim.
//!
//! The codec has checked what every message must hold (row counts, tensor length); here it meets
//! the stage: does it take a tensor, of which width, and are tokens and positions inside the
//! model.

use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::messages::forward::{Forward, Step};

use crate::stage::Stage;

/// Checks that a message has the form that this stage takes: token ids alone for the first stage
/// and for rows that it holds, hidden states of the model's width for all others.
///
/// # Errors
/// [`ErrorClass::InvalidRequest`], for every step of the message.
pub(crate) fn check_message(stage: &Stage, forward: &Forward) -> Result<(), ErrorReply> {
    let n_held = forward.steps.iter().filter(|step| step.is_held_by(stage.index)).count();
    if n_held != 0 && n_held != forward.steps.len() {
        return Err(invalid(format!(
            "stage {} holds the rows of {n_held} of {} steps of one message",
            stage.index,
            forward.steps.len()
        )));
    }
    match (&forward.hidden, stage.is_first() || n_held != 0) {
        (None, true) => Ok(()),
        (Some(_), true) => Err(invalid(format!(
            "stage {} takes token ids, the message carries hidden states",
            stage.index
        ))),
        (None, false) => Err(invalid(format!(
            "stage {} takes hidden states, the message carries none",
            stage.index
        ))),
        (Some(hidden), false) if hidden.hidden_dim as usize != stage.hidden_dim => {
            Err(invalid(format!(
                "hidden states of model {} have {} elements per row, the message has {}",
                stage.model, stage.hidden_dim, hidden.hidden_dim
            )))
        }
        (Some(_), false) => Ok(()),
    }
}

/// Checks that the tokens and positions of a step exist in the model.
///
/// # Errors
/// [`ErrorClass::InvalidRequest`].
pub(crate) fn check_step(stage: &Stage, step: &Step) -> Result<(), ErrorReply> {
    if step.tokens.iter().any(|token| *token as usize >= stage.vocab_size) {
        return Err(invalid(format!(
            "a token of step {} is outside the vocabulary of {}",
            step.step, stage.vocab_size
        )));
    }
    let end = (step.start_pos as usize).saturating_add(step.tokens.len());
    if end > stage.context_length {
        return Err(invalid(format!(
            "step {} reaches position {end}, the context holds {}",
            step.step, stage.context_length
        )));
    }
    Ok(())
}

fn invalid(message: String) -> ErrorReply {
    ErrorReply::new(ErrorClass::InvalidRequest, message)
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::ids::{Epoch, SessionId, StageIndex, StepNumber};
    use stagebus_schemas::messages::forward::Phase;
    use stagebus_schemas::tensor::{Dtype, Tensor};
    use stagebus_schemas::version::MessageVersion;

    use super::*;
    use crate::stage_fixture::{HIDDEN_DIM, stage};

    #[test]
    fn the_first_stage_takes_ids_and_the_others_rows_of_their_width() {
        let check = |index: u16, hidden_dim: Option<usize>| {
            let hidden = hidden_dim.map(|dim| Tensor {
                dtype: Dtype::F32,
                n_rows: 1,
                hidden_dim: u32::try_from(dim).expect("small"),
                data: Dtype::F32.encode(&vec![0.0; dim], dim).into(),
            });
            let forward =
                Forward { version: MessageVersion::CURRENT, from: None, steps: vec![], hidden };
            check_message(&stage(index, 2), &forward).map_err(|error| error.class)
        };
        assert_eq!(check(0, None), Ok(()));
        assert_eq!(check(1, Some(HIDDEN_DIM)), Ok(()));
        assert_eq!(check(0, Some(HIDDEN_DIM)), Err(ErrorClass::InvalidRequest));
        assert_eq!(check(1, None), Err(ErrorClass::InvalidRequest));
        assert_eq!(check(1, Some(HIDDEN_DIM + 1)), Err(ErrorClass::InvalidRequest));
    }

    #[test]
    fn rows_that_a_stage_holds_come_alone_and_without_hidden_states() {
        let step = |held_from: Option<u16>| Step {
            session: SessionId::from_u64(1),
            epoch: Epoch::FIRST,
            step: StepNumber::FIRST,
            start_pos: 0,
            phase: Phase::Prefill,
            tokens: vec![1],
            wanted: vec![],
            held_from: held_from.map(StageIndex::new),
            trace: vec![],
        };
        let check = |index: u16, steps: Vec<Step>, carries: bool| {
            let hidden = carries.then(|| Tensor {
                dtype: Dtype::F32,
                n_rows: u32::try_from(steps.len()).expect("small"),
                hidden_dim: u32::try_from(HIDDEN_DIM).expect("small"),
                data: Dtype::F32.encode(&vec![0.0; steps.len() * HIDDEN_DIM], HIDDEN_DIM).into(),
            });
            let forward = Forward { version: MessageVersion::CURRENT, from: None, steps, hidden };
            check_message(&stage(index, 3), &forward).map_err(|error| error.class)
        };
        let refused = Err(ErrorClass::InvalidRequest);
        assert_eq!(check(1, vec![step(Some(1)), step(Some(1))], false), Ok(()));
        assert_eq!(check(2, vec![step(Some(1)), step(Some(2))], false), Ok(()));
        assert_eq!(check(0, vec![step(Some(1)), step(None)], false), Ok(()));
        assert_eq!(check(1, vec![step(Some(2)), step(None)], true), Ok(()));
        assert_eq!(check(1, vec![step(Some(1))], true), refused);
        assert_eq!(check(1, vec![step(Some(2))], false), refused);
        assert_eq!(check(1, vec![step(Some(1)), step(None)], true), refused);
        assert_eq!(check(1, vec![step(Some(1)), step(None)], false), refused);
    }

    #[test]
    fn tokens_and_positions_outside_the_model_are_refused() {
        let check = |tokens: Vec<u32>, start_pos: u32| {
            let step = Step {
                session: SessionId::from_u64(1),
                epoch: Epoch::FIRST,
                step: StepNumber::FIRST,
                start_pos,
                phase: Phase::Prefill,
                tokens,
                wanted: vec![],
                held_from: None,
                trace: vec![],
            };
            check_step(&stage(0, 1), &step).map_err(|error| error.class)
        };
        assert_eq!(check(vec![0, 49], 62), Ok(()));
        assert_eq!(check(vec![0, 50], 0), Err(ErrorClass::InvalidRequest));
        assert_eq!(check(vec![0, 1], 63), Err(ErrorClass::InvalidRequest));
        assert_eq!(check(vec![0], u32::MAX), Err(ErrorClass::InvalidRequest));
    }
}
