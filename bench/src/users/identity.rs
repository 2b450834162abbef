//! Whether a user's tokens depend on anything else: alone, beside 15 others, with speculation, and
//! on a fresh fleet that knows no prompt, takes prompts in smaller parts and has so little KV memory
//! that sessions give way and are replayed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;

use super::contestant::{self, Contestant, Kind};
use super::matrix::MANY;
use super::{Context, Part};
use crate::load::{self, Ask, Served};
use crate::node_fleet::NodeFleet;

/// Most tokens compared of an answer.
const MAX_TOKENS: usize = 64;

/// Tokens drafted per step in the turns with speculation.
const DRAFT_TOKENS: u32 = 5;

/// KV memory of a worker of the cramped fleet, in MiB. That is about 1,900 tokens: the prompts of 16
/// users, but not their answers.
const CRAMPED_MIB: u64 = 14;

/// Rows of a micro-batch there, and so most rows of a part of a prompt.
const CRAMPED_ROWS: u32 = 40;

/// Longest wait for an announcement.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Identity {
    /// The fleet.
    pub kind: Kind,
    /// Prompts compared.
    pub n_prompts: usize,
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Prompts, by number, whose tokens beside 15 others differ from those alone.
    pub differ_with_neighbours: Vec<usize>,
    /// Prompts, by number, whose tokens with speculation, beside 15 others, differ from those alone.
    pub differ_with_speculation: Vec<usize>,
    /// Tokens drafted in all; without any there was no speculation.
    pub drafted_tokens: u32,
    /// Prompt tokens that the answers alone found in the prefix cache.
    pub cached_tokens: u32,
    /// Prompts, by number, whose tokens on the cramped fleet, beside 15 others, differ.
    pub differ_cramped: Vec<usize>,
    /// Times that a session gave way there and was replayed; without any, nothing was shown of that.
    pub n_replays: u64,
}

impl Identity {
    /// Whether tokens were drafted and sessions gave way: without, equality shows little.
    #[must_use]
    pub fn shows_all(&self) -> bool {
        self.drafted_tokens > 0 && self.n_replays > 0
    }

    /// Share of the prompts whose tokens were always the same.
    #[must_use]
    pub fn share(&self) -> Option<f64> {
        let differing: BTreeSet<usize> = self
            .differ_with_neighbours
            .iter()
            .chain(&self.differ_with_speculation)
            .chain(&self.differ_cramped)
            .copied()
            .collect();
        let n_equal = self.n_prompts.saturating_sub(differing.len());
        (self.n_prompts > 0).then(|| n_equal as f64 / self.n_prompts as f64)
    }
}

/// Compares the first prompts on one fleet.
///
/// # Errors
/// A request that fails.
pub(super) async fn run(context: &Context, contestant: &Contestant) -> anyhow::Result<Identity> {
    let n_prompts = context.args.check_prompts.min(context.prompts.len());
    let max_tokens = context.n_tokens().min(MAX_TOKENS);
    let mut identity = Identity {
        kind: contestant.kind(),
        n_prompts,
        max_tokens,
        differ_with_neighbours: Vec::new(),
        differ_with_speculation: Vec::new(),
        drafted_tokens: 0,
        cached_tokens: 0,
        differ_cramped: Vec::new(),
        n_replays: 0,
    };
    let Some(fleet) = contestant.fleet() else { return Ok(identity) };
    context.note(&format!("comparing the tokens of {n_prompts} prompts"));
    fleet.join_cores().await?;
    let asks = |draft_tokens: u32| -> anyhow::Result<Vec<Ask<'_>>> {
        let max_tokens = u32::try_from(max_tokens)?;
        let prompts = context.prompts.iter().take(n_prompts);
        let draft_tokens = Some(draft_tokens);
        Ok(prompts
            .map(|prompt| Ask {
                prompt: &prompt.tokens,
                max_tokens,
                draft_tokens,
                ..Ask::default()
            })
            .collect())
    };
    let plain = asks(0)?;
    let mut alone = Vec::with_capacity(plain.len());
    for ask in &plain {
        alone.push(load::one(fleet, ask, Instant::now()).await?);
    }
    identity.cached_tokens = alone.iter().map(|served| served.usage.cached_tokens).sum();
    let beside = load::users(fleet, MANY, &plain).await?;
    identity.differ_with_neighbours = differing(&alone, &beside);
    if context.args.has(Part::Speculation) {
        let drafted = load::users(fleet, MANY, &asks(DRAFT_TOKENS)?).await?;
        identity.differ_with_speculation = differing(&alone, &drafted);
        identity.drafted_tokens = drafted.iter().map(|served| served.usage.drafted_tokens).sum();
    }
    if let Some((cramped, n_replays)) = cramped(context, contestant.kind(), &plain).await? {
        identity.differ_cramped = differing(&alone, &cramped);
        identity.n_replays = n_replays;
    }
    Ok(identity)
}

/// The answers of a fresh fleet with little KV memory, 16 at the same time, and how often a session
/// was replayed.
async fn cramped(
    context: &Context,
    kind: Kind,
    asks: &[Ask<'_>],
) -> anyhow::Result<Option<(Vec<Served>, u64)>> {
    let settings = [
        format!("worker.kv_memory_mib={CRAMPED_MIB}"),
        format!("worker.batch_rows={CRAMPED_ROWS}"),
        "coordinator.draft=off".to_owned(),
        // Sessions are let in without a look at what their answers will need.
        "coordinator.kv_percent=0".to_owned(),
    ];
    let Some(plan) = contestant::plan(context, kind, settings)? else { return Ok(None) };
    context.note("the same on a fleet with little KV memory");
    let fleet = NodeFleet::start(&plan).await?;
    fleet.join_cores().await?;
    let served = load::users(&fleet, MANY, asks).await?;
    let n_replays = n_replays(&fleet).await?;
    fleet.end().await?;
    Ok(Some((served, n_replays)))
}

/// What the coordinator's next announcement says of replayed sessions.
async fn n_replays(fleet: &NodeFleet) -> anyhow::Result<u64> {
    let subject = fleet.subjects().coordinator_all();
    let mut announcements = fleet.bus().subscribe(&subject).await?;
    let heard = tokio::time::timeout(PATIENCE, announcements.next()).await?;
    let heard = heard.context("the connection is closed")?;
    Ok(heard.decode::<CoordinatorAnnouncement>()?.recoveries)
}

/// Numbers of the answers whose tokens differ.
fn differing(alone: &[Served], others: &[Served]) -> Vec<usize> {
    let pairs = alone.iter().zip(others).enumerate();
    pairs.filter(|(_, (one, other))| one.tokens != other.tokens).map(|(index, _)| index).collect()
}

#[cfg(test)]
mod tests {
    use stagebus_shards::WeightMode;

    use super::*;
    use crate::load::served;

    #[test]
    fn answers_that_differ_are_numbered() {
        let one = served(0.0, &[(1.0, 2)]);
        let other = served(5.0, &[(9.0, 3)]);
        let later = served(7.0, &[(8.0, 2)]);
        assert_eq!(differing(&[one.clone(), one.clone()], &[later, other]), [1]);
    }

    #[test]
    fn a_prompt_that_differs_twice_counts_once() {
        let identity = Identity {
            kind: Kind::nodes(2, WeightMode::Compact),
            n_prompts: 4,
            max_tokens: 64,
            differ_with_neighbours: vec![1],
            differ_with_speculation: vec![1, 2],
            drafted_tokens: 9,
            cached_tokens: 32,
            differ_cramped: vec![2],
            n_replays: 1,
        };
        assert_eq!(identity.share(), Some(0.5));
        assert_eq!(Identity { n_prompts: 0, ..identity }.share(), None);
    }
}
