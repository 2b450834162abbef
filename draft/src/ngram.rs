//! Prompt look-up: proposes what followed the longest suffix of the text that stood before.
//!
//! A suffix automaton of prompt and output is extended token by token in amortised constant time.
//! The suffix link of its last state is, by construction, the longest suffix that occurs elsewhere;
//! each state remembers where it was seen last, so a look-up reads the continuation there and
//! scans nothing.
//!
//! **Source**: Blumer et al., *The smallest automaton recognizing the subwords of a text*, 1985.

use std::collections::HashMap;

/// Suffix links followed to renew the last place of each suffix after a token; longer chains are
/// cut, since suffixes at the far end are the shortest and least useful.
const MAX_RENEWED: usize = 32;

const ROOT: usize = 0;

#[derive(Debug, Clone)]
struct State {
    /// Length of the longest text of this state, in tokens.
    len: usize,
    link: Option<usize>,
    /// End (exclusive) of the most recent known occurrence.
    end: usize,
    /// Transitions of the root are in [`NgramIndex::root`]: it has one per distinct token.
    next: Vec<(u32, usize)>,
}

/// What stood after an earlier occurrence of the current suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match<'a> {
    /// Length of the suffix that matched, in tokens.
    pub len: usize,
    /// The tokens that followed, oldest first.
    pub continuation: &'a [u32],
}

/// Index of one session's text.
#[derive(Debug, Clone)]
pub struct NgramIndex {
    tokens: Vec<u32>,
    states: Vec<State>,
    root: HashMap<u32, usize>,
    last: usize,
    found: Option<(usize, usize)>,
}

impl Default for NgramIndex {
    fn default() -> Self {
        let root = State { len: 0, link: None, end: 0, next: Vec::new() };
        Self {
            tokens: Vec::new(),
            states: vec![root],
            root: HashMap::new(),
            last: ROOT,
            found: None,
        }
    }
}

impl NgramIndex {
    /// The tokens so far.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Appends one token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let end = self.tokens.len();
        let current = self.add(self.states[self.last].len + 1, end, Vec::new());
        let mut at = Some(self.last);
        while let Some(state) = at {
            if self.target(state, token).is_some() {
                break;
            }
            self.set_target(state, token, current);
            at = self.states[state].link;
        }
        let link = match at {
            None => ROOT,
            Some(state) => self.link_for(state, token),
        };
        self.states[current].link = Some(link);
        self.last = current;
        let suffix = &self.states[link];
        self.found = (suffix.len > 0).then_some((suffix.len, suffix.end));
        self.renew(link, end);
    }

    /// Looks up the longest suffix that stood before and returns at most `n` tokens that followed.
    ///
    /// `None` if no suffix of at least `min_len` tokens stood before.
    #[must_use]
    pub fn lookup(&self, min_len: usize, n: usize) -> Option<Match<'_>> {
        let (len, end) = self.found.filter(|(len, _)| *len >= min_len.max(1))?;
        let until = (end + n).min(self.tokens.len());
        let continuation = self.tokens.get(end..until).filter(|c| !c.is_empty())?;
        Some(Match { len, continuation })
    }

    fn add(&mut self, len: usize, end: usize, next: Vec<(u32, usize)>) -> usize {
        self.states.push(State { len, link: None, end, next });
        self.states.len() - 1
    }

    /// Finds or makes the state of the longest text of `state` extended by `token`.
    fn link_for(&mut self, state: usize, token: u32) -> usize {
        let Some(target) = self.target(state, token) else { return ROOT };
        let len = self.states[state].len + 1;
        if self.states[target].len == len {
            return target;
        }
        let State { link, end, ref next, .. } = self.states[target];
        let next = next.clone();
        let clone = self.add(len, end, next);
        self.states[clone].link = link;
        self.states[target].link = Some(clone);
        let mut at = Some(state);
        while let Some(state) = at {
            if self.target(state, token) != Some(target) {
                break;
            }
            self.set_target(state, token, clone);
            at = self.states[state].link;
        }
        clone
    }

    /// Every suffix of the text ends at `end` too: its most recent occurrence is here.
    fn renew(&mut self, from: usize, end: usize) {
        let mut at = Some(from);
        for _ in 0..MAX_RENEWED {
            let Some(state) = at.filter(|state| *state != ROOT) else { return };
            self.states[state].end = end;
            at = self.states[state].link;
        }
    }

    fn target(&self, state: usize, token: u32) -> Option<usize> {
        if state == ROOT {
            return self.root.get(&token).copied();
        }
        let next = &self.states[state].next;
        next.iter().find(|(t, _)| *t == token).map(|(_, target)| *target)
    }

    fn set_target(&mut self, state: usize, token: u32, target: usize) {
        if state == ROOT {
            self.root.insert(token, target);
            return;
        }
        let next = &mut self.states[state].next;
        match next.iter_mut().find(|(t, _)| *t == token) {
            Some((_, old)) => *old = target,
            None => next.push((token, target)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn index(tokens: &[u32]) -> NgramIndex {
        let mut index = NgramIndex::default();
        tokens.iter().for_each(|token| index.push(*token));
        index
    }

    /// Longest suffix that also ends earlier, by trying all.
    fn longest_by_scan(tokens: &[u32]) -> usize {
        let n = tokens.len();
        (1..n)
            .rev()
            .find(|len| (*len..n).any(|end| tokens[end - len..end] == tokens[n - len..]))
            .unwrap_or(0)
    }

    #[test]
    fn an_empty_history_proposes_nothing() {
        assert_eq!(index(&[]).lookup(1, 4), None);
        assert_eq!(index(&[5]).lookup(1, 4), None);
        assert_eq!(index(&[5, 6]).lookup(1, 4), None);
    }

    #[test]
    fn the_continuation_of_the_latest_place_is_proposed() {
        let index = index(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2]);
        let found = index.lookup(2, 3).unwrap();
        assert_eq!(found, Match { len: 2, continuation: &[4, 8, 1] });
        assert_eq!(index.lookup(3, 3), None, "no suffix of three tokens stood before");
    }

    #[test]
    fn a_repeated_token_continues_itself() {
        let index = index(&[7, 7, 7, 7]);
        assert_eq!(index.lookup(1, 8).unwrap(), Match { len: 3, continuation: &[7] });
    }

    proptest! {
        #[test]
        fn the_match_is_the_longest_and_real(tokens in prop::collection::vec(0_u32..4, 0..120)) {
            let index = index(&tokens);
            let len = longest_by_scan(&tokens);
            match index.lookup(1, 5) {
                None => prop_assert_eq!(len, 0),
                Some(found) => {
                    prop_assert_eq!(found.len, len);
                    let (_, end) = index.found.unwrap();
                    prop_assert!(end < tokens.len());
                    prop_assert_eq!(&tokens[end - len..end], &tokens[tokens.len() - len..]);
                    prop_assert!(tokens[end..].starts_with(found.continuation));
                }
            }
        }
    }
}
