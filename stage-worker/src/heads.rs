//! What the last stage knows of each session to choose its tokens: parameters, and the text so far.
//!
//! The text is needed by penalties and constraints only. It starts as the prompt of the `open`
//! message, so rows that a cached prefix spares are part of it, and follows every step by the step
//! contract: truncate to `start_pos`, then append. A higher epoch brings its own prompt and starts
//! anew.

use std::collections::HashMap;

use stagebus_draft::constraint::Guide;
use stagebus_draft::sampling::{History, Sampler, SamplingError};
use stagebus_engine::backend::SessionKey;
use stagebus_schemas::messages::control::{HeadMode, Open};
use stagebus_schemas::messages::forward::Step;
use stagebus_schemas::messages::head::HeadRow;
use stagebus_schemas::messages::sampling::Sampling;

/// The sessions of a last stage.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    sessions: HashMap<SessionKey, SessionHead>,
    sampler: Sampler,
}

/// One session's part.
#[derive(Debug)]
struct SessionHead {
    sampling: Sampling,
    mode: HeadMode,
    /// Absent where no parameter looks at it.
    history: Option<History>,
    /// With a constraint: the last choice that counts, and its position.
    chosen: Option<(u32, u32)>,
}

/// What leaves for the wanted rows of a step.
#[derive(Debug, PartialEq)]
pub(crate) enum Chosen {
    /// The tokens.
    Rows(Vec<HeadRow>),
    /// Nothing is chosen here: the coordinator wants the logits.
    AllLogits,
}

/// Why no token is chosen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeadError {
    /// The session is not known here.
    #[error("the session has no sampling parameters on this stage")]
    UnknownSession,
    /// The step starts behind the end of the text.
    #[error("{len} tokens of the session are known, the step starts at {start_pos}")]
    Gap {
        /// Tokens known.
        len: usize,
        /// Start of the step.
        start_pos: usize,
    },
    /// The request's bias leaves no token.
    #[error("logit_bias leaves no token to choose")]
    AllForbidden(#[source] SamplingError),
    /// The request's constraint leaves no token, or cannot be followed.
    #[error("the constraint leaves no token to choose: {0}")]
    Constraint(#[source] SamplingError),
    /// The logits leave no token.
    #[error("no token can be chosen")]
    Logits(#[source] SamplingError),
}

impl Heads {
    /// Takes the parameters of a session in, at its first open and at every higher epoch; `guide` is
    /// its compiled constraint.
    pub(crate) fn open(&mut self, session: SessionKey, open: &Open, guide: Option<Guide>) {
        let history = open.sampling.needs_history().then(|| {
            let mut history = History::new(open.prompt_len as usize).with_guide(guide);
            open.prompt.iter().for_each(|token| history.push(*token));
            history
        });
        let (sampling, mode) = (open.sampling.clone(), open.head);
        self.sessions.insert(session, SessionHead { sampling, mode, history, chosen: None });
    }

    /// Forgets a session.
    pub(crate) fn close(&mut self, session: SessionKey) {
        self.sessions.remove(&session);
    }

    /// Follows a step that ran, and chooses the tokens after its wanted rows.
    ///
    /// With a constraint, rows behind a drafted token that is not the one chosen get any token, which
    /// nobody reads: what would fit there is costly to tell, and may be nothing.
    ///
    /// **Shape**: `logits` is `[n_wanted, vocab_size]`, row-major.
    ///
    /// # Errors
    /// [`HeadError`]; the session's epoch is over then.
    pub(crate) fn choose(
        &mut self,
        session: SessionKey,
        step: &Step,
        logits: &[f32],
        vocab_size: usize,
    ) -> Result<Chosen, HeadError> {
        let head = self.sessions.get_mut(&session).ok_or(HeadError::UnknownSession)?;
        if head.mode == HeadMode::Full {
            return Ok(Chosen::AllLogits);
        }
        let mut counts = head.sampling.constraint.is_none() || head.counts(step);
        let SessionHead { sampling, history, chosen, .. } = head;
        if let Some(history) = history {
            let (len, start_pos) = (history.len(), step.start_pos as usize);
            if len < start_pos {
                return Err(HeadError::Gap { len, start_pos });
            }
            history.truncate(start_pos);
        }
        let mut nothing = History::default();
        let mut n_followed = 0;
        let mut rows = Vec::with_capacity(step.wanted.len());
        for (row, logits) in step.wanted.iter().zip(logits.chunks_exact(vocab_size)) {
            let end = *row as usize + 1;
            if let Some(history) = history {
                step.tokens[n_followed..end].iter().for_each(|token| history.push(*token));
            }
            n_followed = end;
            let pos = step.start_pos + row;
            if !counts {
                rows.push(HeadRow { pos, token: 0, logprob: None, top: Vec::new() });
                continue;
            }
            let before = history.as_mut().unwrap_or(&mut nothing);
            let choice = self
                .sampler
                .choose(logits, pos + 1, sampling, before)
                .map_err(|error| no_token(sampling, error))?;
            if sampling.constraint.is_some() {
                *chosen = Some((pos + 1, choice.token));
                counts = step.tokens.get(end).is_none_or(|next| *next == choice.token);
            }
            rows.push(HeadRow {
                pos,
                token: choice.token,
                logprob: choice.logprob,
                top: choice.top,
            });
        }
        if let Some(history) = history {
            step.tokens[n_followed..].iter().for_each(|token| history.push(*token));
        }
        Ok(Chosen::Rows(rows))
    }
}

impl SessionHead {
    /// Whether a step goes on with the last choice that counts, or begins before it.
    fn counts(&self, step: &Step) -> bool {
        self.chosen.is_none_or(|(pos, token)| {
            step.start_pos < pos || (step.start_pos == pos && step.tokens.first() == Some(&token))
        })
    }
}

fn no_token(sampling: &Sampling, error: SamplingError) -> HeadError {
    if sampling.constraint.is_some() {
        HeadError::Constraint(error)
    } else if sampling.logit_bias.is_empty() {
        HeadError::Logits(error)
    } else {
        HeadError::AllForbidden(error)
    }
}

#[cfg(test)]
mod tests;
