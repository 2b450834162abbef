//! `stagebus chat`: a conversation, turn by turn.
//!
//! Each turn is an ordinary request on the public subject that holds the conversation so far; the
//! fleet keeps nothing between turns but its cached prefixes.

pub mod conversation;
pub mod input;
pub mod lines;

use std::cell::RefCell;
use std::io::IsTerminal as _;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_settings::process::{self, Signal};
use tokio_util::sync::CancellationToken;

use crate::ask::converse::Target;
use crate::ask::{self, Show, TalkArgs};
use crate::console;
use crate::exit::{Outcome, render};
use conversation::{Conversation, Stats};
use input::Input;
use lines::{Line, Lines, Source};

/// Arguments of `stagebus chat`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus chat
  stagebus chat --system \"You are a pirate.\" --temperature 0.8
  stagebus chat --local --shards shard-sets/smollm2
  stagebus chat --json < questions.txt

Ctrl-C cancels the answer under way, Ctrl-D leaves. /help lists the commands: /stats, /reset,
/system, /save. Lines are kept in stagebus/chat-history in your folder for data, except those that
begin with a space. Input that is no terminal is a conversation too, a turn for each line: it ends
with its input, with Ctrl-C, or with the first error. With --json each answer is one line, as of
`stagebus ask`.")]
pub struct ChatArgs {
    #[command(flatten)]
    talk: TalkArgs,

    /// Keep no history of lines
    #[arg(long)]
    no_history: bool,
}

/// What `/stats` prints with `--json`.
#[derive(Serialize)]
struct StatsReport<'a> {
    stats: &'a Stats,
}

/// Runs the command until the user leaves.
///
/// # Errors
/// A fleet that cannot be asked, and with input that is no terminal everything that ends a turn
/// early.
pub async fn run(args: ChatArgs, quiet: bool) -> anyhow::Result<Outcome> {
    let interrupts = Interrupts::default();
    let work = Box::pin(talk(&args, quiet, &interrupts));
    let ended = process::with_signals(work, |signal| interrupts.hear(signal)).await;
    ended.context("cannot watch for signals")?
}

async fn talk(args: &ChatArgs, quiet: bool, interrupts: &Interrupts) -> anyhow::Result<Outcome> {
    let is_watched = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let source = if is_watched {
        Source::Terminal { history: lines::history_file().filter(|_| !args.no_history) }
    } else {
        Source::Input
    };
    let conversed = async |target: Target, n_stages| {
        let mut lines = Lines::start(source).context("cannot start to read lines")?;
        if is_watched && !quiet {
            console::note(&format!("{}: /help lists the commands, Ctrl-D leaves", target.model));
        }
        if is_watched {
            interrupts.spare_the_program();
        }
        let show = match args.talk.show(quiet) {
            Show::Text => Show::TextOnly,
            other => other,
        };
        let conversation = Conversation::new(args.talk.answer.system.clone());
        let chat = Chat { args, target, n_stages, show, is_watched, interrupts, conversation };
        chat.run(&mut lines).await
    };
    args.talk.whom.with_target("stagebus-chat", quiet, &interrupts.leave, conversed).await
}

/// What Ctrl-C means at the moment.
#[derive(Debug, Default)]
struct Interrupts {
    /// The program is to end.
    leave: CancellationToken,
    aim: RefCell<Aim>,
}

#[derive(Debug, Default)]
enum Aim {
    /// Ctrl-C ends the program.
    #[default]
    Program,
    /// Ctrl-C ends nothing: it came a moment after an answer ended.
    Nothing,
    /// Ctrl-C ends this answer.
    Answer(CancellationToken),
}

impl Interrupts {
    fn hear(&self, signal: Signal) {
        match (signal, &*self.aim.borrow()) {
            (Signal::Terminate, _) | (Signal::Interrupt, Aim::Program) => self.leave.cancel(),
            (Signal::Interrupt, Aim::Nothing) => {}
            (Signal::Interrupt, Aim::Answer(answer)) => answer.cancel(),
        }
    }

    /// From now on Ctrl-C ends answers only.
    fn spare_the_program(&self) {
        self.aim.replace(Aim::Nothing);
    }

    /// The token of the answer that is about to begin; it is cancelled with the program, too.
    fn begin_answer(&self) -> CancellationToken {
        let answer = self.leave.child_token();
        let mut aim = self.aim.borrow_mut();
        if !matches!(*aim, Aim::Program) {
            *aim = Aim::Answer(answer.clone());
        }
        answer
    }

    fn end_answer(&self) {
        let mut aim = self.aim.borrow_mut();
        if !matches!(*aim, Aim::Program) {
            *aim = Aim::Nothing;
        }
    }
}

/// A conversation with a fleet.
struct Chat<'a> {
    args: &'a ChatArgs,
    target: Target,
    n_stages: Option<usize>,
    show: Show,
    /// Whether the lines come from a terminal.
    is_watched: bool,
    interrupts: &'a Interrupts,
    conversation: Conversation,
}

impl Chat<'_> {
    async fn run(mut self, lines: &mut Lines) -> anyhow::Result<Outcome> {
        let leave = self.interrupts.leave.clone();
        loop {
            let line = tokio::select! {
                line = lines.next() => line?,
                () = leave.cancelled() => return Ok(self.left_early()),
            };
            let text = match line {
                Line::Text(text) => text,
                Line::Interrupted => continue,
                Line::End => return Ok(Outcome::Good),
            };
            let turn = self.turn(&text).await;
            if leave.is_cancelled() {
                return Ok(self.left_early());
            }
            match turn {
                Err(error) if self.is_watched => console::note(render(&error).trim_end()),
                other => other?,
            }
        }
    }

    /// A signal ended the conversation: input that is no terminal was not read to its end.
    fn left_early(&self) -> Outcome {
        if self.is_watched { Outcome::Good } else { Outcome::Bad }
    }

    async fn turn(&mut self, line: &str) -> anyhow::Result<()> {
        match Input::read(line)? {
            Input::Empty => {}
            Input::Say(text) => self.say(&text).await?,
            Input::Stats => self.show_stats()?,
            Input::Reset => self.conversation.reset(),
            Input::System(system) => self.conversation.set_system(system),
            Input::Save(path) => self.conversation.save(&path)?,
            Input::Help => console::note(input::help().trim_end()),
        }
        Ok(())
    }

    async fn say(&mut self, text: &str) -> anyhow::Result<()> {
        let request = self.conversation.request(self.args.talk.answer.request(), text);
        let stop = self.interrupts.begin_answer();
        let answer = ask::ask(&self.target, request, self.n_stages, self.show, &stop).await;
        self.interrupts.end_answer();
        self.conversation.answered(text, &answer?);
        Ok(())
    }

    fn show_stats(&self) -> anyhow::Result<()> {
        let stats = self.conversation.stats();
        if self.args.talk.json {
            console::print_json(&StatsReport { stats })?;
        } else {
            console::print(&stats.describe())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_ends_the_program_before_the_conversation_and_answers_after_that() {
        let starting = Interrupts::default();
        starting.hear(Signal::Interrupt);
        assert!(starting.leave.is_cancelled());

        let talking = Interrupts::default();
        talking.spare_the_program();
        let first = talking.begin_answer();
        talking.hear(Signal::Interrupt);
        assert!(first.is_cancelled());
        talking.end_answer();
        talking.hear(Signal::Interrupt);
        let second = talking.begin_answer();
        assert!(!second.is_cancelled() && !talking.leave.is_cancelled());
        talking.hear(Signal::Terminate);
        assert!(second.is_cancelled() && talking.leave.is_cancelled());
    }

    #[test]
    fn ctrl_c_ends_a_conversation_that_nobody_types() {
        let piped = Interrupts::default();
        let answer = piped.begin_answer();
        piped.hear(Signal::Interrupt);
        assert!(answer.is_cancelled() && piped.leave.is_cancelled());
    }
}
