//! A fleet of nodes. A node is a core: its worker has one inference thread and is tied to it.
//!
//! Everything else that a fleet needs (broker, coordinator, and whoever asks) is tied to the cores
//! of its nodes as well, so that N nodes are N cores and nothing more. With more stages than cores
//! the stages share cores in turn. Its processes reach the broker directly, or over links
//! ([`wiring`]).

pub mod wiring;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, BusOptions};
use stagebus_fleet::{BrokerChoice, FleetSpec, LocalFleet};
use stagebus_schemas::subjects::Subjects;
use stagebus_shards::ShardSet;

use crate::fleet_run;
use crate::harness::machine;
use crate::link::Link;
use wiring::{WiredBroker, Wiring};

/// KV memory of a worker, in MiB: 32 users with a thousand tokens each and a long prompt beside.
const KV_MEMORY_MIB: u64 = 768;

/// Which fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// The shard set.
    pub shards: std::path::PathBuf,
    /// The cores of the nodes; empty where processes cannot be tied.
    pub cpus: Vec<usize>,
    /// Settings beside those of a node, each `table.key=value`.
    pub settings: Vec<String>,
    /// The coordinator runs the first stage in its process, on that stage's node.
    pub host_stage0: bool,
}

impl NodePlan {
    /// A fleet on `n_nodes` cores of `machine`, where processes can be tied. The machine is the one
    /// that was looked at before this process tied itself to cores of a fleet.
    pub fn on_nodes(
        shards: &std::path::Path,
        n_nodes: usize,
        machine: &machine::Machine,
        settings: impl IntoIterator<Item = String>,
    ) -> Self {
        let cpus = match machine::can_pin() {
            true => node_cpus(n_nodes, machine.n_cpus),
            false => Vec::new(),
        };
        let settings = settings.into_iter().collect();
        Self { shards: shards.to_owned(), cpus, settings, host_stage0: false }
    }
}

/// A running fleet of nodes and a connection to its broker.
#[derive(Debug)]
pub struct NodeFleet {
    fleet: LocalFleet,
    bus: Bus,
    subjects: Subjects,
    cpus: Vec<usize>,
    broker_pid: Option<u32>,
    /// The broker of a fleet with links; the last to end.
    wired: Option<Box<WiredBroker>>,
}

/// Processor time of the processes of a fleet, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CpuTime {
    /// The broker.
    pub broker_ms: f64,
    /// The coordinator.
    pub coordinator_ms: f64,
    /// The worker of each stage.
    pub worker_ms: Vec<f64>,
    /// Whoever asks: this process.
    pub load_ms: f64,
}

impl CpuTime {
    /// The time used since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            broker_ms: self.broker_ms - earlier.broker_ms,
            coordinator_ms: self.coordinator_ms - earlier.coordinator_ms,
            worker_ms: self
                .worker_ms
                .iter()
                .zip(&earlier.worker_ms)
                .map(|(now, then)| now - then)
                .collect(),
            load_ms: self.load_ms - earlier.load_ms,
        }
    }
}

/// The last `n_nodes` of `n_cpus` cores, or all if there are fewer: the first one often serves
/// interrupts.
#[must_use]
pub fn node_cpus(n_nodes: usize, n_cpus: usize) -> Vec<usize> {
    (0..n_cpus).rev().take(n_nodes).collect()
}

/// Cores in the form of `taskset`.
#[must_use]
pub fn cpu_list(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn spec(plan: &NodePlan, n_stages: usize) -> anyhow::Result<FleetSpec> {
    let mut spec = FleetSpec::new(machine::this_program()?, plan.shards.clone());
    spec.settings = vec![
        "worker.profile=fast".to_owned(),
        "worker.threads=1".to_owned(),
        format!("worker.kv_memory_mib={KV_MEMORY_MIB}"),
    ];
    spec.settings.extend(plan.settings.iter().cloned());
    spec.host_stage0 = plan.host_stage0;
    if !plan.cpus.is_empty() {
        let all = cpu_list(&plan.cpus);
        let core = |stage: usize| Some(plan.cpus[stage % plan.cpus.len()].to_string());
        spec.pinning.workers = (0..n_stages).map(core).collect();
        spec.pinning.coordinators = if plan.host_stage0 { core(0) } else { Some(all.clone()) };
        if let BrokerChoice::Private(broker) = &mut spec.broker {
            broker.cpus = Some(all);
        }
    }
    Ok(spec)
}

impl NodeFleet {
    /// Starts a fleet and connects to it.
    ///
    /// # Errors
    /// A fleet that does not start, a broker that cannot be reached.
    pub async fn start(plan: &NodePlan) -> anyhow::Result<Self> {
        Self::start_wired(plan, &Wiring::Direct).await
    }

    /// As [`NodeFleet::start`], with processes that reach the broker over links.
    ///
    /// # Errors
    /// As [`NodeFleet::start`].
    pub async fn start_wired(plan: &NodePlan, wiring: &Wiring) -> anyhow::Result<Self> {
        let set = ShardSet::open(&plan.shards)?;
        let model = set.manifest.model.parse().context("the model's name is not valid")?;
        let n_stages = set.manifest.n_stages();
        let mut spec = spec(plan, n_stages)?;
        let wired = match &spec.broker {
            BrokerChoice::Private(options) if *wiring != Wiring::Direct => {
                let start = WiredBroker::start(options.clone(), wiring, n_stages);
                let wired = Box::pin(start).await?;
                spec.routes = wired.routes();
                spec.broker = BrokerChoice::Running(wired.broker().url());
                Some(Box::new(wired))
            }
            _ => None,
        };
        let mut fleet = LocalFleet::start(spec).await.context("the fleet did not start")?;
        let bus = Bus::connect(BusOptions::new(fleet.url(), "stagebus-bench")).await?;
        let broker_pid = match &wired {
            Some(wired) => wired.broker().pid(),
            None => fleet.broker().and_then(|broker| broker.pid()),
        };
        let (subjects, cpus) = (Subjects::new(&model), plan.cpus.clone());
        Ok(Self { fleet, bus, subjects, cpus, broker_pid, wired })
    }

    /// The link of the workers of a stage, if they have one.
    #[must_use]
    pub fn worker_link(&self, stage: usize) -> Option<&Link> {
        self.wired.as_ref()?.worker(stage)
    }

    /// The link of the coordinator, if it has one.
    #[must_use]
    pub fn coordinator_link(&self) -> Option<&Link> {
        self.wired.as_ref()?.coordinator()
    }

    /// The most memory that each process has used so far, in bytes, by its name (Linux only).
    #[must_use]
    pub fn peak_rss_bytes(&self) -> Vec<(String, u64)> {
        let peak = |member: stagebus_fleet::Member| {
            Some((member.name, stagebus_fleet::peak_rss_bytes(member.pid).ok()?))
        };
        self.fleet.members().into_iter().filter_map(peak).collect()
    }

    /// The connection to its broker.
    #[must_use]
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// The model's subjects.
    #[must_use]
    pub fn subjects(&self) -> &Subjects {
        &self.subjects
    }

    /// Number of stages.
    #[must_use]
    pub fn n_stages(&self) -> usize {
        self.fleet.n_stages()
    }

    /// Whether its processes are tied to cores.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        !self.cpus.is_empty()
    }

    /// Where the last stage's answers to the coordinator go.
    #[must_use]
    pub fn head_subject(&self) -> Option<String> {
        let members = self.fleet.members();
        let coordinator = members.iter().find(|member| member.stage.is_none())?;
        Some(self.subjects.head(&coordinator.id.as_deref()?.parse().ok()?))
    }

    /// Ties this process, which asks, to the cores of the fleet.
    ///
    /// # Errors
    /// `taskset` fails.
    pub async fn join_cores(&self) -> anyhow::Result<()> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        machine::tie_to(std::process::id(), &cpu_list(&self.cpus)).await
    }

    /// Processor time that the processes have used so far, if the platform tells.
    #[must_use]
    pub fn cpu_time(&self) -> Option<CpuTime> {
        let mut time = CpuTime {
            broker_ms: machine::cpu_ms(self.broker_pid?)?,
            coordinator_ms: 0.0,
            worker_ms: vec![0.0; self.fleet.n_stages()],
            load_ms: machine::cpu_ms(std::process::id())?,
        };
        for member in self.fleet.members() {
            let used = machine::cpu_ms(member.pid)?;
            match member.stage {
                Some(stage) => *time.worker_ms.get_mut(stage)? += used,
                None => time.coordinator_ms += used,
            }
        }
        Some(time)
    }

    /// Ends the fleet in order.
    ///
    /// # Errors
    /// A part that had to be killed, or left with a failure.
    pub async fn end(self) -> anyhow::Result<()> {
        fleet_run::end(self.fleet).await?;
        match self.wired {
            Some(wired) => wired.end().await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_the_last_cores_and_no_more_than_there_are() {
        assert_eq!(node_cpus(1, 4), [3]);
        assert_eq!(node_cpus(2, 4), [3, 2]);
        assert_eq!(node_cpus(3, 2), [1, 0]);
        assert_eq!(cpu_list(&[1, 0]), "1,0");
    }

    #[test]
    fn stages_take_the_cores_in_turn_and_the_rest_shares_all_of_them() {
        let plan = NodePlan {
            shards: "set".into(),
            cpus: vec![1, 0],
            settings: vec!["worker.engine=stateful".to_owned()],
            host_stage0: false,
        };
        let spec = spec(&plan, 3).expect("the running program is known");
        let cores = ["1", "0", "1"].map(|core| Some(core.to_owned()));
        assert_eq!(spec.pinning.workers, cores);
        assert_eq!(spec.pinning.coordinators.as_deref(), Some("1,0"));
        assert!(spec.settings.contains(&"worker.engine=stateful".to_owned()));
        let hosting = NodePlan { host_stage0: true, ..plan.clone() };
        let hosting = super::spec(&hosting, 3).expect("as above");
        assert_eq!(hosting.pinning.coordinators.as_deref(), Some("1"), "the node of stage 0");
        assert!(hosting.host_stage0);
        let free = super::spec(&NodePlan { cpus: vec![], ..plan }, 3).expect("as above");
        assert!(free.pinning.workers.is_empty());
    }

    #[test]
    fn processor_time_is_a_difference() {
        let time = |ms: f64| CpuTime {
            broker_ms: ms,
            coordinator_ms: 2.0 * ms,
            worker_ms: vec![3.0 * ms],
            load_ms: ms,
        };
        assert_eq!(time(5.0).since(&time(4.0)), time(1.0));
    }
}
