//! `stagebus check`: compares a fleet with a reference, token by token.

pub mod reference;
pub mod verdict;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use stagebus_coordinator::AutoOr;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{ChatMessage, PromptRequest};
use stagebus_settings::ProcessArgs;
use stagebus_shards::ShardSet;
use stagebus_shards::text::{Detokenizer, TextModel};
use stagebus_worker::ProfileChoice;
use tokio_util::sync::CancellationToken;

use crate::ask::answer::Answer;
use crate::ask::converse::{AskError, Target, converse};
use crate::console;
use crate::exit::{Outcome, render};
use crate::local::{self, LocalArgs, Wanted};
use crate::progress::count_bar;
use reference::{Case, read_cases};
use verdict::{CaseReport, CheckReport, RunReport, Verdict, first_difference};

/// Arguments of `stagebus check`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus check --reference smollm2-135m.json
  stagebus check --reference cases.json --model model.gguf --stages 1,2,3,5 --json
  stagebus check --reference cases.json --shards shard-sets/smollm2 --profile fast
  stagebus check --reference cases.json --draft hybrid --k 0,1,5,10,auto

A reference file is a JSON array of {category, prompt, template_text, input_ids, output_ids}; other
fields are ignored. Each case is sent twice: input_ids as they are, and prompt as a chat message,
whose tokens must be input_ids. Exit code 0: every token is equal. 1: a token differs.")]
pub struct CheckArgs {
    /// The reference file
    #[arg(long, value_name = "FILE")]
    reference: PathBuf,

    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF", conflicts_with = "shards")]
    model: Option<PathBuf>,

    /// Numbers of stages; each is a fleet of its own, one after the other [default: 2]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    stages: Vec<usize>,

    /// Numerics: exact is f32 throughout and implies exact weights, fast is what the device does
    /// best
    #[arg(long, value_name = "PROFILE", default_value = "exact")]
    profile: ProfileChoice,

    #[command(flatten)]
    local: LocalArgs,

    /// Tokens to draft per step: numbers, or `auto`; each is a run of its own on the same fleet
    /// [default: auto]
    #[arg(long, value_name = "K,K", value_delimiter = ',')]
    k: Vec<AutoOr>,

    #[command(flatten)]
    process: ProcessArgs,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// A malformed reference file, a fleet that does not start or loses a part. A difference is no
/// error but [`Outcome::Bad`].
pub async fn run(args: CheckArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let cases = read_cases(&args.reference)?;
    let mut report = CheckReport {
        equal: true,
        model: String::new(),
        profile: args.profile.profile().to_string(),
        engine: args.local.engine().kind().to_string(),
        workers_per_stage: args.local.workers_per_stage(),
        runs: Vec::new(),
    };
    let counts: Vec<Option<usize>> = match args.stages.as_slice() {
        [] => vec![None],
        counts => counts.iter().copied().map(Some).collect(),
    };
    for n_stages in counts {
        let wanted =
            Wanted { model: args.model.as_deref(), n_stages, profile: Some(args.profile), quiet };
        let set = args.local.shard_set(&wanted, &stop).await?;
        let spec = args.local.spec(&set, Some(args.profile), None, &args.process)?;
        let text = TextModel::load(&set.dir)
            .with_context(|| format!("cannot load the tokenizer of {}", set.dir.display()))?;
        let run = |k| Run { cases: &cases, set: &set, text: &text, k, quiet, stop: &stop };
        let ks = if args.k.is_empty() { &[AutoOr::Auto][..] } else { &args.k };
        report.model.clone_from(&set.manifest.model);
        local::with_fleet(spec, &stop, async |target| {
            for k in ks {
                let started = Instant::now();
                let run = run_report(&set, *k, run(*k).all(&target).await?, started);
                if !args.json {
                    console::print(&describe(&run))?;
                }
                report.equal &= run.cases_equal == run.cases_total;
                report.runs.push(run);
            }
            Ok(())
        })
        .await?;
    }
    if args.json {
        console::print_json(&report)?;
    }
    Ok(if report.equal { Outcome::Good } else { Outcome::Bad })
}

/// All cases on one fleet.
struct Run<'a> {
    cases: &'a [Case],
    set: &'a ShardSet,
    text: &'a TextModel,
    k: AutoOr,
    quiet: bool,
    stop: &'a CancellationToken,
}

impl Run<'_> {
    async fn all(&self, target: &Target) -> anyhow::Result<Vec<CaseReport>> {
        let bar = count_bar(self.quiet, self.cases.len() as u64, "checking");
        let mut reports = Vec::with_capacity(self.cases.len());
        for (index, case) in self.cases.iter().enumerate() {
            let token_prompt = self.token_prompt(target, case).await;
            let text_prompt = self.text_prompt(target, case).await;
            anyhow::ensure!(!self.stop.is_cancelled(), "stopped before the last case");
            let category = case.category.clone();
            reports.push(CaseReport { index, category, token_prompt, text_prompt });
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(reports)
    }

    async fn token_prompt(&self, target: &Target, case: &Case) -> Verdict {
        let request =
            PromptRequest { tokens: Some(case.input_ids.clone()), ..PromptRequest::default() };
        self.compare(target, case, request, self.text.continuing_detokenizer()).await
    }

    async fn text_prompt(&self, target: &Target, case: &Case) -> Verdict {
        let message = ChatMessage::new("user", case.prompt.clone());
        let messages = vec![message];
        match self.text.render_chat(&messages) {
            Ok(rendered) => {
                if let Some(byte) = case
                    .template_text
                    .as_deref()
                    .and_then(|want| first_difference_in_text(want, &rendered))
                {
                    return Verdict::TemplateDiffers { byte };
                }
            }
            Err(error) => return failed(error),
        }
        let ids = match self.text.encode_chat(&messages) {
            Ok(ids) => ids,
            Err(error) => return failed(error),
        };
        if let Some(difference) = first_difference(&case.input_ids, &ids) {
            return Verdict::PromptDiffers { difference };
        }
        let request = PromptRequest { messages: Some(messages), ..PromptRequest::default() };
        self.compare(target, case, request, self.text.detokenizer()).await
    }

    /// Sends a request and compares prompt length, tokens and text with the reference.
    async fn compare(
        &self,
        target: &Target,
        case: &Case,
        request: PromptRequest,
        detokenizer: Detokenizer,
    ) -> Verdict {
        let max_tokens = case.max_tokens(&self.set.manifest.eos_ids);
        let request = PromptRequest {
            request_id: Some(RequestId::random()),
            max_tokens: Some(u32::try_from(max_tokens).unwrap_or(u32::MAX)),
            draft_tokens: match self.k {
                AutoOr::Auto => None,
                AutoOr::Fixed(k) => Some(k),
            },
            ..request
        };
        let answer = match converse(target, request, self.stop, &mut |_| Ok(())).await {
            Ok(answer) => answer,
            Err(error) => return failed(error),
        };
        judge(case, answer, detokenizer)
    }
}

fn judge(case: &Case, answer: Answer, mut detokenizer: Detokenizer) -> Verdict {
    let found = answer.prompt_tokens().map_or(0, |n| n as usize);
    if found != case.input_ids.len() {
        return Verdict::PromptLength { expected: case.input_ids.len(), found };
    }
    let complete = match answer.finish(None) {
        Ok(complete) => complete,
        Err(error) => return failed(AskError::from(error)),
    };
    let verdict = Verdict::of_output(&case.output_ids, &complete.tokens);
    let mut text: String =
        complete.tokens.iter().filter_map(|&token| detokenizer.push(token)).collect();
    text.extend(detokenizer.finish());
    match first_difference_in_text(&text, &complete.text) {
        Some(byte) if verdict.is_equal() => Verdict::TextDiffers { byte },
        _ => verdict,
    }
}

fn failed(error: impl Into<anyhow::Error>) -> Verdict {
    let text = render(&error.into());
    Verdict::Failed { error: text.trim_start_matches("error: ").trim_end().to_owned() }
}

/// The first byte at which two texts differ.
fn first_difference_in_text(expected: &str, found: &str) -> Option<usize> {
    let n_equal = expected.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
    (n_equal < expected.len() || n_equal < found.len()).then_some(n_equal)
}

fn run_report(set: &ShardSet, k: AutoOr, cases: Vec<CaseReport>, started: Instant) -> RunReport {
    RunReport {
        stages: set.manifest.n_stages(),
        weights: set.manifest.weights.to_string(),
        k: k.to_string(),
        cases_equal: cases.iter().filter(|case| case.is_equal()).count(),
        cases_total: cases.len(),
        elapsed_s: started.elapsed().as_secs_f64(),
        cases,
    }
}

fn describe(run: &RunReport) -> String {
    let mut text = String::new();
    for case in &run.cases {
        let state = if case.is_equal() { "ok  " } else { "DIFF" };
        text.push_str(&format!("  {state} {:3} {}\n", case.index, case.category));
        let forms = [("token prompt", &case.token_prompt), ("text prompt", &case.text_prompt)];
        for (form, verdict) in forms.into_iter().filter(|(_, verdict)| !verdict.is_equal()) {
            text.push_str(&format!("           {form}: {verdict}\n"));
        }
    }
    let RunReport { stages, weights, k, cases_equal, cases_total, elapsed_s, .. } = run;
    let plural = if *stages == 1 { "stage" } else { "stages" };
    format!(
        "{stages} {plural}, {weights} weights, k {k}: {cases_equal} of {cases_total} cases equal in \
         {elapsed_s:.1} s\n{text}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_differ_where_they_first_differ() {
        assert_eq!(first_difference_in_text("abc", "abc"), None);
        assert_eq!(first_difference_in_text("abc", "abd"), Some(2));
        assert_eq!(first_difference_in_text("abc", "ab"), Some(2));
        assert_eq!(first_difference_in_text("", "a"), Some(0));
    }

    #[test]
    fn the_description_shows_each_form_that_differs() {
        let equal = Verdict::of_output(&[1], &[1]);
        let case = |index, token_prompt| CaseReport {
            index,
            category: format!("kind-{index}"),
            token_prompt,
            text_prompt: equal.clone(),
        };
        let run = RunReport {
            stages: 3,
            weights: "exact".to_owned(),
            k: "auto".to_owned(),
            cases_equal: 1,
            cases_total: 2,
            elapsed_s: 1.0,
            cases: vec![case(0, equal.clone()), case(1, Verdict::of_output(&[1], &[7]))],
        };
        let text = describe(&run);
        assert!(text.starts_with("3 stages, exact weights, k auto: 1 of 2 cases equal"), "{text}");
        assert!(text.contains("ok     0 kind-0\n  DIFF   1 kind-1\n"), "{text}");
        assert!(text.contains("token prompt: output differs at token 0: expected 1, found 7"));
        assert!(!text.contains("text prompt:"), "{text}");
    }
}
