//! What the scenario prints.

use serde::{Serialize, Serializer};
use stagebus_shards::WeightMode;

use super::gains::gains;
use super::sweep::{Drawn, Long, Point};
use super::verdict::{acceptance, best_fixed, categories, drafters, lengths, rate, speed_up};
use super::{Context, Drafter};
use crate::harness::claims::Claim;
use crate::harness::machine::Machine;
use crate::harness::stats::geometric_mean;
use crate::harness::table::{markdown, number};
use crate::rewind_once::Rewind;

/// How the scenario was run.
#[derive(Debug, Serialize)]
pub struct SetUp {
    /// File name of the model.
    pub model: String,
    /// Version of Stagebus.
    pub stagebus: &'static str,
    /// Stages, each on a node.
    pub stages: u16,
    /// How weights were mapped.
    pub weights: WeightMode,
    /// Whether processes were tied to cores.
    pub tied: bool,
    /// Prompts of each category.
    pub prompts: u16,
    /// Rounds.
    pub rounds: u16,
    /// Tokens of an answer.
    pub tokens: u16,
    /// Settings given to the fleets.
    pub settings: Vec<String>,
    /// Whether this program was built without optimisation of its own code.
    pub debug_build: bool,
}

impl SetUp {
    pub(super) fn new(context: &Context, tied: bool) -> Self {
        let args = &context.args;
        Self {
            model: context.model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            stagebus: env!("CARGO_PKG_VERSION"),
            stages: args.stages,
            weights: args.weights,
            tied,
            prompts: args.prompts,
            rounds: args.rounds,
            tokens: args.tokens,
            settings: args.set.clone(),
            debug_build: cfg!(debug_assertions),
        }
    }
}

/// Everything that was measured.
#[derive(Debug)]
pub struct SpeculationReport {
    /// The machine.
    pub machine: Machine,
    /// How it was run.
    pub set_up: SetUp,
    /// Why drafters are missing, if any are.
    pub absent: Vec<String>,
    /// Draft lengths by drafters by prompts.
    pub sweep: Vec<Point>,
    /// Drawn answers.
    pub drawn: Vec<Drawn>,
    /// The long answer.
    pub long: Vec<Long>,
    /// Rewinds of the stateful engine.
    pub rewinds: Vec<Rewind>,
    /// The claims.
    pub claims: Vec<Claim>,
}

impl Serialize for SpeculationReport {
    /// The claims come last, where people look first.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap as _;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("scenario", "speculation")?;
        map.serialize_entry("machine", &self.machine)?;
        map.serialize_entry("set_up", &self.set_up)?;
        map.serialize_entry("absent", &self.absent)?;
        map.serialize_entry("sweep", &self.sweep)?;
        map.serialize_entry("gains", &gains(&self.sweep))?;
        map.serialize_entry("drawn", &self.drawn)?;
        map.serialize_entry("long", &self.long)?;
        map.serialize_entry("rewinds", &self.rewinds)?;
        map.serialize_entry("claims", &self.claims)?;
        map.end()
    }
}

impl SpeculationReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let Machine { processor, n_cpus, load_at_start, load_at_end, .. } = &self.machine;
        let SetUp { model, stages, weights, prompts, rounds, tokens, tied, .. } = &self.set_up;
        let build = if self.set_up.debug_build { ", DEVELOPMENT BUILD" } else { "" };
        let nodes = match tied {
            true => "nodes, each a core that broker, coordinator with drafter and the user share",
            false => "stages, not tied to cores: this platform has no taskset",
        };
        let mut text = format!(
            "{model} on {} ({n_cpus} cores), load {} to {}{build}\n{stages} {nodes}\n{weights} \
             weights, one user, {prompts} prompts of each category, {tokens} tokens an answer, \
             {rounds} rounds\n\n",
            processor.as_deref().unwrap_or("an unnamed processor"),
            number(*load_at_start, 1),
            number(*load_at_end, 1),
        );
        text.push_str("Over all categories (geometric means)\n\n");
        text.push_str(&length_table(&self.sweep));
        text.push_str("\nTokens per second by category\n\n");
        text.push_str(&category_table(&self.sweep));
        if !self.long.is_empty() {
            text.push_str("\nOne long answer\n\n");
            text.push_str(&long_table(&self.long));
        }
        text.push('\n');
        for drawn in &self.drawn {
            text.push_str(&format!(
                "drawn tokens, {}: {} of {} answers differ, {} tokens drafted\n",
                drawn.drafter.name(),
                drawn.n_differing,
                drawn.n_answers,
                drawn.drafted_tokens
            ));
        }
        for absent in &self.absent {
            text.push_str(&format!("absent: {absent}\n"));
        }
        text.push('\n');
        text
    }
}

fn length_name(k: Option<u32>) -> String {
    k.map_or_else(|| "auto".to_owned(), |k| k.to_string())
}

/// Tokens that a step after the prompt gives; without drafts it is one.
fn tokens_per_step<'a>(points: impl Iterator<Item = &'a Point>) -> Option<f64> {
    let (steps, tokens) = points.fold((0.0, 0.0), |(steps, tokens), point| {
        let (n_steps, n_tokens) = after_prompt(point.steps, point.n_tokens);
        (steps + n_steps, tokens + n_tokens)
    });
    (steps > 0.0).then(|| tokens / steps)
}

/// Steps and tokens without the prompt's last step, which gives the first token.
fn after_prompt(n_steps: u32, n_tokens: usize) -> (f64, f64) {
    (f64::from(n_steps.saturating_sub(1)), n_tokens.saturating_sub(1) as f64)
}

fn length_table(points: &[Point]) -> String {
    let mut rows = Vec::new();
    for drafter in drafters(points) {
        for k in lengths(points) {
            let same = |point: &&Point| point.drafter == drafter && point.k == k;
            let of = || points.iter().filter(same);
            let rates = categories(points).into_iter();
            let rates = rates.filter_map(|category| rate(points, drafter, k, category));
            rows.push(vec![
                drafter.name().to_owned(),
                length_name(k),
                number(geometric_mean(rates), 1),
                number(speed_up(points, drafter, (k, Some(0))), 2),
                number(acceptance(of()), 2),
                number(tokens_per_step(of()), 2),
                number(of().map(|point| point.bloat).reduce(f64::max), 2),
                of().filter(|point| !point.identical).count().to_string(),
            ]);
        }
    }
    let header =
        ["drafter", "K", "tok/s", "speed-up", "accepted", "tokens a step", "bloat", "differ"];
    markdown(&header, &rows)
}

fn category_table(points: &[Point]) -> String {
    let fixed = |point: &&Point| point.k.is_some_and(|k| k > 0);
    let row = |(drafter, category): (Drafter, &'static str)| {
        let best = best_fixed(points, drafter, category);
        let off = rate(points, drafter, Some(0), category);
        let auto = rate(points, drafter, None, category);
        let same =
            |point: &&Point| point.drafter == drafter && point.category == category && fixed(point);
        vec![
            category.to_owned(),
            drafter.name().to_owned(),
            number(off, 1),
            best.map_or_else(|| "-".to_owned(), |(k, _)| k.to_string()),
            number(best.map(|(_, rate)| rate), 1),
            number(auto, 1),
            number(auto.zip(off).map(|(auto, off)| auto / off), 2),
            number(acceptance(points.iter().filter(same)), 2),
        ]
    };
    let pairs = categories(points)
        .into_iter()
        .flat_map(|category| drafters(points).into_iter().map(move |drafter| (drafter, category)));
    let header =
        ["category", "drafter", "off", "best K", "best", "auto", "auto/off", "accepted, fixed K"];
    markdown(&header, &pairs.map(row).collect::<Vec<_>>())
}

fn long_table(all: &[Long]) -> String {
    let lengths: Vec<String> = all.first().map_or_else(Vec::new, |long| {
        long.tok_s.iter().map(|(n, _)| format!("tok/s of {n}")).collect()
    });
    let mut header = vec!["drafter", "K", "tokens"];
    header.extend(lengths.iter().map(String::as_str));
    header.extend(["accepted", "tokens a step", "bloat", "same"]);
    let row = |long: &Long| {
        let share = |a: u32, b: f64| (b > 0.0).then(|| f64::from(a) / b);
        let mut row =
            vec![long.drafter.name().to_owned(), length_name(long.k), long.n_tokens.to_string()];
        row.extend(long.tok_s.iter().map(|(_, tok_s)| number(*tok_s, 1)));
        let (steps, tokens) = after_prompt(long.steps, long.n_tokens);
        row.extend([
            number(share(long.accepted_tokens, f64::from(long.drafted_tokens)), 2),
            number((steps > 0.0).then(|| tokens / steps), 2),
            number(Some(long.bloat), 2),
            if long.identical { "yes" } else { "NO" }.to_owned(),
        ]);
        row
    };
    markdown(&header, &all.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompts_last_step_and_its_token_are_left_out() {
        assert_eq!(after_prompt(33, 97), (32.0, 96.0));
        assert_eq!(after_prompt(0, 0), (0.0, 0.0));
        assert_eq!(length_name(None), "auto");
    }
}
