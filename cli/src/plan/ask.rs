//! Questions to the nodes: who they are, what the probe takes, how long messages take.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use futures::future::try_join_all;
use indicatif::ProgressBar;
use stagebus_bus::{Bus, BusEvent};
use stagebus_plan::LinkTimes;
use stagebus_schemas::codec;
use stagebus_schemas::ids::NodeId;
use stagebus_schemas::messages::node::{
    NodeAnswer, NodeDescription, NodeMeasurement, NodeQuery, NodeQuestion, NodeReply, Probe, Ways,
};
use stagebus_schemas::subjects::nodes;
use stagebus_schemas::version::MessageVersion;
use tokio::time::Instant;

use super::error::AskError;
use crate::progress::count_bar;

/// How long nodes may take to say that they are there.
const LISTEN: Duration = Duration::from_secs(2);

/// Longest wait for an answer that needs no work: the node may be busy with an echo that is lost.
const ANSWER: Duration = Duration::from_secs(10);

/// Longest wait for the times of all echoes to a node.
const WAYS: Duration = Duration::from_secs(90);

/// How often a node is asked whether it is done. Rarely enough that its passes are not disturbed.
const LOOK: Duration = Duration::from_millis(500);

/// Echoes between two nodes, for each size; their median counts.
const ECHOES: u32 = 15;

/// Bytes of a step beside its hidden state: ids, positions, names, times of earlier stages.
const STEP_BYTES: usize = 400;

/// A node that answered.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) id: NodeId,
    /// Its name, unlike that of any other node.
    pub(super) name: String,
    pub(super) about: NodeDescription,
}

/// A node that was measured.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    pub(super) id: NodeId,
    pub(super) name: String,
    pub(super) about: NodeDescription,
    pub(super) found: NodeMeasurement,
}

impl Measured {
    /// Devices that were left out, and why.
    pub(super) fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        let devices = self.found.devices.iter();
        devices.filter_map(|device| Some((device.device.as_str(), device.failure.as_deref()?)))
    }
}

/// Asks everybody who they are.
///
/// # Errors
/// [`AskError::Nobody`], [`AskError::TooFew`], and what the broker forbids.
pub(super) async fn call(bus: &Bus, expected: Option<usize>) -> anyhow::Result<Vec<Found>> {
    let inbox = bus.new_inbox();
    let mut events = bus.events();
    let mut answers = bus.subscribe(&inbox).await?;
    let question = codec::encode(&question(NodeQuery::Describe))?;
    bus.publish_with_reply(nodes::CALL, &inbox, question.into()).await?;
    let deadline = Instant::now() + LISTEN;
    let mut found: Vec<Found> = Vec::new();
    while expected.is_none_or(|expected| found.len() < expected) {
        let heard = async {
            loop {
                tokio::select! {
                    answer = answers.next() => return Ok(answer),
                    event = events.next() => match event {
                        Some(BusEvent::PermissionViolation(violation)) => return Err(violation),
                        Some(_) => {}
                        None => return Ok(None),
                    },
                }
            }
        };
        let Ok(answer) = tokio::time::timeout_at(deadline, heard).await else { break };
        let answer = answer?.context("the connection to the broker is closed")?;
        if answer.no_responders {
            break;
        }
        match answer.decode::<NodeReply>() {
            Ok(NodeReply { node, answer: NodeAnswer::Here(about), .. }) => {
                let name = unlike(&about.name, &found);
                found.push(Found { id: node, name, about });
            }
            // A node of another version; without it the plan may still be a good one.
            Ok(_) => tracing::warn!("an answer to another question was skipped"),
            Err(error) => tracing::warn!(error = %error, "a node's answer cannot be read"),
        }
    }
    let (n_found, waited) = (found.len(), LISTEN);
    if n_found == 0 {
        return Err(AskError::Nobody { waited }.into());
    }
    // The same nodes in the same order, whoever answers first.
    found.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    if let Some(expected) = expected.filter(|&expected| n_found < expected) {
        let names: Vec<&str> = found.iter().map(|node| node.name.as_str()).collect();
        let names = names.join(", ");
        return Err(AskError::TooFew { expected, found: n_found, names, waited }.into());
    }
    Ok(found)
}

/// A name that can be a file's and that no other node has.
fn unlike(name: &str, others: &[Found]) -> String {
    let legal = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let plain: String = name.chars().map(legal).collect();
    let plain = plain.trim_start_matches('.');
    let plain = if plain.is_empty() { "node" } else { plain };
    let taken = |name: &str| others.iter().any(|other| other.name == name);
    let numbered = (2..).map(|n| format!("{plain}-{n}"));
    let mut names = std::iter::once(plain.to_owned()).chain(numbered);
    names.find(|name| !taken(name)).unwrap_or_default()
}

/// Lets every node measure the probe: nodes on one host one after the other, since they would disturb
/// each other, hosts at the same time.
///
/// # Errors
/// [`AskError`] of the first node that cannot.
pub(super) async fn measure(
    bus: &Bus,
    nodes: Vec<Found>,
    probe: &Probe,
    quiet: bool,
) -> anyhow::Result<Vec<Measured>> {
    let bar = count_bar(quiet, 0, "measuring");
    let mut hosts: BTreeMap<String, Vec<Found>> = BTreeMap::new();
    for node in nodes {
        hosts.entry(node.about.host.clone()).or_default().push(node);
    }
    let on_host = |nodes: Vec<Found>| {
        let bar = &bar;
        async move {
            let mut measured = Vec::new();
            for node in nodes {
                let found = measure_one(bus, &node, probe, bar).await?;
                let Found { id, name, about } = node;
                measured.push(Measured { id, name, about, found });
            }
            Ok::<_, AskError>(measured)
        }
    };
    let all = try_join_all(hosts.into_values().map(on_host)).await;
    bar.finish_and_clear();
    let mut all: Vec<Measured> = all?.into_iter().flatten().collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

async fn measure_one(
    bus: &Bus,
    node: &Found,
    probe: &Probe,
    bar: &ProgressBar,
) -> Result<NodeMeasurement, AskError> {
    let (id, name) = (&node.id, &node.name);
    let other = || AskError::OtherAnswer { name: name.clone(), asked: "measure" };
    match ask(bus, (id, name), NodeQuery::Measure(probe.clone()), ANSWER).await? {
        NodeAnswer::Begun => {}
        _ => return Err(other()),
    }
    // What the bar has of this node.
    let (mut done, mut total) = (0, 0);
    loop {
        tokio::time::sleep(LOOK).await;
        match ask(bus, (id, name), NodeQuery::Measured, ANSWER).await? {
            NodeAnswer::Underway(progress) => {
                bar.inc_length(u64::from(progress.total.saturating_sub(total)));
                bar.inc(u64::from(progress.done.saturating_sub(done)));
                (done, total) = (progress.done, progress.total);
            }
            NodeAnswer::Measured(found) => return Ok(found),
            _ => return Err(other()),
        }
    }
}

/// Measures the ways between every two nodes. A way there and one back through the same broker are
/// taken to be equal: without synchronised clocks nobody can tell them apart, and a token goes around
/// a ring.
///
/// # Errors
/// [`AskError`].
pub(super) async fn links(
    bus: &Bus,
    nodes: &[Measured],
    hidden_dim: usize,
) -> anyhow::Result<LinkTimes> {
    let n = nodes.len();
    let hidden = u32::try_from(hidden_dim * size_of::<f32>() + STEP_BYTES)?;
    let token = u32::try_from(STEP_BYTES)?;
    let mut times = LinkTimes { hidden_ms: vec![vec![0.0; n]; n], token_ms: vec![vec![0.0; n]; n] };
    for from in 0..n {
        for to in from + 1..n {
            for (bytes, table) in [(hidden, &mut times.hidden_ms), (token, &mut times.token_ms)] {
                let one_way = one_way_ms(bus, &nodes[from], &nodes[to].id, bytes).await?;
                table[from][to] = one_way;
                table[to][from] = one_way;
            }
        }
    }
    Ok(times)
}

async fn one_way_ms(bus: &Bus, from: &Measured, to: &NodeId, bytes: u32) -> Result<f64, AskError> {
    let ways = Ways { to: to.clone(), bytes, back_bytes: bytes, count: ECHOES };
    match ask(bus, (&from.id, &from.name), NodeQuery::Ways(ways), WAYS).await? {
        NodeAnswer::Ways(mut times) => {
            times.sort_unstable();
            let median = times.get(times.len() / 2).copied().unwrap_or(0);
            Ok(Duration::from_nanos(median).as_secs_f64() * 1e3 / 2.0)
        }
        _ => Err(AskError::OtherAnswer { name: from.name.clone(), asked: "ways" }),
    }
}

fn question(query: NodeQuery) -> NodeQuestion {
    NodeQuestion { version: MessageVersion::CURRENT, query }
}

async fn ask(
    bus: &Bus,
    (id, name): (&NodeId, &str),
    query: NodeQuery,
    timeout: Duration,
) -> Result<NodeAnswer, AskError> {
    let reply: Result<NodeReply, _> = bus.request(&nodes::ask(id), &question(query), timeout).await;
    match reply {
        Ok(NodeReply { answer: NodeAnswer::Failed(source), .. }) => {
            Err(AskError::Failed { name: name.to_owned(), source })
        }
        Ok(reply) => Ok(reply.answer),
        Err(source) => Err(AskError::Unanswered { name: name.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_fit_for_files_and_differ() {
        let about = NodeDescription {
            name: String::new(),
            host: String::new(),
            n_cores: 1,
            memory_bytes: 0,
            free_bytes: 0,
            devices: Vec::new(),
            engine: String::new(),
            profile: String::new(),
            threads: 0,
            has_model: true,
        };
        let mut found: Vec<Found> = Vec::new();
        for (given, expected) in [
            ("desk 4", "desk-4"),
            ("desk/4", "desk-4-2"),
            ("desk-4", "desk-4-3"),
            ("../a.b", "-a.b"),
            ("", "node"),
        ] {
            let name = unlike(given, &found);
            assert_eq!(name, expected, "{given:?}");
            found.push(Found { id: NodeId::random(), name, about: about.clone() });
        }
    }
}
