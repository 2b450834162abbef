//! What the scenario prints.

use serde::{Serialize, Serializer};

use super::Context;
use super::identity::Identity;
use super::long_prompt::LongPrompt;
use super::matrix::{Cell, Round, StageUse};
use super::prefix::Prefix;
use super::replicas::Replicas;
use crate::harness::claims::Claim;
use crate::harness::machine::Machine;
use crate::harness::table::{markdown, number};

/// How the scenario was run.
#[derive(Debug, Serialize)]
pub struct SetUp {
    /// File name of the model.
    pub model: String,
    /// Version of Stagebus.
    pub stagebus: &'static str,
    /// Whether processes were tied to cores.
    pub tied: bool,
    /// Rounds.
    pub rounds: u16,
    /// Tokens of an answer.
    pub tokens: u16,
    /// Tokens of the prompts: least and most.
    pub prompt_tokens: (usize, usize),
    /// Settings given to the fleets.
    pub settings: Vec<String>,
    /// Whether this program was built without optimisation of its own code.
    pub debug_build: bool,
}

impl SetUp {
    pub(super) fn new(context: &Context) -> Self {
        let lengths = || context.prompts.iter().map(|prompt| prompt.tokens.len());
        Self {
            model: context.model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            stagebus: env!("CARGO_PKG_VERSION"),
            tied: context.n_cpus.is_some(),
            rounds: context.args.rounds,
            tokens: context.args.tokens,
            prompt_tokens: (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0)),
            settings: context.args.set.clone(),
            debug_build: cfg!(debug_assertions),
        }
    }
}

/// Everything that was measured.
#[derive(Debug)]
pub struct UsersReport {
    /// The machine.
    pub machine: Machine,
    /// How it was run.
    pub set_up: SetUp,
    /// Why rivals are missing, if any are.
    pub absent: Vec<String>,
    /// Users by stages by speculation.
    pub matrix: Vec<Cell>,
    /// Two nodes with the whole model each.
    pub replicas: Option<Replicas>,
    /// Whether tokens depend on others.
    pub identity: Identity,
    /// What a long prompt does to others.
    pub long_prompt: LongPrompt,
    /// What a known prefix spares.
    pub prefix: Prefix,
    /// The claims.
    pub claims: Vec<Claim>,
}

impl Serialize for UsersReport {
    /// The claims come last, where people look first.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap as _;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("scenario", "users")?;
        map.serialize_entry("machine", &self.machine)?;
        map.serialize_entry("set_up", &self.set_up)?;
        map.serialize_entry("absent", &self.absent)?;
        map.serialize_entry("matrix", &self.matrix)?;
        map.serialize_entry("replicas", &self.replicas)?;
        map.serialize_entry("identity", &self.identity)?;
        map.serialize_entry("long_prompt", &self.long_prompt)?;
        map.serialize_entry("prefix", &self.prefix)?;
        map.serialize_entry("claims", &self.claims)?;
        map.end()
    }
}

impl UsersReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let Machine { processor, n_cpus, load_at_start, load_at_end, .. } = &self.machine;
        let SetUp { model, rounds, tokens, prompt_tokens: (least, most), .. } = &self.set_up;
        let build = if self.set_up.debug_build { ", DEVELOPMENT BUILD" } else { "" };
        let tied = match self.set_up.tied {
            true => "a node is a core; broker, coordinator and the users share the nodes' cores",
            false => "processes are not tied to cores: this platform has no taskset",
        };
        let mut text = format!(
            "{model} on {} ({n_cpus} cores), load {} to {}{build}\n{tied}\n{least} to {most} prompt \
             tokens, {tokens} tokens an answer, {rounds} rounds\n\n",
            processor.as_deref().unwrap_or("an unnamed processor"),
            number(*load_at_start, 1),
            number(*load_at_end, 1),
        );
        text.push_str("Tokens per second and latency (ms), medians over rounds\n\n");
        text.push_str(&matrix_table(&self.matrix));
        text.push_str("\nProcessor time per token (ms), medians over rounds\n\n");
        text.push_str(&cpu_table(&self.matrix));
        text.push('\n');
        text.push_str(&self.rest());
        for absent in &self.absent {
            text.push_str(&format!("absent: {absent}\n"));
        }
        text
    }
}

impl UsersReport {
    fn rest(&self) -> String {
        let LongPrompt { kind, n_users, long_tokens, with_ms, without_ms, long_ttft_ms, .. } =
            &self.long_prompt;
        let pair = |of: &Option<crate::harness::stats::Summary>| {
            let percentiles = of.map(|ms| (ms.median, ms.p99));
            let (p50, p99) = percentiles.unzip();
            format!("{} p50, {} p99", number(p50, 1), number(p99, 1))
        };
        let list = |values: &[f64]| {
            values.iter().map(|value| format!("{value:.0}")).collect::<Vec<_>>().join(" ")
        };
        format!(
            "{n_users} users on {} while {long_tokens} tokens are prefilled: {} ms between tokens; \
             without: {}; first token of the long prompt after {} ms\n\
             {} tokens of prefix on {}: first token after {} ms cold, {} ms known\n\n",
            kind.name(),
            pair(with_ms),
            pair(without_ms),
            list(long_ttft_ms),
            self.prefix.prefix_tokens,
            self.prefix.kind.name(),
            list(&self.prefix.cold_ms),
            list(&self.prefix.known_ms),
        )
    }
}

fn matrix_table(cells: &[Cell]) -> String {
    let row = |cell: &Cell| {
        let list = |of: fn(&StageUse) -> &Vec<f64>, factor: f64| {
            cell.stages.as_ref().map_or_else(
                || "-".to_owned(),
                |stages| {
                    let text = |value: &f64| format!("{:.0}", value * factor);
                    of(stages).iter().map(text).collect::<Vec<_>>().join(" ")
                },
            )
        };
        let n_differing: usize = cell.rounds.iter().map(|round| round.n_differing).sum();
        let spread =
            |pick: fn(f64, f64) -> f64| cell.rounds.iter().map(|round| round.tok_s).reduce(pick);
        vec![
            cell.place.kind.name(),
            cell.place.users.to_string(),
            if cell.place.speculation { "auto" } else { "off" }.to_owned(),
            number(cell.median(|round| Some(round.tok_s)), 1),
            format!("{}-{}", number(spread(f64::min), 1), number(spread(f64::max), 1)),
            number(cell.median(|round| Some(round.user_tok_s)), 1),
            number(cell.median(|round| round.decode_tok_s), 1),
            number(cell.ttft_ms.map(|ms| ms.median), 0),
            number(cell.ttft_ms.map(|ms| ms.p99), 0),
            number(cell.gap_ms.map(|ms| ms.median), 1),
            number(cell.gap_ms.map(|ms| ms.p99), 1),
            list(|stages| &stages.inference_share, 100.0),
            list(|stages| &stages.batch_rows, 1.0),
            number(acceptance(&cell.rounds), 2),
            n_differing.to_string(),
        ]
    };
    let header = [
        "nodes x weights",
        "users",
        "drafts",
        "tok/s",
        "least-most",
        "a user",
        "after 1st",
        "TTFT p50",
        "p99",
        "gap p50",
        "p99",
        "inference, %",
        "rows",
        "accepted",
        "differ",
    ];
    markdown(&header, &cells.iter().map(row).collect::<Vec<_>>())
}

/// Share of the drafted tokens that were right.
fn acceptance(rounds: &[Round]) -> Option<f64> {
    let sum = |of: fn(&Round) -> u32| rounds.iter().map(|round| f64::from(of(round))).sum::<f64>();
    let drafted = sum(|round| round.drafted_tokens);
    (drafted > 0.0).then(|| sum(|round| round.accepted_tokens) / drafted)
}

fn cpu_table(cells: &[Cell]) -> String {
    let row = |cell: &Cell| {
        let per_token = |of: fn(&crate::node_fleet::CpuTime) -> f64| {
            cell.median(|round| Some(of(round.cpu.as_ref()?) / round.n_tokens as f64))
        };
        // Of the processor time that the nodes have, what all workers used.
        let nodes = |round: &Round| {
            let workers = &round.cpu.as_ref()?.worker_ms;
            Some(workers.iter().sum::<f64>() / (round.wall_ms * workers.len() as f64) * 100.0)
        };
        let workers = per_token(|cpu| cpu.worker_ms.iter().sum());
        workers?;
        Some(vec![
            cell.place.kind.name(),
            cell.place.users.to_string(),
            if cell.place.speculation { "auto" } else { "off" }.to_owned(),
            number(workers, 3),
            number(per_token(|cpu| cpu.broker_ms), 3),
            number(per_token(|cpu| cpu.coordinator_ms), 3),
            number(per_token(|cpu| cpu.load_ms), 3),
            number(cell.median(nodes), 0),
        ])
    };
    let header = [
        "nodes x weights",
        "users",
        "drafts",
        "workers",
        "broker",
        "coordinator",
        "users' side",
        "workers' share of wall, %",
    ];
    markdown(&header, &cells.iter().filter_map(row).collect::<Vec<_>>())
}
