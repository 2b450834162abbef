//! What a session expects after its last token: drafted tokens, some of them under way, and which
//! of them stand.
//!
//! The rows of a chain are the session's last token and then the chain's tokens. Every row's
//! choice is the token at the next row's place, so the chain stands as far as the choices agree
//! with it, over the borders of the windows in which it was sent. The first choice that differs,
//! or that follows the whole chain, is the session's next last token (the bonus token), and a new
//! chain starts there. So every window whose predecessors agree yields at least one token, and
//! never a wrong one.

use std::collections::VecDeque;

/// The drafted tokens after a session's last token.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    tokens: VecDeque<u32>,
    /// Rows that were sent, the last token's among them.
    n_sent: usize,
    /// The drafter knew no more; it may after the next answer.
    is_dry: bool,
}

/// What the choices of a window meant for the chain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Choices that stand.
    pub n_standing: usize,
    /// Choices that agree with a drafted token.
    pub n_agreed: usize,
    /// Of these, tokens whose rows were sent.
    pub n_sent: usize,
    /// A choice differs: what was sent behind it is stale.
    pub differs: bool,
}

impl Chain {
    /// Drafted tokens that do not stand yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing is drafted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Drafted tokens that do not stand yet, oldest first.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.tokens.iter().copied()
    }

    /// Whether the last token's row is still to be sent.
    #[must_use]
    pub const fn starts(&self) -> bool {
        self.n_sent == 0
    }

    /// Rows that are still to be sent.
    #[must_use]
    pub fn n_unsent(&self) -> usize {
        (1 + self.tokens.len()).saturating_sub(self.n_sent)
    }

    /// Whether the drafter knew no more when it was asked last.
    #[must_use]
    pub const fn is_dry(&self) -> bool {
        self.is_dry
    }

    /// Appends drafted tokens; fewer than were `asked` for are all that the drafter knows.
    pub fn extend(&mut self, drafted: &[u32], asked: usize) {
        self.is_dry = drafted.len() < asked;
        self.tokens.extend(drafted);
    }

    /// The next rows to send, at most `n`, after the `last` token that stands; with the number of
    /// rows between that token's and the first of them.
    pub fn send(&mut self, last: u32, n: usize) -> (usize, Vec<u32>) {
        let first = self.n_sent;
        let rows = std::iter::once(last).chain(self.tokens());
        let tokens: Vec<u32> = rows.skip(first).take(n).collect();
        self.n_sent += tokens.len();
        (first, tokens)
    }

    /// Compares the choices of the oldest window under way with what follows its rows.
    pub fn judge(&mut self, chosen: impl Iterator<Item = u32>) -> Verdict {
        let mut verdict = Verdict::default();
        self.is_dry = false;
        for token in chosen {
            verdict.n_standing += 1;
            match self.tokens.pop_front() {
                Some(expected) if expected == token => {
                    verdict.n_agreed += 1;
                    self.n_sent = self.n_sent.saturating_sub(1);
                    verdict.n_sent += usize::from(self.n_sent > 0);
                }
                other => {
                    verdict.differs = other.is_some();
                    *self = Self::default();
                    break;
                }
            }
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(drafted: &[u32]) -> Chain {
        let mut chain = Chain::default();
        chain.extend(drafted, drafted.len());
        chain
    }

    fn judged(chain: &mut Chain, chosen: &[u32]) -> (usize, usize, usize, bool) {
        let Verdict { n_standing, n_agreed, n_sent, differs } = chain.judge(chosen.iter().copied());
        (n_standing, n_agreed, n_sent, differs)
    }

    #[test]
    fn windows_follow_each_other_and_agree_over_their_border() {
        let mut chain = chain(&[11, 12, 13, 14]);
        assert_eq!(chain.send(10, 2), (0, vec![10, 11]));
        assert_eq!(chain.send(10, 2), (2, vec![12, 13]));
        assert_eq!((chain.n_unsent(), chain.starts()), (1, false));
        assert_eq!(judged(&mut chain, &[11, 12]), (2, 2, 2, false));
        assert_eq!((chain.n_unsent(), chain.len()), (1, 2), "12 is the last token");
        // The token after the last row sent was drafted too: it need not be drafted again.
        assert_eq!(judged(&mut chain, &[13, 14]), (2, 2, 1, false));
        assert_eq!((chain.n_unsent(), chain.len(), chain.starts()), (1, 0, true));
        assert_eq!(chain.send(14, 5), (0, vec![14]));
        assert_eq!(judged(&mut chain, &[15]), (1, 0, 0, false));
        assert!(chain.starts());
    }

    #[test]
    fn the_first_difference_starts_a_new_chain() {
        for wrong in 0..4_u32 {
            let mut chain = chain(&[11, 12, 13, 14]);
            chain.send(10, 5);
            let chosen: Vec<u32> = (0..5).map(|i| if i == wrong { 99 } else { 11 + i }).collect();
            let n_agreed = wrong as usize;
            assert_eq!(judged(&mut chain, &chosen), (n_agreed + 1, n_agreed, n_agreed, true));
            assert_eq!((chain.len(), chain.n_unsent(), chain.starts()), (0, 1, true));
        }
    }

    #[test]
    fn a_drafter_that_knows_no_more_is_asked_again_after_an_answer() {
        let mut chain = Chain::default();
        chain.extend(&[11], 3);
        assert!(chain.is_dry());
        chain.send(10, 2);
        judged(&mut chain, &[11, 12]);
        assert!(!chain.is_dry());
    }
}
