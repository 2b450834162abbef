//! `stagebus ask`: one prompt, answered as it is generated.

pub mod answer;
pub mod converse;
pub mod sampling;

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{ChatMessage, FinishReason, PromptRequest};
use stagebus_worker::ProfileChoice;
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console;
use crate::discover;
use crate::exit::{Outcome, UsageError};
use crate::local::{self, LocalArgs, Wanted};
use answer::Complete;
use converse::{Target, converse};
use sampling::SamplingArgs;

/// Argument that stands for standard input.
const STDIN: &str = "-";

/// Arguments of `stagebus ask`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus ask \"What is the capital of Japan?\"
  stagebus ask --raw \"The capital of Japan is\" --max-tokens 8
  stagebus ask --tokens 1,504,3575 --json
  git diff | stagebus ask --system \"Write a commit message.\" -
  stagebus ask --temperature 0.8 --top-p 0.9 --seed 7 \"Write a haiku.\"
  stagebus ask --local --shards shards/smollm2 \"Hello\"

Ctrl-C cancels the request. With --json the answer is one JSON object on standard output:
{text, tokens, tok_s, ttft_ms, stages, finish_reason, usage, timings, request_id}, with seed if tokens
were drawn and logprobs if asked for.")]
pub struct AskArgs {
    #[command(flatten)]
    prompt: PromptArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    client: ClientArgs,

    /// Name of the model; found through the fleet's announcements when absent. With --local: a
    /// GGUF file
    #[arg(long, value_name = "NAME|FILE")]
    model: Option<String>,

    #[command(flatten)]
    private: PrivateArgs,

    /// Longest wait for each event, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// The fleet of `--local`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PrivateArgs {
    /// Start a private fleet for this question and end it afterwards
    #[arg(long, conflicts_with = "broker")]
    local: bool,

    /// With --local: number of stages of a model file [default: 2]
    #[arg(long, value_name = "N", requires = "local")]
    stages: Option<usize>,

    /// With --local: numerics, fast or exact
    #[arg(long, value_name = "PROFILE", requires = "local")]
    profile: Option<ProfileChoice>,

    #[command(flatten)]
    fleet: LocalArgs,
}

/// What is asked.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PromptArgs {
    /// The prompt, put into the model's chat template; `-` reads it from standard input
    #[arg(value_name = "PROMPT", required_unless_present = "tokens", conflicts_with = "tokens")]
    prompt: Option<String>,

    /// Send the prompt as it is, without the chat template
    #[arg(long, conflicts_with_all = ["tokens", "system"])]
    raw: bool,

    /// Send token ids instead of a prompt
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "system")]
    tokens: Option<Vec<u32>>,

    /// A system message before the prompt
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Most tokens to generate
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,

    /// A text that ends the answer (repeatable)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

impl PrivateArgs {
    /// Options of a private fleet mean nothing to a running one.
    fn refuse_without_local(&self) -> Result<(), UsageError> {
        match self.fleet.first_given() {
            Some(option) => Err(UsageError::Needs { option, needs: "--local" }),
            None => Ok(()),
        }
    }
}

impl PromptArgs {
    /// Makes the request; reads standard input if the prompt is `-`.
    ///
    /// # Errors
    /// Standard input that cannot be read or is no UTF-8 text.
    pub fn request(&self) -> anyhow::Result<PromptRequest> {
        let mut request = PromptRequest {
            request_id: Some(RequestId::random()),
            tokens: self.tokens.clone(),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ..PromptRequest::default()
        };
        let prompt = match self.prompt.as_deref() {
            Some(STDIN) => read_stdin()?,
            Some(prompt) => prompt.to_owned(),
            None => return Ok(request),
        };
        if self.raw {
            request.prompt = Some(prompt);
        } else {
            let message =
                |role: &str, content: String| ChatMessage { role: role.to_owned(), content };
            let system = self.system.clone().map(|text| message("system", text));
            request.messages = Some(system.into_iter().chain([message("user", prompt)]).collect());
        }
        Ok(request)
    }
}

fn read_stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("cannot read the prompt from standard input")?;
    // The line end that a shell adds is not part of the prompt.
    let trimmed = text.strip_suffix('\n').unwrap_or(&text);
    Ok(trimmed.strip_suffix('\r').unwrap_or(trimmed).to_owned())
}

/// Runs the command.
///
/// # Errors
/// Configuration that is wrong, a broker that cannot be reached, a fleet without a model or with
/// several, and everything that ends a request early.
pub async fn run(args: AskArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let request = args.sampling.with(args.prompt.request()?);
    let show = show_as(&args, quiet);
    let idle_timeout = Duration::from_secs(args.timeout);
    if args.private.local {
        return ask_private(&args, request, Wanted { quiet, ..Wanted::default() }, &stop).await;
    }
    args.private.refuse_without_local()?;
    let bus = args.client.connect("stagebus-ask").await?;
    let model = match &args.model {
        Some(name) => name.parse().context("--model is not a model's name")?,
        None => discover::only_model(&bus).await?,
    };
    let target = Target { bus, model, idle_timeout };
    let complete = ask(&target, request, None, show, &stop).await?;
    Ok(outcome(&complete))
}

/// Asks a fleet that is started for the question.
async fn ask_private(
    args: &AskArgs,
    request: PromptRequest,
    wanted: Wanted<'_>,
    stop: &CancellationToken,
) -> anyhow::Result<Outcome> {
    let PrivateArgs { stages, profile, fleet, .. } = &args.private;
    let model = args.model.as_deref().map(Path::new);
    let wanted = Wanted { model, n_stages: *stages, profile: *profile, ..wanted };
    let set = fleet.shard_set(&wanted, stop).await?;
    let spec = fleet.spec(&set, *profile, None, &args.client.process)?;
    let show = show_as(args, wanted.quiet);
    let n_stages = set.manifest.n_stages();
    if matches!(show, Show::Text | Show::JsonWithText) {
        console::note(&format!("starting a private fleet of {n_stages} stages"));
    }
    let complete = local::with_fleet(spec, stop, async |target| {
        let target = Target { idle_timeout: Duration::from_secs(args.timeout), ..target };
        ask(&target, request, Some(n_stages), show, stop).await
    })
    .await?;
    Ok(outcome(&complete))
}

/// Where the text of an answer goes while it is generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Show {
    /// Text to standard output, figures to standard error.
    Text,
    /// Text to standard output only.
    TextOnly,
    /// Text to standard error, one JSON object to standard output.
    JsonWithText,
    /// One JSON object to standard output.
    Json,
}

fn show_as(args: &AskArgs, quiet: bool) -> Show {
    let watched = std::io::stderr().is_terminal() && !quiet;
    match (args.json, watched) {
        (true, true) => Show::JsonWithText,
        (true, false) => Show::Json,
        (false, true) => Show::Text,
        (false, false) => Show::TextOnly,
    }
}

async fn ask(
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(args: PromptArgs, want: PromptRequest) {
        let mut request = args.request().expect("a valid request");
        assert!(request.request_id.take().is_some(), "a request has a name to cancel it by");
        assert_eq!(request, want);
    }

    fn user(content: &str) -> ChatMessage {
        ChatMessage { role: "user".to_owned(), content: content.to_owned() }
    }

    #[test]
    fn each_form_of_prompt_becomes_its_request() {
        let prompt = || Some("hi".to_owned());
        check(
            PromptArgs { prompt: prompt(), ..PromptArgs::default() },
            PromptRequest { messages: Some(vec![user("hi")]), ..PromptRequest::default() },
        );
        let system = ChatMessage { role: "system".to_owned(), content: "be brief".to_owned() };
        check(
            PromptArgs {
                prompt: prompt(),
                system: Some("be brief".to_owned()),
                max_tokens: Some(3),
                ..PromptArgs::default()
            },
            PromptRequest {
                messages: Some(vec![system, user("hi")]),
                max_tokens: Some(3),
                ..PromptRequest::default()
            },
        );
        check(
            PromptArgs { prompt: prompt(), raw: true, ..PromptArgs::default() },
            PromptRequest { prompt: prompt(), ..PromptRequest::default() },
        );
        check(
            PromptArgs {
                tokens: Some(vec![1, 2]),
                stop: vec!["x".to_owned()],
                ..PromptArgs::default()
            },
            PromptRequest {
                tokens: Some(vec![1, 2]),
                stop: vec!["x".to_owned()],
                ..PromptRequest::default()
            },
        );
    }
}
