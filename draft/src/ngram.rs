//! Prompt look-up: proposes what followed the longest suffix of the text that stood before.
//!
//! A suffix automaton of prompt and output is extended token by token in amortised constant time.
//! The suffix link of its last state is, by construction, the longest suffix that occurs elsewhere;
//! each state remembers where it was seen last, so a look-up reads the continuation there and
//! scans nothing. Tokens that may follow the text are looked up by walking the automaton on with
//! them, which changes nothing in it.
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

/// An earlier occurrence of a suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    /// Length of the suffix that matched, in tokens.
    pub len: usize,
    /// Where the tokens stand that followed it; the end of the text if it ends there.
    pub end: usize,
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

    /// Looks up the longest suffix of the text that stood before, with `after` behind the text: one
    /// that stood in the text itself.
    ///
    /// `None` if no suffix of at least `min_len` tokens stood before.
    #[must_use]
    pub fn lookup_after(&self, after: &[u32], min_len: usize) -> Option<Match> {
        let found = match after.is_empty() {
            true => self.found.map(|(len, end)| Match { len, end }),
            false => self.walk(after),
        };
        found.filter(|found| found.len >= min_len.max(1))
    }

    /// Reads `after` from the state of the whole text on, along suffix links where a token does
    /// not follow.
    fn walk(&self, after: &[u32]) -> Option<Match> {
        let (mut state, mut len) = (self.last, self.states[self.last].len);
        for token in after {
            loop {
                if let Some(next) = self.target(state, *token) {
                    (state, len) = (next, len + 1);
                    break;
                }
                let Some(link) = self.states[state].link else {
                    len = 0;
                    break;
                };
                (state, len) = (link, self.states[link].len);
            }
        }
        (len > 0).then(|| Match { len, end: self.states[state].end })
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
        for text in [&[][..], &[5], &[5, 6]] {
            assert_eq!(index(text).lookup_after(&[], 1), None);
            assert_eq!(index(text).lookup_after(&[7], 1), None);
        }
    }

    #[test]
    fn the_continuation_of_the_latest_place_is_proposed() {
        let index = index(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2]);
        assert_eq!(index.lookup_after(&[], 2), Some(Match { len: 2, end: 6 }));
        assert_eq!(index.lookup_after(&[], 3), None, "no suffix of three tokens stood before");
    }

    #[test]
    fn a_repeated_token_continues_itself() {
        let index = index(&[7, 7, 7, 7]);
        assert_eq!(index.lookup_after(&[], 1), Some(Match { len: 3, end: 3 }));
    }

    proptest! {
        #[test]
        fn the_match_is_the_longest_and_real(tokens in prop::collection::vec(0_u32..4, 0..120)) {
            let index = index(&tokens);
            let len = longest_by_scan(&tokens);
            match index.lookup_after(&[], 1) {
                None => prop_assert_eq!(len, 0),
                Some(found) => {
                    prop_assert_eq!(found.len, len);
                    prop_assert!(found.end < tokens.len());
                    prop_assert_eq!(&tokens[found.end - len..found.end], &tokens[tokens.len() - len..]);
                }
            }
        }

        #[test]
        fn the_match_after_further_tokens_is_the_longest_in_the_text(
            tokens in prop::collection::vec(0_u32..4, 0..80),
            after in prop::collection::vec(0_u32..5, 1..20),
        ) {
            let whole = [&tokens[..], &after].concat();
            let stands = |len: &usize| tokens.windows(*len).any(|w| *w == whole[whole.len() - len..]);
            let len = (1..=tokens.len()).rev().find(stands).unwrap_or(0);
            match index(&tokens).lookup_after(&after, 1) {
                None => prop_assert_eq!(len, 0),
                Some(found) => {
                    prop_assert_eq!(found.len, len);
                    prop_assert_eq!(&tokens[found.end - len..found.end], &whole[whole.len() - len..]);
                }
            }
        }
    }
}
