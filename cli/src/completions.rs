//! `stagebus completions`: scripts that make shells complete the command line.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::command::Cli;
use crate::console;
use crate::exit::Outcome;

/// Arguments of `stagebus completions`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus completions bash > ~/.local/share/bash-completion/completions/stagebus
  stagebus completions zsh > ~/.zfunc/_stagebus
  stagebus completions fish > ~/.config/fish/completions/stagebus.fish
  stagebus completions powershell >> $PROFILE")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Runs the command.
///
/// # Errors
/// Standard output that cannot be written.
pub fn run(args: &CompletionsArgs) -> anyhow::Result<Outcome> {
    console::print(&script(args.shell))?;
    Ok(Outcome::Good)
}

/// The script for a shell.
#[must_use]
pub fn script(shell: Shell) -> String {
    let mut command = Cli::command();
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
