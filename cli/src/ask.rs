//! `stagebus ask`: one prompt, answered as it is generated.

pub mod answer;
pub mod converse;
pub mod prompt;
pub mod sampling;
pub mod target;

use std::io::{IsTerminal as _, Write as _};

use stagebus_schemas::messages::public::{FinishReason, PromptRequest};
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::exit::Outcome;
use answer::Complete;
use converse::{Target, converse};
use prompt::{AnswerArgs, PromptArgs};
use target::TargetArgs;

/// Arguments of `stagebus ask`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus ask \"What is the capital of Japan?\"
  stagebus ask --raw \"The capital of Japan is\" --max-tokens 8
  stagebus ask --tokens 1,504,3575 --json
  git diff | stagebus ask --system \"Write a commit message.\" -
  stagebus ask --temperature 0.8 --top-p 0.9 --seed 7 \"Write a haiku.\"
  stagebus ask --local --shards shard-sets/smollm2 \"Hello\"

Ctrl-C cancels the request. With --json the answer is one JSON object on standard output:
{text, tokens, tok_s, ttft_ms, stages, finish_reason, usage, timings, request_id}, with seed if tokens
were drawn and logprobs if asked for.")]
pub struct AskArgs {
    #[command(flatten)]
    prompt: PromptArgs,

    #[command(flatten)]
    talk: TalkArgs,
}

/// Options that `ask` and `chat` share: how answers are made, by whom, and how they are shown.
#[derive(Debug, Clone, clap::Args)]
pub struct TalkArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,

    #[command(flatten)]
    pub(crate) whom: TargetArgs,

    /// Print one JSON object for an answer
    #[arg(long)]
    pub(crate) json: bool,
}

/// Runs the command.
///
/// # Errors
/// Configuration that is wrong, a broker that cannot be reached, a fleet without a model or with
/// several, and everything that ends a request early.
pub async fn run(args: AskArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let request = args.prompt.request(&args.talk.answer)?;
    let show = args.talk.show(quiet);
    let asked = async |target: Target, n_stages| ask(&target, request, n_stages, show, &stop).await;
    let complete = args.talk.whom.with_target("stagebus-ask", quiet, &stop, asked).await?;
    Ok(outcome(&complete))
}

/// Where the text of an answer goes while it is generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Show {
    /// Text to standard output, figures to standard error.
    Text,
    /// Text to standard output only.
    TextOnly,
    /// Text to standard error, one JSON object to standard output.
    JsonWithText,
    /// One JSON object to standard output.
    Json,
}

impl TalkArgs {
    /// How answers are shown: by `--json`, and by whether somebody watches standard error.
    pub(crate) fn show(&self, quiet: bool) -> Show {
        let watched = std::io::stderr().is_terminal() && !quiet;
        match (self.json, watched) {
            (true, true) => Show::JsonWithText,
            (true, false) => Show::Json,
            (false, true) => Show::Text,
            (false, false) => Show::TextOnly,
        }
    }
}

/// Sends a request and shows its answer.
///
/// # Errors
/// What ends the request early, and output that cannot be written.
pub(crate) async fn ask(
    target: &Target,
    request: PromptRequest,
    n_stages: Option<usize>,
    show: Show,
    stop: &CancellationToken,
) -> anyhow::Result<Complete> {
    let mut ends_in_line = true;
    let answer = converse(target, request, stop, &mut |text| {
        ends_in_line = text.ends_with('\n');
        match show {
            Show::Text | Show::TextOnly => console::print(text),
            Show::JsonWithText => std::io::stderr().lock().write_all(text.as_bytes()),
            Show::Json => Ok(()),
        }
    })
    .await;
    if !ends_in_line {
        match show {
            Show::Text | Show::TextOnly => console::print("\n")?,
            Show::JsonWithText => console::note(""),
            Show::Json => {}
        }
    }
    let complete = answer?.finish(n_stages)?;
    match show {
        Show::Text => console::note(&summary(&complete)),
        Show::TextOnly => {}
        Show::Json | Show::JsonWithText => console::print_json(&complete)?,
    }
    Ok(complete)
}

fn outcome(complete: &Complete) -> Outcome {
    match complete.finish_reason {
        FinishReason::Stop | FinishReason::Length => Outcome::Good,
        FinishReason::Cancelled => Outcome::Bad,
    }
}

fn summary(complete: &Complete) -> String {
    let reason = match complete.finish_reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    };
    let seed = complete.seed.map(|seed| format!(", seed {seed}")).unwrap_or_default();
    format!(
        "[{} prompt tokens, {} generated, first after {:.0} ms, {:.1} tokens/s, {} stages, \
         {reason}{seed}]",
        complete.usage.prompt_tokens,
        complete.usage.completion_tokens,
        complete.ttft_ms,
        complete.tok_s,
        complete.stages,
    )
}
