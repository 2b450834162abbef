//! What a line of a conversation means: something to say, or a command.

use std::path::PathBuf;

/// What starts a command.
const SLASH: char = '/';

/// The commands with what they do, for `/help`.
const COMMANDS: [(&str, &str); 6] = [
    ("/stats", "tokens, speed and acceptance of the last answer and of the conversation"),
    ("/reset", "forget the conversation; the system message stays"),
    ("/system TEXT", "the system message from now on; without TEXT there is none"),
    ("/save FILE", "write the conversation to a new file, as JSON messages"),
    ("/help", "this list"),
    ("//TEXT", "say /TEXT"),
];

/// One line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Nothing.
    Empty,
    /// The user says this.
    Say(String),
    /// Show tokens, speed and acceptance.
    Stats,
    /// Forget the conversation.
    Reset,
    /// Use this system message from now on.
    System(Option<String>),
    /// Write the conversation to a file.
    Save(PathBuf),
    /// List the commands.
    Help,
}

/// A command that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// There is no such command.
    #[error("there is no command /{name}; /help lists them, and //{name} says it to the model")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// A command lacks its argument.
    #[error("/{command} needs {needs}, as in /{command} {example}")]
    Needs {
        /// The command.
        command: &'static str,
        /// What it needs.
        needs: &'static str,
        /// For example.
        example: &'static str,
    },
    /// A command takes no argument.
    #[error("/{command} takes nothing after it, {found:?} was found")]
    Unexpected {
        /// The command.
        command: &'static str,
        /// What stands after it.
        found: String,
    },
}

impl Input {
    /// Reads a line.
    ///
    /// # Errors
    /// [`InputError`].
    pub fn read(line: &str) -> Result<Self, InputError> {
        let text = line.trim();
        let Some(command) = text.strip_prefix(SLASH) else {
            let said = || Self::Say(text.to_owned());
            return Ok(if text.is_empty() { Self::Empty } else { said() });
        };
        if command.starts_with(SLASH) {
            return Ok(Self::Say(command.to_owned()));
        }
        let (name, rest) = match command.split_once(char::is_whitespace) {
            Some((name, rest)) => (name, rest.trim_start()),
            None => (command, ""),
        };
        match name {
            "stats" => alone("stats", rest, Self::Stats),
            "reset" => alone("reset", rest, Self::Reset),
            "help" => alone("help", rest, Self::Help),
            "system" => Ok(Self::System(Some(rest.to_owned()).filter(|text| !text.is_empty()))),
            "save" if rest.is_empty() => {
                let (needs, example) = ("the name of a file", "chat.json");
                Err(InputError::Needs { command: "save", needs, example })
            }
            "save" => Ok(Self::Save(rest.into())),
            name => Err(InputError::Unknown { name: name.to_owned() }),
        }
    }
}

fn alone(command: &'static str, rest: &str, input: Input) -> Result<Input, InputError> {
    if rest.is_empty() {
        return Ok(input);
    }
    Err(InputError::Unexpected { command, found: rest.to_owned() })
}

/// The list of commands, one a line.
#[must_use]
pub fn help() -> String {
    COMMANDS.iter().map(|(command, does)| format!("  {command:<14}{does}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(text: &str) -> Result<Input, InputError> {
        Ok(Input::Say(text.to_owned()))
    }

    #[test]
    fn lines_are_said_and_commands_are_not() {
        assert_eq!(Input::read("  \t"), Ok(Input::Empty));
        assert_eq!(Input::read(" How far is it? \r"), say("How far is it?"));
        assert_eq!(Input::read("1/2 of it"), say("1/2 of it"));
        assert_eq!(Input::read("//etc is a folder"), say("/etc is a folder"));
        assert_eq!(Input::read("/reset"), Ok(Input::Reset));
        assert_eq!(Input::read("/stats "), Ok(Input::Stats));
        assert_eq!(Input::read("/save  my chat.json"), Ok(Input::Save("my chat.json".into())));
        assert_eq!(Input::read("/system Be brief."), Ok(Input::System(Some("Be brief.".into()))));
        assert_eq!(Input::read("/system"), Ok(Input::System(None)));
    }

    #[test]
    fn a_wrong_command_is_not_said() {
        let name = "stat".to_owned();
        assert_eq!(Input::read("/stat"), Err(InputError::Unknown { name }));
        assert!(matches!(Input::read("/save"), Err(InputError::Needs { command: "save", .. })));
        let unexpected = Input::read("/reset all");
        assert!(matches!(unexpected, Err(InputError::Unexpected { command: "reset", .. })));
        assert!(matches!(Input::read("/"), Err(InputError::Unknown { .. })));
    }

    #[test]
    fn the_list_has_every_command() {
        let help = help();
        for command in ["stats", "reset", "system", "save", "help"] {
            assert!(help.contains(&format!("  /{command}")), "{help}");
            let known = Input::read(&format!("/{command} x"));
            assert!(!matches!(known, Err(InputError::Unknown { .. })), "{command}");
        }
    }
}
