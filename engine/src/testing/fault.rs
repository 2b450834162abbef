//! Faults that a test backend plays on purpose.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A fault and when it strikes: opens of new sessions and steps that pass the checks are counted
/// from 0 over the life of the backend.
///
/// **Text form** (command line): `fail-open@N`, `fail@N`, `panic@N`, `corrupt@N`, and
/// `hang@N:SECONDS`, where `N` is the step or open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Opening a session fails.
    FailAtOpen {
        /// The open.
        open: u64,
    },
    /// A step fails as a runtime would, and its session is closed.
    FailAtStep {
        /// The step.
        step: u64,
    },
    /// A step blocks the inference thread before it runs.
    HangAtStep {
        /// The step.
        step: u64,
        /// For how long; it then runs as if nothing had happened.
        hold: Duration,
    },
    /// A step panics on the inference thread.
    PanicAtStep {
        /// The step.
        step: u64,
    },
    /// A step gives a wrong result: one number of its output is another one.
    CorruptAtStep {
        /// The step.
        step: u64,
    },
}

/// The error inside a failed step or open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("fault {0} was asked for")]
pub struct InjectedFault(pub Fault);

/// Text that is no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no fault: use fail-open@N, fail@N, panic@N, corrupt@N or hang@N:SECONDS, \
     with N counted from 0"
)]
pub struct FaultParseError {
    /// The text.
    pub text: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FailAtOpen { open } => write!(f, "fail-open@{open}"),
            Self::FailAtStep { step } => write!(f, "fail@{step}"),
            Self::HangAtStep { step, hold } => write!(f, "hang@{step}:{}", hold.as_secs_f64()),
            Self::PanicAtStep { step } => write!(f, "panic@{step}"),
            Self::CorruptAtStep { step } => write!(f, "corrupt@{step}"),
        }
    }
}

impl FromStr for Fault {
    type Err = FaultParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| FaultParseError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<Fault> {
    let (kind, when) = text.split_once('@')?;
    if kind == "hang" {
        let (step, seconds) = when.split_once(':')?;
        let hold = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        return Some(Fault::HangAtStep { step: step.parse().ok()?, hold });
    }
    let when = when.parse().ok()?;
    match kind {
        "fail-open" => Some(Fault::FailAtOpen { open: when }),
        "fail" => Some(Fault::FailAtStep { step: when }),
        "panic" => Some(Fault::PanicAtStep { step: when }),
        "corrupt" => Some(Fault::CorruptAtStep { step: when }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_value_agree() {
        for text in ["fail-open@0", "fail@7", "hang@3:0.25", "panic@1", "corrupt@9"] {
            let fault: Fault = text.parse().unwrap();
            assert_eq!(fault.to_string(), text);
        }
        for text in ["", "fail", "fail@", "fail@-1", "hang@3", "hang@3:-1", "hang@3:x", "stop@1"] {
            assert!(text.parse::<Fault>().is_err(), "{text:?}");
        }
    }
}
