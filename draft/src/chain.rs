//! What a session expects after its last token: drafted tokens, some of them under way, and which
//! of them stand.
//!
//! The rows of a chain are the session's last token and then the chain's tokens. Every row's
//! choice is the token at the next row's place, so the chain stands as far as the choices agree
//! with it, over the borders of the windows in which it was sent. The first choice that differs,
//! or that follows the whole chain, is the session's next last token (the bonus token), and a new
//! chain starts there. So every window whose predecessors agree yields at least one token, and
//! never a wrong one.
//!
//! Where the drafter is unsure, an [`Alternative`] may travel beside the chain: another token for
//! one place, and how the text goes on after it. Its rows are sent behind the rows before that
//! place; the step that follows takes them back and goes on with the chain. So the caches hold the
//! chain, and if the alternative stands after all, its rows are sent once more, with the next
//! chain: that costs work, and no time on the way.

use std::collections::VecDeque;

/// The drafted tokens after a session's last token.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    tokens: VecDeque<u32>,
    /// Rows that were sent, the last token's among them.
    n_sent: usize,
    /// The drafter knew no more; it may after the next answer.
    is_dry: bool,
    /// Alternatives that are not sent, in order of their places.
    alternatives: VecDeque<Alternative>,
    /// Of each step under way, the tokens of its alternative; none if it has none.
    under_way: VecDeque<Vec<u32>>,
    /// Tokens before the last one that stand and whose rows the caches do not hold any more.
    n_again: usize,
}

/// Other tokens than those of the chain, from one place on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alternative {
    /// Place of the first one among the chain's tokens.
    pub at: usize,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
}

/// Rows of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Rows between the last token's and the first one of the step; below 0 if tokens before the last
    /// one are sent again.
    pub first: isize,
    /// Rows that only fill the caches.
    pub n_again: usize,
    /// Tokens of all rows.
    pub tokens: Vec<u32>,
    /// Of these, drafted ones.
    pub n_drafted: usize,
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

    /// First place of the chain at which an alternative can still be sent: the row before it is to
    /// be sent, too.
    #[must_use]
    pub const fn first_open(&self) -> usize {
        self.n_sent
    }

    /// Lets an alternative leave with the row before its place. Returns whether there is such a row,
    /// and none of another alternative's behind it.
    pub fn add(&mut self, alternative: Alternative) -> bool {
        let last = self.alternatives.back().map_or(self.n_sent, |last| last.at + 1);
        let fits = (last..self.tokens.len()).contains(&alternative.at);
        if fits && !alternative.tokens.is_empty() {
            self.alternatives.push_back(alternative);
            return true;
        }
        false
    }

    /// The next window to send: at most `n` rows of the last token and what is drafted after it, in
    /// one step or, around alternatives, in several. `text` is what stands, the last token included.
    pub fn send(&mut self, text: &[u32], n: usize) -> Vec<Piece> {
        let end = self.n_sent + n.min(self.n_unsent());
        let mut pieces = Vec::new();
        while self.n_sent < end {
            let leaves = self.alternatives.front().is_some_and(|next| next.at < end);
            let alternative = if leaves { self.alternatives.pop_front() } else { None };
            // Row `i` is the token at place `i - 1`, so these are the rows before the place.
            let until = alternative.as_ref().map_or(end, |next| next.at + 1);
            pieces.push(self.piece(text, until, alternative));
        }
        pieces
    }

    fn piece(&mut self, text: &[u32], until: usize, alternative: Option<Alternative>) -> Piece {
        let first = self.n_sent;
        self.n_sent = until;
        let n_again = std::mem::take(&mut self.n_again).min(text.len().saturating_sub(1));
        let standing =
            if first == 0 { &text[text.len().saturating_sub(n_again + 1)..] } else { &[] };
        let drafted = self.tokens.range(first.saturating_sub(1)..until.saturating_sub(1));
        let other = alternative.map_or_else(Vec::new, |alternative| alternative.tokens);
        let tokens: Vec<u32> = standing.iter().chain(drafted).chain(&other).copied().collect();
        self.under_way.push_back(other);
        Piece {
            first: first.cast_signed() - n_again.cast_signed(),
            n_again,
            n_drafted: tokens.len() - standing.len(),
            tokens,
        }
    }

    /// Compares the choices of the oldest step under way with what follows its rows.
    pub fn judge(&mut self, chosen: &[u32]) -> Verdict {
        let mut verdict = Verdict::default();
        self.is_dry = false;
        let other = self.under_way.pop_front().unwrap_or_default();
        let (chosen, after_other) = chosen.split_at(chosen.len().saturating_sub(other.len()));
        let n_rows = chosen.len();
        for token in chosen {
            verdict.n_standing += 1;
            match self.tokens.pop_front() {
                Some(expected) if expected == *token => {
                    verdict.n_agreed += 1;
                    self.n_sent = self.n_sent.saturating_sub(1);
                    verdict.n_sent += usize::from(self.n_sent > 0);
                    self.alternatives
                        .iter_mut()
                        .for_each(|next| next.at = next.at.saturating_sub(1));
                }
                expected => {
                    verdict.differs = expected.is_some();
                    *self = Self::default();
                    if verdict.n_standing == n_rows && other.first() == Some(token) {
                        self.n_again = 1 + agreeing(&other[1..], after_other);
                        verdict.n_standing += self.n_again;
                        verdict.n_sent += self.n_again;
                    }
                    break;
                }
            }
        }
        verdict
    }
}

/// How many of `tokens` are chosen, one after the other.
fn agreeing(tokens: &[u32], chosen: &[u32]) -> usize {
    tokens.iter().zip(chosen).take_while(|(token, chosen)| token == chosen).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(drafted: &[u32]) -> Chain {
        let mut chain = Chain::default();
        chain.extend(drafted, drafted.len());
        chain
    }

    fn sent(chain: &mut Chain, last: u32, n: usize) -> (isize, Vec<u32>) {
        let mut pieces = chain.send(&[7, last], n);
        let piece = pieces.pop().expect("a step");
        assert!(pieces.is_empty() && piece.n_again == 0);
        (piece.first, piece.tokens)
    }

    fn judged(chain: &mut Chain, chosen: &[u32]) -> (usize, usize, usize, bool) {
        let Verdict { n_standing, n_agreed, n_sent, differs } = chain.judge(chosen);
        (n_standing, n_agreed, n_sent, differs)
    }

    #[test]
    fn windows_follow_each_other_and_agree_over_their_border() {
        let mut chain = chain(&[11, 12, 13, 14]);
        assert_eq!(sent(&mut chain, 10, 2), (0, vec![10, 11]));
        assert_eq!(sent(&mut chain, 10, 2), (2, vec![12, 13]));
        assert_eq!((chain.n_unsent(), chain.starts()), (1, false));
        assert_eq!(judged(&mut chain, &[11, 12]), (2, 2, 2, false));
        assert_eq!((chain.n_unsent(), chain.len()), (1, 2), "12 is the last token");
        // The token after the last row sent was drafted too: it need not be drafted again.
        assert_eq!(judged(&mut chain, &[13, 14]), (2, 2, 1, false));
        assert_eq!((chain.n_unsent(), chain.len(), chain.starts()), (1, 0, true));
        assert_eq!(sent(&mut chain, 14, 5), (0, vec![14]));
        assert_eq!(judged(&mut chain, &[15]), (1, 0, 0, false));
        assert!(chain.starts());
    }

    #[test]
    fn the_first_difference_starts_a_new_chain() {
        for wrong in 0..4_u32 {
            let mut chain = chain(&[11, 12, 13, 14]);
            sent(&mut chain, 10, 5);
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
        sent(&mut chain, 10, 2);
        judged(&mut chain, &[11, 12]);
        assert!(!chain.is_dry());
    }

    fn other(at: usize, tokens: &[u32]) -> Alternative {
        Alternative { at, tokens: tokens.to_vec() }
    }

    /// 10 stands, 11 to 14 are drafted, and beside 12 and 13 other tokens.
    fn branched() -> (Chain, Vec<Piece>) {
        let mut chain = chain(&[11, 12, 13, 14]);
        assert!(chain.add(other(1, &[22, 23])));
        assert!(!chain.add(other(1, &[32])), "one for a place");
        assert!(chain.add(other(2, &[33])));
        assert!(!chain.add(other(4, &[44])), "the chain ends before");
        let pieces = chain.send(&[9, 10], 5);
        (chain, pieces)
    }

    #[test]
    fn alternatives_leave_behind_the_row_before_their_place() {
        let (chain, pieces) = branched();
        let rows: Vec<_> = pieces.iter().map(|piece| (piece.first, &piece.tokens[..])).collect();
        let expected = [(0, &[10, 11, 22, 23][..]), (2, &[12, 33]), (3, &[13, 14])];
        assert_eq!(rows, expected);
        let drafted: Vec<usize> = pieces.iter().map(|piece| piece.n_drafted).collect();
        assert_eq!((drafted, chain.n_unsent()), (vec![3, 2, 2], 0));
    }

    #[test]
    fn a_chain_that_stands_makes_nothing_of_its_alternatives() {
        let (mut chain, _) = branched();
        assert_eq!(judged(&mut chain, &[11, 12, 99, 99]), (2, 2, 2, false));
        assert_eq!(judged(&mut chain, &[13, 99]), (1, 1, 1, false));
        assert_eq!(judged(&mut chain, &[14, 15]), (2, 1, 1, false));
        assert_eq!((chain.starts(), chain.n_again), (true, 0));
    }

    #[test]
    fn an_alternative_that_stands_is_sent_again_with_the_next_chain() {
        for (after, n_again) in [([23, 24], 2), ([99, 24], 1)] {
            let (mut chain, _) = branched();
            let [first, second] = after;
            assert_eq!(
                judged(&mut chain, &[11, 22, first, second]),
                (2 + n_again, 1, 1 + n_again, true)
            );
            chain.extend(&[25], 1);
            let text = [&[9, 10, 11, 22][..], &after[..n_again]].concat();
            let piece = chain.send(&text, 2).pop().expect("a step");
            assert_eq!((piece.first, piece.n_again), (-n_again.cast_signed(), n_again));
            assert_eq!(piece.tokens, [&text[3..], &[25]].concat());
            assert_eq!(judged(&mut chain, &[25, 26]), (2, 1, 1, false));
        }
    }

    #[test]
    fn a_choice_before_the_place_or_another_one_ends_the_chain() {
        for (chosen, n) in [([99, 22, 23, 24], 1), ([11, 99, 23, 24], 2)] {
            let (mut chain, _) = branched();
            assert_eq!(judged(&mut chain, &chosen), (n, n - 1, n - 1, true));
            assert_eq!(chain.n_again, 0);
        }
    }

    #[test]
    fn the_place_of_an_alternative_moves_as_tokens_stand() {
        let mut chain = chain(&[11, 12, 13]);
        sent(&mut chain, 10, 1);
        assert!(!chain.add(other(0, &[21])), "the row before it has left");
        assert!(chain.add(other(1, &[22])));
        assert_eq!(judged(&mut chain, &[11]), (1, 1, 0, false));
        let pieces = chain.send(&[10, 11], 3);
        assert_eq!(pieces[0].tokens, [11, 22]);
        assert_eq!((pieces[1].first, &pieces[1].tokens[..]), (1, &[12, 13][..]));
    }
}
