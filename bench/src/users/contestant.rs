//! Who is measured: fleets of ours, and `openvino_genai`.

use std::collections::HashMap;

use serde::Serialize;
use stagebus_engine::EngineKind;
use stagebus_schemas::messages::public::Usage;
use stagebus_shards::WeightMode;

use super::{Context, Part, UsersArgs};
use crate::contender::Contender;
use crate::genai::{self, GenaiBackend, GenaiUsers, UsersOrder, UsersTurn, find_python};
use crate::load::{self, Arrival, Ask, Served};
use crate::node_fleet::{NodeFleet, NodePlan, node_cpus};

/// What a contestant is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A fleet of ours.
    Fleet {
        /// Stages, each on a node.
        n_stages: usize,
        /// How its weights are mapped.
        weights: WeightMode,
        /// What runs its stages.
        engine: EngineKind,
    },
    /// `openvino_genai` on one core.
    Genai(GenaiUsers),
}

impl Kind {
    /// A fleet with the paged engine.
    #[must_use]
    pub const fn nodes(n_stages: usize, weights: WeightMode) -> Self {
        Self::Fleet { n_stages, weights, engine: EngineKind::Paged }
    }

    /// One node with the stateful engine.
    pub const STATEFUL: Self =
        Self::Fleet { n_stages: 1, weights: WeightMode::Compact, engine: EngineKind::Stateful };

    /// Name in tables.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Fleet { n_stages, weights, engine: EngineKind::Paged } => {
                format!("{n_stages} x {weights}")
            }
            Self::Fleet { n_stages, weights, engine } => format!("{n_stages} x {weights} {engine}"),
            Self::Genai(rival) => rival.name().to_owned(),
        }
    }
}

impl Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.name())
    }
}

/// A running contestant.
#[derive(Debug)]
pub struct Contestant {
    kind: Kind,
    runner: Runner,
    /// The tokens that each prompt gave first.
    first: HashMap<usize, Vec<u32>>,
}

#[derive(Debug)]
enum Runner {
    Fleet(Box<NodeFleet>),
    Genai(Box<Contender>),
}

/// The shard sets of all fleets.
#[must_use]
pub(super) fn shard_kinds(args: &UsersArgs) -> Vec<(usize, WeightMode)> {
    fleets(&args.stages, args.has(Part::DefaultWeights))
        .into_iter()
        .filter_map(|kind| match kind {
            Kind::Fleet { n_stages, weights, .. } => Some((n_stages, weights)),
            Kind::Genai(_) => None,
        })
        .collect()
}

/// The default weights stand beside the compact ones where claims are made: on 1 and 2 nodes.
fn fleets(stages: &[usize], default_weights: bool) -> Vec<Kind> {
    let compact = stages.iter().map(|&n_stages| Kind::nodes(n_stages, WeightMode::Compact));
    let small = stages.iter().filter(|&&n_stages| default_weights && n_stages <= 2);
    let exact = small.map(|&n_stages| Kind::nodes(n_stages, WeightMode::Exact));
    let stateful = stages.contains(&1).then_some(Kind::STATEFUL);
    compact.chain(exact).chain(stateful).collect()
}

/// What a fleet of this kind is started with; nothing for a rival.
///
/// # Errors
/// Shards that were not made.
pub(super) fn plan(
    context: &Context,
    kind: Kind,
    settings: impl IntoIterator<Item = String>,
) -> anyhow::Result<Option<NodePlan>> {
    let Kind::Fleet { n_stages, weights, engine } = kind else { return Ok(None) };
    let engine = format!("worker.engine={engine}");
    Ok(Some(NodePlan {
        shards: context.sets.get(n_stages, weights)?.to_owned(),
        cpus: context.n_cpus.map_or_else(Vec::new, |n_cpus| node_cpus(n_stages, n_cpus)),
        settings: std::iter::once(engine).chain(settings).collect(),
        host_stage0: false,
    }))
}

/// Starts all contestants; also returns why rivals are missing, if any are.
///
/// # Errors
/// A fleet of ours that does not start.
pub(super) async fn start_all(context: &Context) -> anyhow::Result<(Vec<Contestant>, Vec<String>)> {
    let mut all = Vec::new();
    for kind in fleets(&context.args.stages, context.args.has(Part::DefaultWeights)) {
        let settings = context.draft.iter().chain(&context.args.set).cloned();
        let Some(plan) = plan(context, kind, settings)? else { continue };
        context.note(&format!("starting {}", kind.name()));
        let fleet = Box::new(NodeFleet::start(&plan).await?);
        all.push(Contestant { kind, runner: Runner::Fleet(fleet), first: HashMap::new() });
    }
    let mut absent = Vec::new();
    let python = find_python(context.args.genai_python.as_deref());
    match python.filter(|_| context.args.has(Part::Genai)) {
        None => absent.push(
            "openvino_genai: left out, or no Python has it; run `cargo xtask bench-setup` or give \
             --genai-python"
                .to_owned(),
        ),
        Some(python) => {
            let one = GenaiBackend::ALL.map(GenaiUsers::One);
            for rival in one.into_iter().chain([GenaiUsers::Batch]) {
                context.note(&format!("starting {}", rival.name()));
                let cpu = context.n_cpus.map(|n_cpus| n_cpus.saturating_sub(1));
                let launch = genai::launch_users(&python, rival, &context.model, cpu);
                match Contender::start(&launch).await {
                    Ok(contender) => all.push(Contestant {
                        kind: Kind::Genai(rival),
                        runner: Runner::Genai(Box::new(contender)),
                        first: HashMap::new(),
                    }),
                    Err(error) => absent.push(format!("{error:#}")),
                }
            }
        }
    }
    Ok((all, absent))
}

impl Contestant {
    /// What it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The fleet, if it is one of ours.
    #[must_use]
    pub fn fleet(&self) -> Option<&NodeFleet> {
        match &self.runner {
            Runner::Fleet(fleet) => Some(fleet),
            Runner::Genai(_) => None,
        }
    }

    /// Lets `n_users` users ask the given prompts.
    ///
    /// # Errors
    /// A request that fails, a rival that has died.
    pub(super) async fn answer(
        &mut self,
        context: &Context,
        prompts: &[usize],
        n_users: usize,
        draft_tokens: Option<u32>,
    ) -> anyhow::Result<Vec<Served>> {
        let n_tokens = context.n_tokens();
        let tokens = prompts.iter().map(|&prompt| &context.prompts[prompt].tokens[..]);
        match &mut self.runner {
            Runner::Fleet(fleet) => {
                fleet.join_cores().await?;
                let max_tokens = u32::try_from(n_tokens)?;
                let ask = |prompt| Ask { prompt, max_tokens, draft_tokens, ..Ask::default() };
                load::users(fleet, n_users, &tokens.map(ask).collect::<Vec<_>>()).await
            }
            Runner::Genai(contender) => {
                let order = UsersOrder { prompts: tokens.collect(), n_tokens };
                let order = serde_json::to_string(&order)?;
                served(contender.order::<UsersTurn>(&order).await?)
            }
        }
    }

    /// Remembers the tokens that prompts gave first, and counts the answers that differ from them.
    pub(super) fn differing(&mut self, prompts: &[usize], answers: &[Served]) -> usize {
        let mut n_differing = 0;
        for (&prompt, served) in prompts.iter().zip(answers) {
            let first = self.first.entry(prompt).or_insert_with(|| served.tokens.clone());
            n_differing += usize::from(*first != served.tokens);
        }
        n_differing
    }

    /// Ends a fleet in order; a rival is killed.
    ///
    /// # Errors
    /// As [`NodeFleet::end`].
    pub(super) async fn end(self) -> anyhow::Result<()> {
        match self.runner {
            Runner::Fleet(fleet) => fleet.end().await,
            Runner::Genai(_) => Ok(()),
        }
    }
}

/// A rival's turn in the form of ours.
fn served(turn: UsersTurn) -> anyhow::Result<Vec<Served>> {
    anyhow::ensure!(
        turn.tokens.len() == turn.arrival_ms.len(),
        "openvino_genai gave {} answers and the times of {}",
        turn.tokens.len(),
        turn.arrival_ms.len()
    );
    let one = |(tokens, times): (Vec<u32>, Vec<f64>)| {
        let arrivals = times.into_iter().map(|at_ms| Arrival { at_ms, n_tokens: 1 }).collect();
        Served { tokens, sent_ms: 0.0, arrivals, usage: Usage::default() }
    };
    Ok(turn.tokens.into_iter().zip(turn.arrival_ms).map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_weights_and_the_stateful_engine_stand_beside_where_claims_are_made() {
        let names: Vec<String> = fleets(&[1, 2, 3], true).into_iter().map(Kind::name).collect();
        assert_eq!(
            names,
            [
                "1 x compact",
                "2 x compact",
                "3 x compact",
                "1 x exact",
                "2 x exact",
                "1 x compact stateful"
            ]
        );
        assert_eq!(fleets(&[3], true).len(), 1);
        assert_eq!(fleets(&[2], false), [Kind::nodes(2, WeightMode::Compact)]);
    }

    #[test]
    fn a_rivals_turn_becomes_answers() {
        let turn = UsersTurn {
            tokens: vec![vec![5, 6], vec![7]],
            arrival_ms: vec![vec![10.0, 20.0], vec![12.0]],
        };
        let answers = served(turn).expect("as many answers as times");
        assert_eq!(answers[0].tokens, [5, 6]);
        assert_eq!(answers[0].gaps_ms().collect::<Vec<_>>(), [10.0]);
        assert_eq!(answers[1].ttft_ms(), Some(12.0));
        let broken = UsersTurn { tokens: vec![vec![5]], arrival_ms: vec![] };
        served(broken).expect_err("times are missing");
    }
}
