//! The scenario `head`: tokens chosen on the last stage against whole rows of logits, over a relay.
//!
//! Two fleets of nodes, which differ in `coordinator.head` only. All their processes reach the
//! broker over one narrow link: a row of logits crosses it twice, to the broker and from there to
//! the coordinator. Without drafts a step has one row, with drafts one more than drafted tokens.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::WeightMode;

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::stats::{Summary, median};
use crate::harness::table::{number, table};
use crate::harness::{interleave, output};
use crate::link::{Conditions, LinkPlan, mbit_s};
use crate::load::{self, Ask, Served};
use crate::measured_model::{self, ShardSets};
use crate::node_fleet::wiring::Wiring;
use crate::node_fleet::{NodeFleet, NodePlan};
use crate::prompts::{self, EncodedPrompt};

const TOP1: Target = Target {
    name: "head_top1_vs_logits",
    target: 8.0,
    bound: Bound::AtLeast,
    what: "tok/s with tokens chosen on the last stage over whole rows of logits, over a 20 Mbit/s relay",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[TOP1];

/// What is measured: sessions at the same time, and drafted tokens per step. The last one is the
/// paper's, and counts.
const CASES: [Case; 4] = [
    Case { n_sessions: 1, n_drafted: 0 },
    Case { n_sessions: 2, n_drafted: 0 },
    Case { n_sessions: 1, n_drafted: 3 },
    Case { n_sessions: 2, n_drafted: 3 },
];

/// Arguments of `stagebus bench head`.
#[derive(Debug, Clone, clap::Args)]
pub struct HeadArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Stages, each on a node
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    stages: u16,

    /// The relay's rate in each direction, in Mbit/s
    #[arg(long, value_name = "MBIT", default_value_t = 20.0)]
    rate: f64,

    /// Time from a process to the broker, and from the broker to a process, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 8)]
    delay: u32,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(2..))]
    tokens: u16,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// Sessions at the same time, and drafted tokens per step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Sessions.
    pub n_sessions: usize,
    /// Drafted tokens; 0 is no speculation.
    pub n_drafted: u32,
}

/// What a case gave.
#[derive(Debug, Serialize)]
pub struct HeadPoint {
    /// The case.
    pub case: Case,
    /// Tokens per second of all sessions after their first tokens, chosen on the last stage.
    pub top1_tok_s: Option<Summary>,
    /// The same with whole rows of logits.
    pub logits_tok_s: Option<Summary>,
    /// Median over rounds of their ratio.
    pub ratio: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct HeadReport {
    scenario: &'static str,
    machine: Machine,
    model: String,
    n_stages: usize,
    rate_mbit_s: f64,
    delay_ms: u32,
    n_tokens: u16,
    vocab_size: usize,
    tied: bool,
    points: Vec<HeadPoint>,
    claims: Vec<Claim>,
}

/// A fleet with what it gave so far.
#[derive(Debug)]
struct Contestant {
    fleet: NodeFleet,
    /// Rates by case, by round.
    rates: [Vec<f64>; CASES.len()],
}

/// What is asked.
struct Questions {
    prompts: Vec<EncodedPrompt>,
    n_tokens: u16,
    /// The answers without drafts, alone, with tokens chosen on the last stage.
    answers: Vec<Vec<u32>>,
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Tokens that differ; anything that does not run.
pub async fn run(args: HeadArgs, quiet: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let n_stages = usize::from(args.stages);
    let sets = ShardSets::make(&model, folder.path(), [(n_stages, WeightMode::Exact)]).await?;
    let set = sets.get(n_stages, WeightMode::Exact)?;
    let draft = measured_model::draft_settings(set, folder.path()).await?;
    let relay = Conditions::queued(Duration::from_millis(args.delay.into()), mbit_s(args.rate));
    let wiring = Wiring::Relay(LinkPlan::both(relay));
    let mut contestants = Vec::new();
    for head in ["token", "full"] {
        output::note(quiet, &format!("starting a fleet with coordinator.head={head}"));
        let mode = format!("coordinator.head={head}");
        let settings = draft.iter().cloned().chain([mode]);
        let plan = NodePlan::on_nodes(set, n_stages, &machine, settings);
        let fleet = NodeFleet::start_wired(&plan, &wiring).await?;
        contestants.push(Contestant { fleet, rates: Default::default() });
    }
    let mut prompts = prompts::encoded(&prompts::text_model(set)?)?;
    prompts.truncate(2);
    let mut questions = Questions { prompts, n_tokens: args.tokens, answers: Vec::new() };
    output::note(quiet, "checking tokens");
    questions.check(&contestants).await?;
    interleave(args.rounds.into(), &mut contestants, async |contestant, round| {
        output::note(quiet, &format!("round {}", round + 1));
        contestant.turn(&questions).await
    })
    .await?;
    let tied = contestants.iter().any(|contestant| contestant.fleet.is_tied());
    let points = points(&contestants);
    for contestant in contestants {
        contestant.fleet.end().await?;
    }
    machine.finish();
    let manifest = stagebus_shards::ShardSet::open(set)?.manifest;
    let claims = vec![claim(&points, &args)];
    let report = HeadReport {
        scenario: "head",
        machine,
        model: measured_model::name(&model),
        n_stages,
        rate_mbit_s: args.rate,
        delay_ms: args.delay,
        n_tokens: args.tokens,
        vocab_size: manifest.dims.vocab_size,
        tied,
        points,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, Some(&model), args.json)?)
}

impl Questions {
    fn asks(&self, case: Case) -> Vec<Ask<'_>> {
        let prompts = self.prompts.iter();
        prompts
            .map(|prompt| Ask {
                prompt: &prompt.tokens,
                max_tokens: self.n_tokens.into(),
                draft_tokens: Some(case.n_drafted),
                // One step at a time in both modes: what differs is what crosses the link.
                draft_windows: Some(1),
                draft_alternatives: Some(0),
                ..Ask::default()
            })
            .collect()
    }

    /// Answers every case once on every fleet: all must give the tokens of the first one.
    async fn check(&mut self, contestants: &[Contestant]) -> anyhow::Result<()> {
        for contestant in contestants {
            contestant.fleet.join_cores().await?;
            for case in CASES {
                let asks = self.asks(case);
                let answers = load::users(&contestant.fleet, case.n_sessions, &asks).await?;
                let tokens: Vec<_> = answers.into_iter().map(|one| one.tokens).collect();
                if self.answers.is_empty() {
                    self.answers = tokens;
                } else {
                    self.ensure_equal(case, &tokens)?;
                }
            }
        }
        Ok(())
    }

    fn ensure_equal(&self, case: Case, tokens: &[Vec<u32>]) -> anyhow::Result<()> {
        anyhow::ensure!(
            tokens == self.answers,
            "{case:?} gives other tokens: {tokens:?}, expected {:?}",
            self.answers
        );
        Ok(())
    }
}

impl Contestant {
    async fn turn(&mut self, questions: &Questions) -> anyhow::Result<()> {
        self.fleet.join_cores().await?;
        for (case, rates) in CASES.into_iter().zip(&mut self.rates) {
            let asks = questions.asks(case);
            let answers = load::users(&self.fleet, case.n_sessions, &asks).await?;
            let tokens: Vec<_> = answers.iter().map(|one| one.tokens.clone()).collect();
            questions.ensure_equal(case, &tokens)?;
            rates.extend(rate(&answers, case.n_sessions));
        }
        Ok(())
    }
}

/// Tokens per second of all sessions, from the first token of each answer on.
fn rate(answers: &[Served], n_sessions: usize) -> Option<f64> {
    let rates: Vec<f64> = answers.iter().filter_map(Served::decode_tok_s).collect();
    let n_sessions = n_sessions.min(rates.len());
    (n_sessions > 0).then(|| rates.iter().sum::<f64>() / rates.len() as f64 * n_sessions as f64)
}

fn points(contestants: &[Contestant]) -> Vec<HeadPoint> {
    let [top1, logits] = contestants else { return Vec::new() };
    let one = |(index, case): (usize, Case)| {
        let (top1, logits) = (&top1.rates[index], &logits.rates[index]);
        HeadPoint {
            case,
            top1_tok_s: Summary::of(top1.iter().copied()),
            logits_tok_s: Summary::of(logits.iter().copied()),
            ratio: median(top1.iter().zip(logits).map(|(top1, logits)| top1 / logits)),
        }
    };
    CASES.into_iter().enumerate().map(one).collect()
}

/// The paper's case counts: two sessions with three drafted tokens.
fn claim(points: &[HeadPoint], args: &HeadArgs) -> Claim {
    let Some((point, ratio)) = points.last().and_then(|point| Some((point, point.ratio?))) else {
        return TOP1.missing("the answers were too short to be timed");
    };
    let others: Vec<String> = points
        .iter()
        .map(|point| {
            let Case { n_sessions, n_drafted } = point.case;
            format!("{} with {n_sessions} x K={n_drafted}", number(point.ratio, 1))
        })
        .collect();
    let Case { n_sessions, n_drafted } = point.case;
    let how = format!(
        "{n_sessions} sessions, {n_drafted} drafted tokens a step, one relay of {} Mbit/s for \
         all processes, {} ms to the broker and {} ms from it; {}",
        args.rate,
        args.delay,
        args.delay,
        others.join(", ")
    );
    TOP1.measured(ratio, how)
}

impl HeadReport {
    /// The table for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |point: &HeadPoint| {
            let rate = |summary: Option<Summary>| number(summary.map(|s| s.median), 2);
            vec![
                point.case.n_sessions.to_string(),
                point.case.n_drafted.to_string(),
                rate(point.top1_tok_s),
                rate(point.logits_tok_s),
                number(point.ratio, 2),
            ]
        };
        let header = ["sessions", "drafted", "top-1 tok/s", "logits tok/s", "ratio"];
        format!(
            "{} in {} stages over one relay of {} Mbit/s, {} ms to the broker; a row has {} logits\n{}\n",
            self.model,
            self.n_stages,
            self.rate_mbit_s,
            self.delay_ms,
            self.vocab_size,
            table(&header, &self.points.iter().map(row).collect::<Vec<_>>())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::served;

    #[test]
    fn a_rate_counts_the_sessions_that_run_at_the_same_time() {
        let answers = [
            served(0.0, &[(100.0, 1), (1100.0, 10)]),
            served(1100.0, &[(1200.0, 1), (2200.0, 30)]),
        ];
        assert_eq!(rate(&answers, 1), Some(20.0));
        assert_eq!(rate(&answers, 2), Some(40.0));
        assert_eq!(rate(&[], 2), None);
    }
}
