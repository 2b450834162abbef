//! The forms of stage graphs: open shapes with the caches inside, or fixed shapes with the caches
//! outside.

use serde::{Deserialize, Serialize};

/// Most rows of a static graph: its masks and outputs are made for all of them at every call.
const MAX_ROWS: usize = 512;

/// Most cached positions of a static graph, over all slots.
const MAX_CACHED: usize = 1 << 17;

/// How the graphs of a shard set take rows and keep caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Any number of rows; the caches are states of the graph.
    #[default]
    Stateful,
    /// Fixed shapes and no state, as NPUs take them.
    Static(StaticForm),
}

/// The shapes of a static graph.
///
/// The caches are inputs and outputs: the caller keeps them. They have `slots * window` columns,
/// and position `p` of the session in slot `s` is in column `s * window + p`. One call takes rows
/// of any of these sessions; which columns each row sees is up to the mask that comes with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticForm {
    /// Positions of a slot: the longest session, in tokens.
    pub window: usize,
    /// Rows of a call.
    pub rows: usize,
    /// Sessions that share a call.
    pub slots: usize,
}

/// A form that cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// A number outside its range.
    #[error("the static form has {key} {found}, expected 1 to {most}")]
    Range {
        /// Which number.
        key: &'static str,
        /// Its value.
        found: usize,
        /// The greatest value.
        most: usize,
    },
    /// The windows of all slots together are too long.
    #[error("{slots} slots of {window} positions are more than {MAX_CACHED} positions")]
    Cached {
        /// Slots.
        slots: usize,
        /// Positions of each.
        window: usize,
    },
}

impl Default for StaticForm {
    fn default() -> Self {
        Self { window: 1024, rows: 16, slots: 4 }
    }
}

impl StaticForm {
    /// Columns of the caches.
    #[must_use]
    pub fn n_cached(self) -> usize {
        self.slots * self.window
    }

    /// Columns of the mask: those of the caches, then the rows of the call.
    #[must_use]
    pub fn n_columns(self) -> usize {
        self.n_cached() + self.rows
    }

    /// The form for a model of this context length: a longer window would stay empty.
    ///
    /// # Errors
    /// [`FormError`].
    pub(crate) fn fitted(self, context_length: usize) -> Result<Self, FormError> {
        let fitted = Self { window: self.window.min(context_length), ..self };
        fitted.check()?;
        Ok(fitted)
    }

    /// Checks the ranges of all numbers.
    ///
    /// # Errors
    /// [`FormError`].
    pub(crate) fn check(self) -> Result<(), FormError> {
        let Self { window, rows, slots } = self;
        let ranges = [
            ("window", window, MAX_CACHED),
            ("rows", rows, MAX_ROWS),
            ("slots", slots, MAX_CACHED),
        ];
        for (key, found, most) in ranges {
            if !(1..=most).contains(&found) {
                return Err(FormError::Range { key, found, most });
            }
        }
        match window.saturating_mul(slots) {
            n_cached if n_cached > MAX_CACHED => Err(FormError::Cached { slots, window }),
            _ => Ok(()),
        }
    }
}

impl Form {
    /// Whether the caches are states of the graph.
    #[must_use]
    pub fn is_stateful(&self) -> bool {
        *self == Self::Stateful
    }

    /// The name used on the command line and in messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stateful => "stateful",
            Self::Static(_) => "static",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_stored_by_name() {
        let form = Form::Static(StaticForm { window: 512, rows: 8, slots: 2 });
        let json = r#"{"static":{"window":512,"rows":8,"slots":2}}"#;
        assert_eq!(serde_json::to_string(&form).unwrap(), json);
        assert_eq!(serde_json::from_str::<Form>(json).unwrap(), form);
        assert_eq!(serde_json::to_string(&Form::Stateful).unwrap(), r#""stateful""#);
        let more = json.replace("\"slots\":2", "\"slots\":2,\"banks\":1");
        assert!(serde_json::from_str::<Form>(&more).is_err());
    }

    #[test]
    fn numbers_that_fit_no_graph_are_named() {
        let form = StaticForm::default();
        assert_eq!(form.check(), Ok(()));
        assert_eq!((form.n_cached(), form.n_columns()), (4096, 4112));
        let range = |key, found, most| Err(FormError::Range { key, found, most });
        assert_eq!(StaticForm { rows: 0, ..form }.check(), range("rows", 0, MAX_ROWS));
        assert_eq!(StaticForm { rows: 513, ..form }.check(), range("rows", 513, MAX_ROWS));
        assert_eq!(StaticForm { window: 0, ..form }.check(), range("window", 0, MAX_CACHED));
        let most = usize::MAX;
        assert_eq!(StaticForm { slots: most, ..form }.check(), range("slots", most, MAX_CACHED));
        let wide = StaticForm { slots: 129, ..form };
        assert_eq!(wide.check(), Err(FormError::Cached { slots: 129, window: 1024 }));
    }

    #[test]
    fn a_window_is_no_longer_than_the_models_context() {
        let form = StaticForm::default();
        assert_eq!(form.fitted(8192), Ok(form));
        assert_eq!(form.fitted(100), Ok(StaticForm { window: 100, ..form }));
        let longer = StaticForm { window: usize::MAX, ..form };
        assert_eq!(longer.fitted(100), Ok(StaticForm { window: 100, ..form }));
    }
}
