//! Calls in the text of an answer, read as it comes.

use stagebus_shards::text::{TOOL_CALL_CLOSE, TOOL_CALL_OPEN};

use super::grammar::{AFTER_ARGUMENTS, BEFORE_ARGUMENTS, BEFORE_NAME, BETWEEN_CALLS};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// Text beside calls.
    Text(String),
    /// A call begins.
    Call {
        /// Name of the function.
        name: String,
    },
    /// More of the last call's arguments, which are JSON.
    Arguments(String),
}

/// Takes an answer apart. What may be the beginning of a tag is held back until it is known.
#[derive(Debug, Default)]
pub(super) struct CallReader {
    state: State,
    held: String,
    n_calls: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Beside calls.
    #[default]
    Text,
    /// Behind an opening tag, before the arguments.
    Name,
    /// Within the arguments.
    Arguments,
    /// Behind a call.
    Between,
}

impl CallReader {
    /// Takes the parts of a whole answer out.
    pub(super) fn whole(text: &str) -> (Self, Vec<Part>) {
        let mut reader = Self::default();
        let mut parts = reader.push(text);
        parts.extend(reader.finish());
        (reader, parts)
    }

    /// Whether there were calls, and the last one is complete.
    pub(super) fn ends_with_call(&self) -> bool {
        self.n_calls > 0 && self.state == State::Between
    }

    /// Takes new text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// What is still held back at the end. A call that is cut off before its arguments is none.
    pub(super) fn finish(&mut self) -> Option<Part> {
        let held = std::mem::take(&mut self.held);
        (self.state == State::Text && !held.is_empty()).then_some(Part::Text(held))
    }

    /// Goes on to the next state; false if that needs more text.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Text => self.until(TOOL_CALL_OPEN, State::Name, Part::Text, parts),
            State::Name => self.name(parts),
            State::Arguments => {
                let end = format!("{AFTER_ARGUMENTS}{TOOL_CALL_CLOSE}");
                self.until(&end, State::Between, Part::Arguments, parts)
            }
            State::Between => {
                let next = format!("{BETWEEN_CALLS}{TOOL_CALL_OPEN}");
                if self.held.starts_with(&next) {
                    self.held.drain(..next.len());
                    self.state = State::Name;
                    return true;
                }
                let is_open = next.starts_with(&self.held);
                if !is_open {
                    self.state = State::Text;
                }
                !is_open
            }
        }
    }

    /// Gives out the text before a mark.
    fn until(
        &mut self,
        mark: &str,
        then: State,
        part: impl Fn(String) -> Part,
        parts: &mut Vec<Part>,
    ) -> bool {
        let found = self.held.find(mark);
        let n_out = found.unwrap_or_else(|| {
            let n_open = (1..mark.len()).rev().find(|n| self.held.ends_with(&mark[..*n]));
            self.held.len() - n_open.unwrap_or(0)
        });
        if n_out > 0 {
            parts.push(part(self.held.drain(..n_out).collect()));
        }
        if found.is_some() {
            self.held.drain(..mark.len());
            self.state = then;
        }
        found.is_some()
    }

    /// Reads what stands between an opening tag and the arguments.
    fn name(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(rest) = self.held.strip_prefix(BEFORE_NAME) else {
            let may_become = BEFORE_NAME.starts_with(&self.held);
            return self.no_call(may_become, parts);
        };
        let Some((name, _)) = rest.split_once('"') else { return false };
        let after = &rest[name.len()..];
        if !after.starts_with(BEFORE_ARGUMENTS) {
            let may_become = BEFORE_ARGUMENTS.starts_with(after);
            return self.no_call(may_become, parts);
        }
        let n_read = BEFORE_NAME.len() + name.len() + BEFORE_ARGUMENTS.len();
        parts.push(Part::Call { name: name.to_owned() });
        self.held.drain(..n_read);
        self.n_calls += 1;
        self.state = State::Arguments;
        true
    }

    /// Takes what is no call, unless it may become one, for the text that it is.
    fn no_call(&mut self, may_become: bool, parts: &mut Vec<Part>) -> bool {
        if !may_become {
            parts.push(Part::Text(TOOL_CALL_OPEN.to_owned()));
            self.state = State::Text;
        }
        !may_become
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts with neighbours of one kind joined, and whether the answer ends with a call.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a str>) -> (Vec<Part>, bool) {
        let mut reader = CallReader::default();
        let mut joined: Vec<Part> = Vec::new();
        let mut take = |part: Part| match (joined.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more))
            | (Some(Part::Arguments(text)), Part::Arguments(more)) => text.push_str(&more),
            (_, part) => joined.push(part),
        };
        for piece in pieces {
            reader.push(piece).into_iter().for_each(&mut take);
        }
        reader.finish().into_iter().for_each(&mut take);
        (joined, reader.ends_with_call())
    }

    fn call(name: &str, arguments: &str) -> String {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn parts(name: &str, arguments: &str) -> [Part; 2] {
        [Part::Call { name: name.to_owned() }, Part::Arguments(arguments.to_owned())]
    }

    #[test]
    fn answers_are_taken_apart_wherever_their_pieces_end() {
        let nested = r#"{"a": {"b": "}</tool_call>\n}"}}"#;
        let two = format!("{}\n{}", call("f", "{}"), call("g", nested));
        let cases: [(String, Vec<Part>, bool); 9] = [
            (String::new(), vec![], false),
            ("caf\u{e9} <tool_cal".to_owned(), vec![text("caf\u{e9} <tool_cal")], false),
            (call("f", nested), parts("f", nested).to_vec(), true),
            (two.clone(), [parts("f", "{}"), parts("g", nested)].concat(), true),
            (
                format!("well\n{two}"),
                [vec![text("well\n")], parts("f", "{}").to_vec(), parts("g", nested).to_vec()]
                    .concat(),
                true,
            ),
            // Cut off in the arguments, and before them.
            (call("f", nested)[..50].to_owned(), parts("f", &nested[..50 - 39]).to_vec(), false),
            ("<tool_call>\n{\"name\": \"f".to_owned(), vec![], false),
            // What is no call is text.
            ("<tool_call>{}".to_owned(), vec![text("<tool_call>{}")], false),
            (
                format!("{}!", call("f", "{}")),
                [parts("f", "{}").to_vec(), vec![text("!")]].concat(),
                false,
            ),
        ];
        for (answer, expected, ends) in cases {
            assert_eq!(read([answer.as_str()]), (expected.clone(), ends), "{answer:?}");
            let characters: Vec<String> = answer.chars().map(String::from).collect();
            let one_by_one = read(characters.iter().map(String::as_str));
            assert_eq!(one_by_one, (expected.clone(), ends), "{answer:?} one by one");
            for at in (0..answer.len()).filter(|at| answer.is_char_boundary(*at)) {
                let (first, second) = answer.split_at(at);
                assert_eq!(read([first, second]), (expected.clone(), ends), "{first:?} {second:?}");
            }
            let (reader, whole) = CallReader::whole(&answer);
            assert_eq!((whole.is_empty(), reader.ends_with_call()), (expected.is_empty(), ends));
        }
    }

    #[test]
    fn arguments_come_as_soon_as_they_are_known() {
        let mut reader = CallReader::default();
        assert_eq!(reader.push("<tool_call>\n{\"name\": \"f\", \"argu"), []);
        assert_eq!(reader.push("ments\": {\"a"), parts("f", "{\"a"));
        assert_eq!(reader.push("\": 1}"), [Part::Arguments("\": 1".to_owned())]);
        assert_eq!(reader.push("}\n</tool_call>"), [Part::Arguments("}".to_owned())]);
        assert!(reader.ends_with_call());
        assert_eq!(reader.push("\n<tool"), []);
        assert_eq!(reader.finish(), None);
    }
}
