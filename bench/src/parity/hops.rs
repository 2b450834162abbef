//! What a step of a fleet costs beyond the inference of its stages.
//!
//! A decode step of S stages is a ring of S + 1 messages: coordinator to stage 0, stage to stage,
//! last stage to coordinator. Each is one **hop**: encode, client, broker, wake-up, decode, queue.
//! Two figures follow, both at the median:
//! - the ring's overhead (period less inference) divided by its hops;
//! - the marginal hop: the ring's overhead with 2 stages less that with 1.
//!
//! The claim takes the larger one.

use serde::Serialize;
use stagebus_fleet::{BrokerChoice, FleetSpec};
use stagebus_shards::manifest::StageEntry;
use stagebus_shards::{ShardSet, WeightMode};

use super::breakdown::{self, Part};
use super::{Context, HOP_OVERHEAD};
use crate::fleet_run::{FleetRun, StepTime};
use crate::harness::claims::Claim;
use crate::harness::stats::{Summary, median};
use crate::harness::{interleave, machine, output};

/// Which cores the processes of a fleet run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Broker, workers and coordinator all on one.
    OneCore,
    /// Each worker on its own, in turn; the rest where the system likes.
    CorePerWorker,
}

impl Placement {
    /// Both.
    pub const ALL: [Self; 2] = [Self::OneCore, Self::CorePerWorker];

    /// For tables.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::OneCore => "one core",
            Self::CorePerWorker => "core per worker",
        }
    }

    /// Sets the cores of a fleet; without `cpu` processes cannot be tied.
    pub(super) fn apply(self, spec: &mut FleetSpec, cpu: Option<usize>, n_stages: usize) {
        let Some(cpu) = cpu else { return };
        let n_cpus = machine::n_cpus();
        let core = |stage: usize| match self {
            Self::OneCore => cpu,
            Self::CorePerWorker => (cpu + stage) % n_cpus,
        };
        spec.pinning.workers = (0..n_stages).map(|stage| Some(core(stage).to_string())).collect();
        if self == Self::OneCore {
            spec.pinning.coordinators = Some(cpu.to_string());
            if let BrokerChoice::Private(broker) = &mut spec.broker {
                broker.cpus = Some(cpu.to_string());
            }
        }
    }
}

/// The steps of one fleet.
#[derive(Debug, Serialize)]
pub struct Hops {
    /// Where its processes ran.
    pub placement: Placement,
    /// Its stages.
    pub n_stages: usize,
    /// Messages of a step.
    pub n_hops: usize,
    /// From one step to the next, in milliseconds.
    pub period_ms: Option<Summary>,
    /// The period less the inference of all stages, in milliseconds.
    pub overhead_ms: Option<Summary>,
    /// The overhead divided by the hops, in milliseconds.
    pub hop_ms: Option<Summary>,
    /// Median inference of each stage, in milliseconds.
    pub infer_ms: Vec<f64>,
    /// Median of each worker's own part of the overhead: decode, queue, choose, encode.
    pub worker_ms: Vec<f64>,
    /// Median from the head's message to the next step's: the coordinator with its two legs.
    pub coordinator_ms: Option<f64>,
    /// Mean overhead as the coordinator reports it, median over unobserved requests.
    pub unobserved_overhead_ms: Option<f64>,
    /// Tokens per second of unobserved requests, median.
    pub tok_s: Option<f64>,
    /// Where the time of a token goes.
    pub parts: Vec<Part>,
}

/// The tokens of a one-stage fleet in the fast profile.
///
/// # Errors
/// A fleet that does not run.
pub(super) async fn reference_tokens(context: &Context) -> anyhow::Result<Vec<u32>> {
    let fleet = FleetRun::start(context.fleet(1, Placement::OneCore)?).await?;
    let answer = fleet.ask(&context.prompt, context.n_tokens, false).await;
    fleet.end().await?;
    let tokens = answer?.tokens;
    anyhow::ensure!(tokens.len() > 1, "the answer to the prompt has no token to time: {tokens:?}");
    Ok(tokens)
}

/// Measures fleets of these stage counts in every placement.
///
/// # Errors
/// Tokens of a one-stage fleet that differ from `reference`, or of any fleet between two requests;
/// a fleet that does not run.
pub(super) async fn run(
    context: &Context,
    stages: &[usize],
    reference: &[u32],
) -> anyhow::Result<Vec<Hops>> {
    let mut all = Vec::new();
    for placement in Placement::ALL {
        if placement == Placement::CorePerWorker && context.cpu.is_none() {
            continue;
        }
        output::note(context.quiet, &format!("fleets, {}", placement.describe()));
        all.extend(place(context, stages, reference, placement).await?);
    }
    Ok(all)
}

/// A fleet with what it has done so far.
#[derive(Debug)]
struct Running {
    fleet: FleetRun,
    n_stages: usize,
    /// Layers of each stage.
    layers: Vec<usize>,
    tokens: Vec<u32>,
    steps: Vec<StepTime>,
    overhead_ms: Vec<f64>,
    tok_s: Vec<f64>,
}

async fn place(
    context: &Context,
    stages: &[usize],
    reference: &[u32],
    placement: Placement,
) -> anyhow::Result<Vec<Hops>> {
    let mut fleets = Vec::new();
    for &n_stages in stages {
        let fleet = FleetRun::start(context.fleet(n_stages, placement)?).await?;
        let tokens = fleet.ask(&context.prompt, context.n_tokens, false).await?.tokens;
        anyhow::ensure!(
            n_stages > 1 || tokens == reference,
            "one stage gives other tokens when placed on {}: {tokens:?}, {reference:?}",
            placement.describe()
        );
        let manifest = ShardSet::open(context.set(n_stages, WeightMode::Exact)?)?.manifest;
        let n_layers = |stage: &StageEntry| stage.end_layer - stage.first_layer;
        let layers = manifest.stages.iter().map(n_layers).collect();
        let (steps, overhead_ms, tok_s) = (Vec::new(), Vec::new(), Vec::new());
        fleets.push(Running { fleet, n_stages, layers, tokens, steps, overhead_ms, tok_s });
    }
    interleave(context.n_rounds, &mut fleets, async |fleet, _| fleet.round(context).await).await?;
    let mut all = Vec::new();
    for fleet in fleets {
        all.push(fleet.summary(placement));
        fleet.fleet.end().await?;
    }
    Ok(all)
}

impl Running {
    async fn round(&mut self, context: &Context) -> anyhow::Result<()> {
        for observed in [false, true] {
            let answer = self.fleet.ask(&context.prompt, context.n_tokens, observed).await?;
            anyhow::ensure!(
                answer.tokens == self.tokens,
                "{} stages give other tokens than before: {:?}, {:?}",
                self.n_stages,
                answer.tokens,
                self.tokens
            );
            if observed {
                self.steps.extend(answer.steps);
            } else {
                self.overhead_ms.push(answer.timings.overhead_ms);
                self.tok_s.push(answer.timings.decode_tok_s);
            }
        }
        Ok(())
    }

    fn summary(&self, placement: Placement) -> Hops {
        let steps = &self.steps;
        let n_hops = self.n_stages + 1;
        let by_stage = |of: fn(&StepTime) -> &Vec<f64>| {
            (0..self.n_stages)
                .filter_map(|stage| {
                    median(steps.iter().filter_map(|step| of(step).get(stage).copied()))
                })
                .collect()
        };
        Hops {
            placement,
            n_stages: self.n_stages,
            n_hops,
            period_ms: Summary::of(steps.iter().map(|step| step.period_ms)),
            overhead_ms: Summary::of(steps.iter().map(StepTime::overhead_ms)),
            hop_ms: Summary::of(steps.iter().map(|step| step.overhead_ms() / n_hops as f64)),
            infer_ms: by_stage(|step| &step.infer_ms),
            worker_ms: by_stage(|step| &step.worker_ms),
            coordinator_ms: median(steps.iter().map(|step| step.coordinator_ms)),
            unobserved_overhead_ms: median(self.overhead_ms.iter().copied()),
            tok_s: median(self.tok_s.iter().copied()),
            parts: breakdown::parts(steps, &self.layers),
        }
    }
}

/// The larger one of the two figures for a hop of two stages on one core.
pub(super) fn claim(all: &[Hops]) -> Claim {
    let overhead = |n_stages| {
        let mut found = all.iter().filter(|hops| hops.placement == Placement::OneCore);
        found.find(|hops| hops.n_stages == n_stages)?.overhead_ms.map(|summary| summary.median)
    };
    match (overhead(1), overhead(2)) {
        (Some(one), Some(two)) => {
            let (share, marginal) = (two / 3.0, two - one);
            let how = format!(
                "2 stages on one core, medians: {two:.3} ms a step beyond inference over 3 hops = \
                 {share:.3} ms; less the {one:.3} ms of 1 stage = {marginal:.3} ms for the added \
                 hop; the larger one counts"
            );
            HOP_OVERHEAD.measured(share.max(marginal), how)
        }
        _ => HOP_OVERHEAD.missing("fleets of 1 and 2 stages are needed: give --stages 1,2"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hops(placement: Placement, n_stages: usize, overhead_ms: f64) -> Hops {
        Hops {
            placement,
            n_stages,
            n_hops: n_stages + 1,
            period_ms: None,
            overhead_ms: Summary::of([overhead_ms]),
            hop_ms: None,
            infer_ms: vec![],
            worker_ms: vec![],
            coordinator_ms: None,
            unobserved_overhead_ms: None,
            tok_s: None,
            parts: vec![],
        }
    }

    #[test]
    fn the_claim_is_the_larger_figure_of_the_one_core_fleets() {
        let one = Placement::OneCore;
        let claim = claim(&[hops(one, 1, 0.5), hops(one, 2, 1.25)]);
        assert_eq!((claim.value, claim.holds), (Some(0.75), Some(false)));
        let other = hops(Placement::CorePerWorker, 2, 9.0);
        let claim = super::claim(&[other, hops(one, 1, 0.5), hops(one, 2, 0.75)]);
        assert_eq!((claim.value, claim.holds), (Some(0.25), Some(true)));
        let claim = super::claim(&[hops(one, 2, 0.75)]);
        assert_eq!((claim.value, claim.holds), (None, None));
    }

    #[test]
    fn placements_tie_what_they_say() {
        let spec = || FleetSpec::new("stagebus".into(), "set".into());
        let broker = |spec: &FleetSpec| match &spec.broker {
            BrokerChoice::Private(broker) => broker.cpus.clone(),
            BrokerChoice::Running(_) => None,
        };
        let mut one = spec();
        Placement::OneCore.apply(&mut one, Some(1), 2);
        assert_eq!(one.pinning.workers, [Some("1".to_owned()), Some("1".to_owned())]);
        assert_eq!(broker(&one).as_deref(), Some("1"));
        let mut each = spec();
        Placement::CorePerWorker.apply(&mut each, Some(0), 1);
        assert_eq!(each.pinning.workers, [Some("0".to_owned())]);
        assert_eq!((each.pinning.coordinators.clone(), broker(&each)), (None, None));
        let mut free = spec();
        Placement::OneCore.apply(&mut free, None, 2);
        assert!(free.pinning.workers.is_empty());
    }
}
