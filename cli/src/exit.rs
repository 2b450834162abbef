//! How the program ends: exit codes, and errors printed with everything that caused them.

use std::io::Write as _;
use std::process::ExitCode;

use stagebus_coordinator::CoordinatorError;
use stagebus_fleet::FleetError;
use stagebus_gateway::GatewayError;
use stagebus_worker::WorkerError;

/// What a command that ran to its end says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 0.
    Good,
    /// Exit code 1 without a further message: the command has printed what is wrong.
    Bad,
}

/// Exit code of a failure.
pub const FAILURE: u8 = 1;

/// Exit code of a command line that cannot be understood; the same as `clap`'s.
pub const USAGE: u8 = 2;

/// Exit code of a worker, coordinator or gateway whose orderly end took too long.
pub const CUT_OFF: u8 = 3;

/// Exit code when the broker refuses us, or the connection would not be safe.
pub const ACCESS_REFUSED: u8 = 4;

/// A command line whose parts do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    /// Two options exclude each other.
    #[error("{left} and {right} cannot be used together: {reason}")]
    Conflict {
        /// First option.
        left: String,
        /// Second option.
        right: String,
        /// Why.
        reason: String,
    },
    /// An option needs another one.
    #[error("{option} needs {needs}")]
    Needs {
        /// The option given.
        option: &'static str,
        /// What is missing.
        needs: &'static str,
    },
}

/// Turns the result of a command into an exit code; an error goes to standard error with its
/// causes.
#[must_use]
pub fn finish(result: &anyhow::Result<Outcome>) -> ExitCode {
    match result {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Bad) => ExitCode::from(FAILURE),
        Err(error) => {
            let text = render(error);
            // Without standard error there is nobody left to tell.
            drop(std::io::stderr().lock().write_all(text.as_bytes()));
            ExitCode::from(code(error))
        }
    }
}

fn code(error: &anyhow::Error) -> u8 {
    let cut_off = matches!(error.downcast_ref(), Some(WorkerError::ShutdownDeadline { .. }))
        || matches!(error.downcast_ref(), Some(CoordinatorError::DrainDeadline { .. }))
        || matches!(error.downcast_ref(), Some(GatewayError::DrainDeadline { .. }));
    if cut_off {
        return CUT_OFF;
    }
    let refused = error.downcast_ref().is_some_and(WorkerError::is_access_refusal)
        || error.downcast_ref().is_some_and(CoordinatorError::is_access_refusal)
        || error.downcast_ref().is_some_and(GatewayError::is_access_refusal)
        || matches!(error.downcast_ref(), Some(FleetError::Insecure { .. }))
        || stagebus_bus::is_access_refusal(error.as_ref());
    if refused {
        return ACCESS_REFUSED;
    }
    if error.is::<UsageError>() { USAGE } else { FAILURE }
}

/// One line for the error, one for each cause that says something new.
#[must_use]
pub fn render(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}\n");
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let line = cause.to_string();
        if !last.ends_with(&line) {
            text.push_str("  caused by: ");
            text.push_str(&line);
            text.push('\n');
        }
        last = line;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn every_cause_has_a_line_and_none_is_repeated() {
        let error = Err::<(), _>(std::io::Error::other("disk full"))
            .context("cannot write a: disk full")
            .context("cannot shard")
            .expect_err("an error");
        assert_eq!(render(&error), "error: cannot shard\n  caused by: cannot write a: disk full\n");
    }

    #[test]
    fn usage_errors_have_their_own_code_through_any_context() {
        let usage = anyhow::Error::new(UsageError::Needs { option: "--a", needs: "--b" });
        assert_eq!(code(&usage.context("cannot start")), USAGE);
        assert_eq!(code(&anyhow::anyhow!("other")), FAILURE);
        let late = anyhow::Error::from(WorkerError::ShutdownDeadline { deadline_ms: 5 });
        assert_eq!(code(&late), CUT_OFF);
        let refused = WorkerError::from(stagebus_bus::Violation {
            operation: stagebus_bus::Operation::Subscribe,
            subject: "a".to_owned(),
        });
        assert_eq!(code(&anyhow::Error::from(refused).context("stage 1")), ACCESS_REFUSED);
        assert_eq!(code(&CoordinatorError::AuthRefused.into()), ACCESS_REFUSED);
        assert_eq!(code(&GatewayError::AuthRefused.into()), ACCESS_REFUSED);
        let late = GatewayError::DrainDeadline { n_connections: 1 };
        assert_eq!(code(&late.into()), CUT_OFF);
    }
}
