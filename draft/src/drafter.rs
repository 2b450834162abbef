//! Who proposes tokens.
//!
//! A drafter follows the text of every session and proposes what comes next. Its proposals never
//! change what is generated, only how soon: the target decides about each of them.

mod head;
mod hybrid;
mod load;
mod model;
mod ngram;

use stagebus_engine::{OpenError, SessionKey, StepError};

pub use head::{DraftHead, DraftHeadError};
pub use hybrid::{HybridDrafter, MIN_MATCH};
pub use load::{DraftLoadError, open_draft};
pub use model::ModelDrafter;
pub use ngram::NgramDrafter;

use crate::constraint::Guide;
use crate::sampling::SamplingParams;

/// One session's wish for drafted tokens.
#[derive(Debug, Clone, Copy)]
pub struct DraftRequest<'a> {
    /// The session; nothing is drafted for one that is not open.
    pub session: SessionKey,
    /// Tokens that follow the text as far as anybody knows, but do not stand yet: the draft goes
    /// on after them. The next request may say otherwise.
    pub assumed: &'a [u32],
    /// Most tokens to draft.
    pub n: usize,
    /// Parameters of the request: a drafter draws with the noise that the head will use.
    pub params: &'a SamplingParams,
}

/// How sure a drafter is of a drafted token, given all tokens before it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Doubt {
    /// Probability of the drafted token.
    pub first: f64,
    /// What it would draft instead.
    pub second: u32,
    /// Probability of that.
    pub second_share: f64,
}

/// Why a drafter failed. Drafting is a help: sessions go on without drafted tokens.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The draft model cannot take a session in. A full model is no error.
    #[error("the draft model cannot open session {session}")]
    Open {
        /// The session.
        session: SessionKey,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// The draft model failed for a session; its text is replayed at its next draft.
    #[error("the draft model failed for session {session}")]
    Step {
        /// The session.
        session: SessionKey,
        /// Why.
        #[source]
        source: StepError,
    },
    /// The draft model gives hidden states: it is a part of a model.
    #[error("the draft model gives no logits: it is not a whole model")]
    NotLogits,
    /// The draft model's rows do not belong to its head.
    #[error("the draft model gives rows of {found} logits, its head has {expected}")]
    RowWidth {
        /// Rows of the head.
        expected: usize,
        /// Numbers found.
        found: usize,
    },
}

/// Proposes tokens for sessions.
///
/// A session belongs to whoever opened it; a key that is not open is ignored by every method.
pub trait Drafter: Send {
    /// Starts a session with its prompt; a session of the same key is replaced.
    fn open(&mut self, session: SessionKey, prompt: &[u32]);

    /// Says what the output of a session must be, right after it was opened: what does not fit is
    /// not worth drafting.
    fn guide(&mut self, session: SessionKey, guide: Guide);

    /// Appends tokens that stand.
    fn accept(&mut self, session: SessionKey, tokens: &[u32]);

    /// Drafts for several sessions together: at most one request per session. The answers stand in
    /// the order of `requests`, each with at most `n` tokens and possibly none. What is assumed is
    /// forgotten afterwards, but a model that is asked to go on from there need not run it again. A request for no
    /// tokens lets a model take in the session's text.
    ///
    /// # Errors
    /// [`DraftError`]; every session stays open and may be drafted for again.
    fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Vec<u32>>, DraftError>;

    /// How sure it was of each token of the session's last draft, in order; taken with the call.
    /// Empty if it does not know, or if the request's `top_logprobs` did not ask for two tokens.
    fn doubts(&mut self, _session: SessionKey) -> Vec<Doubt> {
        Vec::new()
    }

    /// Ends a session and frees what it holds.
    fn close(&mut self, session: SessionKey);
}
