//! What the broker's permissions forbid, and who waits to hear of it.
//!
//! The broker does not answer a forbidden publish or subscription: the operation seems to succeed,
//! and a line of text comes over the connection a moment later. Whoever waits for an answer
//! therefore also waits for such a line about its own subjects ([`Refusals`]); a request would
//! otherwise time out and a subscription hear nothing for ever.

use std::fmt;

use stagebus_schemas::subjects::Subjects;

use crate::events::{BusEvent, BusEvents};

/// How the text of the broker's refusal begins.
const PREFIX: &str = "permissions violation for ";

/// What was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Sending on a subject.
    Publish,
    /// Listening on a subject.
    Subscribe,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Publish => "publish",
            Self::Subscribe => "subscribe",
        })
    }
}

/// The broker's permissions forbid something to the credentials of this connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the broker does not let these credentials {operation} on {subject}; use the key of the right \
     role and model, see docs/security.md"
)]
pub struct Violation {
    /// What was refused.
    pub operation: Operation,
    /// The subject.
    pub subject: String,
}

impl Violation {
    /// Whether the holder of the connection cannot do its work without what was refused. An answer
    /// to a subject that somebody else chose is not of that kind.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        self.operation == Operation::Subscribe
            || self.subject.starts_with('$')
            || Subjects::of(&self.subject).is_ok()
    }

    /// Reads the broker's line, which is the protocol's only distinction: `Permissions Violation
    /// for Publish to "a.b"`, `Permissions Violation for Subscription to "a.b" using queue "q"`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let rest = text.get(..PREFIX.len()).filter(|start| start.eq_ignore_ascii_case(PREFIX));
        let rest = &text[rest?.len()..];
        let operation = match rest.get(..7)?.to_ascii_lowercase().as_str() {
            "publish" => Operation::Publish,
            "subscri" => Operation::Subscribe,
            _ => return None,
        };
        let subject = rest.split('"').nth(1).unwrap_or("a subject that it does not name");
        Some(Self { operation, subject: subject.to_owned() })
    }
}

/// Hears of refusals from the moment it is made: make it before the operation.
#[derive(Debug)]
pub(crate) struct Refusals {
    events: BusEvents,
}

impl Refusals {
    pub(crate) fn new(events: BusEvents) -> Self {
        Self { events }
    }

    /// Waits for a refusal that `concerns` the caller; for ever if there is none.
    ///
    /// # Cancel safety
    /// No refusal is lost when the future is dropped.
    pub(crate) async fn of(&mut self, concerns: impl Fn(&Violation) -> bool) -> Violation {
        loop {
            match self.events.next().await {
                Some(BusEvent::PermissionViolation(violation)) if concerns(&violation) => {
                    return violation;
                }
                Some(_) => {}
                None => return std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_brokers_lines_are_read() {
        let cases = [
            ("Permissions Violation for Publish to \"a.b\"", Operation::Publish, "a.b"),
            ("permissions violation for publish to \"a\"", Operation::Publish, "a"),
            (
                "Permissions Violation for Subscription to \"a.>\" using queue \"q\"",
                Operation::Subscribe,
                "a.>",
            ),
            ("Permissions Violation for Publish with Reply of \"r\"", Operation::Publish, "r"),
        ];
        for (text, operation, subject) in cases {
            let subject = subject.to_owned();
            assert_eq!(Violation::parse(text), Some(Violation { operation, subject }), "{text}");
        }
        for text in ["", "Permissions Violation", "Permissions Violation for é", "Stale Connection"]
        {
            assert_eq!(Violation::parse(text), None, "{text}");
        }
    }
}
