//! What two nodes could give: two whole models side by side, one on each node's core.
//!
//! Two cores that share something (a physical core with two threads, a cache, the memory) are less
//! than twice one core. Two independent one-node fleets that work at the same time show how much
//! less; a pipeline over the same cores cannot be expected to give more.

use serde::Serialize;
use stagebus_shards::WeightMode;

use super::Context;
use super::contestant::{Contestant, Kind};
use super::matrix::MANY;
use crate::harness::machine;
use crate::load::{self, Ask, Flow};
use crate::node_fleet::{NodeFleet, NodePlan, cpu_list, node_cpus};

/// Turns: one to warm the second fleet up, and those that count.
const N_TURNS: usize = 3;

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replicas {
    /// Users of each of the two.
    pub users: usize,
    /// Tokens per second of both together, by turn.
    pub tok_s: Vec<f64>,
}

/// Lets two one-node fleets work at the same time; `None` without two cores or a one-node fleet.
///
/// # Errors
/// A fleet that does not start, a request that fails.
pub(super) async fn run(
    context: &Context,
    contestants: &[Contestant],
) -> anyhow::Result<Option<Replicas>> {
    let one = Kind::nodes(1, WeightMode::Compact);
    let first = contestants.iter().find(|contestant| contestant.kind() == one);
    let Some(first) = first.and_then(Contestant::fleet) else { return Ok(None) };
    let cpus = context.n_cpus.map_or_else(Vec::new, |n_cpus| node_cpus(2, n_cpus));
    let &[_, other] = &cpus[..] else { return Ok(None) };
    context.note("two nodes, each with the whole model");
    let both = cpu_list(&cpus);
    // The second fleet would inherit the one core that this process may be tied to.
    machine::tie_to(std::process::id(), &both).await?;
    let plan = NodePlan {
        shards: context.sets.get(1, WeightMode::Compact)?.to_owned(),
        cpus: vec![other],
        settings: vec!["worker.engine=paged".to_owned()],
        host_stage0: false,
    };
    let second = NodeFleet::start(&plan).await?;
    let max_tokens = u32::try_from(context.n_tokens())?;
    let prompts = context.prompts.iter().cycle();
    let ask = |tokens| Ask { prompt: tokens, max_tokens, draft_tokens: Some(0), ..Ask::default() };
    let asks: Vec<Ask<'_>> = prompts.map(|prompt| ask(&prompt.tokens)).take(2 * MANY).collect();
    let (left, right) = asks.split_at(MANY);
    let mut tok_s = Vec::new();
    for turn in 0..N_TURNS {
        let answers =
            tokio::try_join!(load::users(first, MANY, left), load::users(&second, MANY, right))?;
        let rates = [answers.0, answers.1].map(|answers| Flow::of(&answers));
        if turn > 0 {
            tok_s.push(rates.iter().flatten().map(|flow| flow.tok_s).sum());
        }
    }
    second.end().await?;
    Ok(Some(Replicas { users: MANY, tok_s }))
}
