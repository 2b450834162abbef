//! Proposes what followed the longest suffix of the text that stood before, as far as it fits what the
//! output must be.

use std::collections::HashMap;

use stagebus_engine::SessionKey;

use super::{DraftError, DraftRequest, Drafter};
use crate::constraint::Guide;
use crate::ngram::NgramIndex;

/// Prompt look-up for any number of sessions. Costs no inference.
#[derive(Debug)]
pub struct NgramDrafter {
    sessions: HashMap<SessionKey, NgramIndex>,
    /// What the outputs of some sessions must be, with the lengths of their prompts.
    guides: HashMap<SessionKey, (Guide, usize)>,
    min_match: usize,
}

impl NgramDrafter {
    /// Proposes only after a match of at least `min_match` tokens.
    #[must_use]
    pub fn new(min_match: usize) -> Self {
        Self { sessions: HashMap::new(), guides: HashMap::new(), min_match }
    }

    /// At most `n` tokens for one session after its text and what is assumed; none without a match.
    fn propose(&self, session: SessionKey, assumed: &[u32], n: usize) -> Vec<u32> {
        let Some(index) = self.sessions.get(&session) else { return Vec::new() };
        let Some(found) = index.lookup_after(assumed, self.min_match) else { return Vec::new() };
        // A continuation shorter than `n` reaches the end of the text: the text repeats with that
        // period, and so does the proposal.
        let period = index.tokens().get(found.end..).unwrap_or_default().iter().chain(assumed);
        period.copied().cycle().take(n).collect()
    }

    /// Cuts a proposal off where it does not fit any more. One that cannot be judged is none.
    fn cut(&mut self, session: SessionKey, assumed: &[u32], proposal: &mut Vec<u32>) {
        let (Some(index), Some((guide, prompt_len))) =
            (self.sessions.get(&session), self.guides.get_mut(&session))
        else {
            return;
        };
        if proposal.is_empty() {
            return;
        }
        let output = index.tokens().get(*prompt_len..).unwrap_or_default();
        let n_fitting = guide.n_fitting(&[output, assumed].concat(), proposal);
        proposal.truncate(n_fitting.unwrap_or(0));
    }
}

impl Drafter for NgramDrafter {
    fn open(&mut self, session: SessionKey, prompt: &[u32]) {
        self.close(session);
        let mut index = NgramIndex::default();
        prompt.iter().for_each(|token| index.push(*token));
        self.sessions.insert(session, index);
    }

    fn guide(&mut self, session: SessionKey, guide: Guide) {
        if let Some(index) = self.sessions.get(&session) {
            self.guides.insert(session, (guide, index.tokens().len()));
        }
    }

    fn accept(&mut self, session: SessionKey, tokens: &[u32]) {
        if let Some(index) = self.sessions.get_mut(&session) {
            tokens.iter().for_each(|token| index.push(*token));
        }
    }

    fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Vec<u32>>, DraftError> {
        let propose = |request: &DraftRequest<'_>| {
            let DraftRequest { session, assumed, n, .. } = *request;
            let mut proposal = self.propose(session, assumed, n);
            self.cut(session, assumed, &mut proposal);
            proposal
        };
        Ok(requests.iter().map(propose).collect())
    }

    fn close(&mut self, session: SessionKey) {
        self.sessions.remove(&session);
        self.guides.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SamplingParams;

    fn draft(drafter: &mut NgramDrafter, session: u64, n: usize) -> Vec<u32> {
        draft_after(drafter, session, &[], n)
    }

    fn draft_after(
        drafter: &mut NgramDrafter,
        session: u64,
        assumed: &[u32],
        n: usize,
    ) -> Vec<u32> {
        let params = SamplingParams::default();
        let request = DraftRequest { session: SessionKey(session), assumed, n, params: &params };
        drafter.draft(&[request]).unwrap().remove(0)
    }

    #[test]
    fn nothing_is_proposed_without_a_match() {
        let mut drafter = NgramDrafter::new(2);
        assert!(draft(&mut drafter, 1, 4).is_empty(), "unknown session");
        for prompt in [&[][..], &[5], &[5, 6], &[5, 6, 5]] {
            drafter.open(SessionKey(1), prompt);
            assert!(draft(&mut drafter, 1, 4).is_empty(), "{prompt:?}");
        }
        drafter.open(SessionKey(1), &[1, 2, 3, 1, 2]);
        assert!(draft(&mut drafter, 1, 0).is_empty());
    }

    #[test]
    fn sessions_keep_apart_and_open_replaces() {
        let mut drafter = NgramDrafter::new(2);
        let (a, b) = (SessionKey(1), SessionKey(2));
        drafter.open(a, &[1, 2, 3, 4, 5]);
        drafter.open(b, &[1, 2, 9, 9]);
        drafter.accept(a, &[1, 2]);
        drafter.accept(b, &[1, 2]);
        let params = SamplingParams::default();
        let requests = [(b, 1), (a, 2)].map(|(session, n)| DraftRequest {
            session,
            assumed: &[],
            n,
            params: &params,
        });
        assert_eq!(drafter.draft(&requests).unwrap(), [vec![9], vec![3, 4]]);
        drafter.open(a, &[7, 8]);
        assert!(draft(&mut drafter, 1, 4).is_empty(), "the text of before is gone");
        drafter.close(b);
        drafter.accept(b, &[1, 2]);
        assert!(draft(&mut drafter, 2, 4).is_empty());
    }

    #[test]
    fn what_is_assumed_is_looked_up_too_and_then_forgotten() {
        let mut drafter = NgramDrafter::new(2);
        drafter.open(SessionKey(1), &[1, 2, 3, 4, 5, 6, 1, 2]);
        assert_eq!(draft_after(&mut drafter, 1, &[3, 4], 2), [5, 6]);
        assert_eq!(draft_after(&mut drafter, 1, &[3, 4, 5, 6, 1, 2], 3), [3, 4, 5]);
        assert!(draft_after(&mut drafter, 1, &[9, 3], 2).is_empty(), "one token matches");
        assert_eq!(draft_after(&mut drafter, 1, &[9, 4, 5], 1), [6]);
        assert_eq!(draft(&mut drafter, 1, 2), [3, 4]);
    }

    #[test]
    fn a_repeating_text_goes_on_repeating() {
        let mut drafter = NgramDrafter::new(3);
        drafter.open(SessionKey(1), &[4, 1, 2, 3, 1, 2, 3, 1, 2]);
        assert_eq!(draft(&mut drafter, 1, 7), [3, 1, 2, 3, 1, 2, 3]);
        assert_eq!(draft_after(&mut drafter, 1, &[3, 1, 2, 3], 4), [1, 2, 3, 1]);
    }
}
