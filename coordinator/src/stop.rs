//! Stop strings, matched across token boundaries.
//!
//! The matcher ends the text at the stop string that is complete first; of several that are
//! complete at the same character, the longest counts. Until then it passes on everything except
//! the longest end of the text that may still become a stop string. Text that is a stop string's
//! beginning is thus never emitted before the next piece shows that it is none, so the emitted
//! text does not depend on how the text was cut into pieces.

/// Finds stop strings in a text that arrives in pieces.
#[derive(Debug, Clone)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Matched {
    /// Text that became final.
    pub(crate) text: String,
    /// Whether a stop string is complete; it and everything after it is dropped.
    pub(crate) stopped: bool,
}

impl StopMatcher {
    /// Makes a matcher; empty stop strings are ignored.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new() }
    }

    /// Takes the next piece.
    pub(crate) fn push(&mut self, piece: &str) -> Matched {
        if self.stops.is_empty() {
            return Matched { text: piece.to_owned(), stopped: false };
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some(start) = self.first_match(&text) {
            text.truncate(start);
            return Matched { text, stopped: true };
        }
        self.held = text.split_off(self.hold_from(&text));
        Matched { text, stopped: false }
    }

    /// Gives back the held text at the end of the generation.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Start of the stop string that ends first; the earliest start if several end there.
    fn first_match(&self, text: &str) -> Option<usize> {
        self.stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)))
            .min()
            .map(|(_, start)| start)
    }

    /// Where the longest end of `text` starts that is the beginning of a stop string.
    fn hold_from(&self, text: &str) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = text.len().saturating_sub(longest.saturating_sub(1));
        (earliest..text.len())
            .filter(|start| text.is_char_boundary(*start))
            .find(|start| self.stops.iter().any(|stop| stop.starts_with(&text[*start..])))
            .unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut out = String::new();
        for piece in pieces {
            let matched = matcher.push(piece);
            out.push_str(&matched.text);
            if matched.stopped {
                return (out, true);
            }
        }
        out.push_str(&matcher.finish());
        (out, false)
    }

    #[test]
    fn a_stop_string_across_pieces_ends_the_text_before_it() {
        assert_eq!(run(&["END"], ["one E", "N", "D two"]), ("one ".to_owned(), true));
        assert_eq!(run(&["END"], ["one E", "N", "d two"]), ("one ENd two".to_owned(), false));
        assert_eq!(run(&["aab"], ["a", "a", "a", "b"]), ("a".to_owned(), true));
    }

    #[test]
    fn the_stop_string_that_is_complete_first_counts() {
        assert_eq!(run(&["abcd", "bc"], ["abcd"]), ("a".to_owned(), true));
        assert_eq!(run(&["c", "abc"], ["xabc"]), ("x".to_owned(), true));
    }

    #[test]
    fn text_is_held_only_while_it_may_become_a_stop_string() {
        let mut matcher = StopMatcher::new(vec!["</s>".to_owned()]);
        assert_eq!(matcher.push("a<"), Matched { text: "a".to_owned(), stopped: false });
        assert_eq!(matcher.push("b"), Matched { text: "<b".to_owned(), stopped: false });
        assert_eq!(matcher.push("x</s"), Matched { text: "x".to_owned(), stopped: false });
        assert_eq!(matcher.finish(), "</s");
    }

    proptest! {
        #[test]
        fn every_split_gives_the_text_of_the_whole(
            text in "[abé]{0,24}",
            stops in proptest::collection::vec("[abé]{1,4}", 0..4),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = run(&stops, [text.as_str()]);
            let mut at: Vec<usize> = cuts
                .iter()
                .map(|cut| cut.index(text.len() + 1))
                .filter(|cut| text.is_char_boundary(*cut))
                .collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces = at.windows(2).map(|pair| &text[pair[0]..pair[1]]);
            prop_assert_eq!(run(&stops, pieces), whole.clone());
            // Independent of the matcher: the text ends before the earliest complete stop string.
            let end = stops.iter().filter_map(|s| text.find(s).map(|at| at + s.len())).min();
            prop_assert_eq!(whole.1, end.is_some());
            prop_assert!(text.starts_with(&whole.0));
            prop_assert!(stops.iter().all(|stop| !whole.0.contains(stop)));
        }
    }
}
