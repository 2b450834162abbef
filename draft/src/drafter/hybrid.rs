//! Looks words up where that is likely to be right, and asks a model where it is not.

use stagebus_engine::SessionKey;

use super::{Doubt, DraftError, DraftRequest, Drafter, NgramDrafter};
use crate::constraint::Guide;

/// Shortest match, in tokens, that is trusted more than the model.
///
/// Measured with the draft model of SmolLM2-135M: after a match of four tokens the look-up is as
/// good as the model and free; shorter ones did worse.
pub const MIN_MATCH: usize = 4;

/// Prompt look-up after a match of at least [`MIN_MATCH`] tokens, else another drafter.
#[derive(Debug)]
pub struct HybridDrafter<D> {
    ngram: NgramDrafter,
    model: D,
}

impl<D: Drafter> HybridDrafter<D> {
    /// Asks `model` where nothing is found.
    #[must_use]
    pub fn new(model: D) -> Self {
        Self { ngram: NgramDrafter::new(MIN_MATCH), model }
    }
}

impl<D: Drafter> Drafter for HybridDrafter<D> {
    fn open(&mut self, session: SessionKey, prompt: &[u32]) {
        self.ngram.open(session, prompt);
        self.model.open(session, prompt);
    }

    fn guide(&mut self, session: SessionKey, guide: Guide) {
        self.ngram.guide(session, guide.clone());
        self.model.guide(session, guide);
    }

    fn accept(&mut self, session: SessionKey, tokens: &[u32]) {
        self.ngram.accept(session, tokens);
        self.model.accept(session, tokens);
    }

    fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Vec<u32>>, DraftError> {
        let mut drafts = self.ngram.draft(requests)?;
        let open: Vec<usize> = (0..requests.len()).filter(|idx| drafts[*idx].is_empty()).collect();
        if open.is_empty() {
            return Ok(drafts);
        }
        let requests: Vec<_> = open.iter().map(|idx| requests[*idx]).collect();
        for (idx, draft) in open.into_iter().zip(self.model.draft(&requests)?) {
            drafts[idx] = draft;
        }
        Ok(drafts)
    }

    fn doubts(&mut self, session: SessionKey) -> Vec<Doubt> {
        self.model.doubts(session)
    }

    fn close(&mut self, session: SessionKey) {
        self.ngram.close(session);
        self.model.close(session);
    }
}
