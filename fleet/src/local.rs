//! The fleet as a whole: start, watch, change and end its processes.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use futures::future::{FutureExt, join_all, select_all, try_join_all};
use serde_json::{Value, json};
use stagebus_keys::HolderRole;
use stagebus_schemas::ids::ModelName;
use tokio::time::Instant;

use crate::broker::{BrokerOptions, LocalBroker};
use crate::error::FleetError;
use crate::process::{Launch, Process, Stopped};
use crate::spec::{BrokerChoice, FleetSpec, ShardSetFacts, hosted_login, login, shard_set};

/// How long the answers that a gateway gives may take to finish at the end: as long as coordinators
/// wait for them, by default, and less than the gateway may take to leave.
const GATEWAY_DRAIN: Duration = Duration::from_secs(10);

/// What a child process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Worker { stage: usize },
    Coordinator,
    Gateway,
}

/// The settings with which each role logs in; none without keys.
#[derive(Debug, Default)]
struct Logins {
    worker: Vec<String>,
    coordinator: Vec<String>,
    gateway: Vec<String>,
}

/// A process of the fleet besides the broker.
#[derive(Debug)]
struct Child {
    role: Role,
    process: Process,
    /// What it wrote when it was ready.
    ready: Value,
}

/// One process of the fleet, for people and measurements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Name in the log, for example `worker-0.1` (stage 0, second one) or `coordinator.0`.
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// The stage of a worker.
    pub stage: Option<usize>,
    /// The id under which it announced itself.
    pub id: Option<String>,
    /// The id of the worker of stage 0 that a coordinator runs.
    pub hosted: Option<String>,
    /// Where its metrics are to be had.
    pub metrics: Option<SocketAddr>,
}

/// A process that ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Its name.
    pub name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// The end of its log.
    pub last_lines: String,
}

/// How the fleet ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Processes that were still there at the deadline and were killed.
    pub killed: Vec<String>,
    /// Processes that left with a failure.
    pub failed: Vec<(String, ExitStatus)>,
}

/// A running fleet; killed when dropped, see the crate's description.
#[derive(Debug)]
pub struct LocalFleet {
    spec: FleetSpec,
    url: String,
    n_stages: usize,
    logins: Logins,
    /// How many workers of each stage were ever started; names are not used twice.
    n_started: Vec<usize>,
    n_coordinators_started: usize,
    children: Vec<Child>,
    broker: Option<LocalBroker>,
}

impl LocalFleet {
    /// Starts all processes at the same time and waits until each is ready.
    ///
    /// # Errors
    /// The first [`FleetError`]; what was started is killed then.
    pub async fn start(spec: FleetSpec) -> Result<Self, FleetError> {
        let ShardSetFacts { n_stages, model } = shard_set(&spec.shards)?;
        let logins = match &spec.keys {
            None => Logins::default(),
            Some(keys) => {
                let mut coordinator = login(keys, HolderRole::Coordinator, &model)?;
                if spec.host_stage0 {
                    coordinator.push(hosted_login(keys, &model)?);
                }
                let gateway = match spec.gateway {
                    Some(_) => login(keys, HolderRole::Client, &model)?,
                    None => Vec::new(),
                };
                Logins { worker: login(keys, HolderRole::Worker, &model)?, coordinator, gateway }
            }
        };
        let broker = match &spec.broker {
            BrokerChoice::Private(options) => {
                let keys = spec.keys.clone().or_else(|| options.keys.clone());
                Some(LocalBroker::start(BrokerOptions { keys, ..options.clone() }).await?)
            }
            BrokerChoice::Running(_) => None,
        };
        let url = match (&broker, &spec.broker) {
            (Some(broker), _) => broker.url(),
            (None, BrokerChoice::Running(url)) => url.clone(),
            (None, BrokerChoice::Private(_)) => String::new(),
        };
        let n_started = vec![0; n_stages];
        let mut fleet = Self {
            spec,
            url,
            n_stages,
            logins,
            n_started,
            n_coordinators_started: 0,
            children: Vec::new(),
            broker,
        };
        let mut starting = Vec::new();
        for stage in usize::from(fleet.spec.host_stage0)..n_stages {
            for _ in 0..fleet.spec.workers_per_stage {
                let route = fleet.spec.routes.workers.get(stage).cloned().flatten();
                let url = route.unwrap_or_else(|| fleet.url.clone());
                starting.push(fleet.spawn_worker(stage, &url)?);
            }
        }
        for _ in 0..fleet.spec.n_coordinators {
            let url = fleet.coordinators_url();
            starting.push(fleet.spawn_coordinator(&url)?);
        }
        let deadline = Instant::now() + fleet.spec.timeouts.ready;
        // The first failure ends the start; the processes that still wait are dropped, and so
        // killed.
        fleet.children = try_join_all(
            starting.into_iter().map(|(role, process)| wait_ready(role, process, deadline)),
        )
        .await?;
        if let Some(listen) = fleet.spec.gateway {
            let (role, process) = fleet.spawn_gateway(listen, &model)?;
            fleet.children.push(wait_ready(role, process, deadline).await?);
        }
        Ok(fleet)
    }

    /// The broker's address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The gateway's base URL for clients of its API.
    #[must_use]
    pub fn gateway(&self) -> Option<&str> {
        let mut gateways = self.children.iter().filter(|child| child.role == Role::Gateway);
        gateways.find_map(|child| child.ready["base_url"].as_str())
    }

    /// Number of stages of the shard set.
    #[must_use]
    pub fn n_stages(&self) -> usize {
        self.n_stages
    }

    /// The fleet's own broker, to crash or restart it.
    pub fn broker(&mut self) -> Option<&mut LocalBroker> {
        self.broker.as_mut()
    }

    /// Workers, coordinators and the gateway, as far as they run.
    #[must_use]
    pub fn members(&self) -> Vec<Member> {
        let member = |child: &Child| {
            Some(Member {
                name: child.process.name().to_owned(),
                pid: child.process.pid()?,
                stage: match child.role {
                    Role::Worker { stage } => Some(stage),
                    Role::Coordinator | Role::Gateway => None,
                },
                id: child.ready["id"].as_str().map(str::to_owned),
                hosted: child.ready["hosted"].as_str().map(str::to_owned),
                metrics: child.ready["metrics"].as_str().and_then(|at| at.parse().ok()),
            })
        };
        self.children.iter().filter_map(member).collect()
    }

    /// The model's name in subjects, as a member announced it.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.children.iter().find_map(|child| child.ready["model"].as_str())
    }

    /// Starts one more worker of `stage` and waits until it is ready.
    ///
    /// # Errors
    /// As [`LocalFleet::start`]; [`FleetError::NoMember`] for a stage that the shard set lacks.
    pub async fn add_worker(&mut self, stage: usize) -> Result<Member, FleetError> {
        let url = self.url.clone();
        self.add_worker_at(stage, &url).await
    }

    /// As [`LocalFleet::add_worker`], for a worker that reaches the broker at `url`.
    ///
    /// # Errors
    /// As [`LocalFleet::add_worker`].
    pub async fn add_worker_at(&mut self, stage: usize, url: &str) -> Result<Member, FleetError> {
        let started = self.spawn_worker(stage, url)?;
        self.add(started).await
    }

    /// Starts one more coordinator and waits until it is ready.
    ///
    /// # Errors
    /// As [`LocalFleet::start`].
    pub async fn add_coordinator(&mut self) -> Result<Member, FleetError> {
        let url = self.coordinators_url();
        self.add_coordinator_at(&url).await
    }

    /// As [`LocalFleet::add_coordinator`], for a coordinator that reaches the broker at `url`.
    ///
    /// # Errors
    /// As [`LocalFleet::start`].
    pub async fn add_coordinator_at(&mut self, url: &str) -> Result<Member, FleetError> {
        let started = self.spawn_coordinator(url)?;
        self.add(started).await
    }

    async fn add(&mut self, (role, process): (Role, Process)) -> Result<Member, FleetError> {
        let deadline = Instant::now() + self.spec.timeouts.ready;
        let child = wait_ready(role, process, deadline).await?;
        let name = child.process.name().to_owned();
        self.children.push(child);
        let member = self.members().into_iter().find(|member| member.name == name);
        member.ok_or(FleetError::NoMember { name })
    }

    /// Kills the member `name` without a warning, as a crash would.
    ///
    /// # Errors
    /// [`FleetError::NoMember`] if nothing of that name runs, [`FleetError::Stop`] if the system
    /// refuses.
    pub async fn kill(&mut self, name: &str) -> Result<(), FleetError> {
        let index = self.position(name)?;
        let mut child = self.children.swap_remove(index);
        child.process.kill().await
    }

    /// Stops the member `name` in its tracks: it keeps everything, answers nothing, and goes on with
    /// [`LocalFleet::thaw`].
    ///
    /// # Errors
    /// [`FleetError::NoMember`] if nothing of that name runs, [`FleetError::Stop`] if the system
    /// refuses.
    #[cfg(unix)]
    pub async fn freeze(&self, name: &str) -> Result<(), FleetError> {
        self.children[self.position(name)?].process.signal("STOP").await
    }

    /// Lets a frozen member go on.
    ///
    /// # Errors
    /// As [`LocalFleet::freeze`].
    #[cfg(unix)]
    pub async fn thaw(&self, name: &str) -> Result<(), FleetError> {
        self.children[self.position(name)?].process.signal("CONT").await
    }

    /// Asks the member `name` to leave and waits for it; returns how it ended, or `None` if it had
    /// to be killed.
    ///
    /// # Errors
    /// As [`LocalFleet::kill`].
    pub async fn retire(&mut self, name: &str) -> Result<Option<ExitStatus>, FleetError> {
        let index = self.position(name)?;
        let mut child = self.children.swap_remove(index);
        child.process.ask_to_leave();
        let deadline = Instant::now() + self.spec.timeouts.leave;
        Ok(match child.process.leave(deadline).await? {
            Stopped::Left(status) => Some(status),
            Stopped::Killed => None,
        })
    }

    /// The end of the log of the member `name`.
    ///
    /// # Errors
    /// [`FleetError::NoMember`] if nothing of that name runs.
    pub fn last_lines(&self, name: &str) -> Result<String, FleetError> {
        Ok(self.children[self.position(name)?].process.last_lines())
    }

    /// Waits until a process ends that was not asked to; workers and coordinators are removed from
    /// the fleet then.
    ///
    /// # Errors
    /// [`FleetError::Stop`] if a process cannot be waited for.
    ///
    /// # Cancel safety
    /// Cancel safe: an end that was not reported is reported by the next call.
    pub async fn ended(&mut self) -> Result<Ended, FleetError> {
        let mut waits = Vec::new();
        if let Some(broker) = &mut self.broker {
            waits.push(broker.ended().boxed());
        }
        let n_others = waits.len();
        waits.extend(self.children.iter_mut().map(|child| child.process.wait().boxed()));
        if waits.is_empty() {
            return std::future::pending().await;
        }
        let (status, index, rest) = select_all(waits).await;
        drop(rest);
        let status = status?;
        match index.checked_sub(n_others) {
            None => {
                let last_lines = match &mut self.broker {
                    Some(broker) => broker.final_lines().await,
                    None => String::new(),
                };
                // Without its server the broker is done; it must not be reported again.
                self.broker = None;
                Ok(Ended { name: "broker".to_owned(), status, last_lines })
            }
            Some(index) => {
                let last_lines = self.children[index].process.final_lines().await;
                let child = self.children.swap_remove(index);
                Ok(Ended { name: child.process.name().to_owned(), status, last_lines })
            }
        }
    }

    /// Ends the fleet in order: gateway, coordinators, workers, broker. Each group has the same
    /// deadline; what is still there then is killed.
    ///
    /// # Errors
    /// [`FleetError::Stop`] if the system refuses; the rest is killed then.
    pub async fn shutdown(mut self) -> Result<ShutdownReport, FleetError> {
        let mut report = ShutdownReport::default();
        let mut rest = std::mem::take(&mut self.children);
        let mut those = |is_one: fn(Role) -> bool| -> Vec<Child> {
            rest.extract_if(.., |child| is_one(child.role)).collect()
        };
        let gateways = those(|role| role == Role::Gateway);
        let coordinators = those(|role| role == Role::Coordinator);
        let workers = those(|role| matches!(role, Role::Worker { .. }));
        for mut group in [gateways, coordinators, workers] {
            let deadline = Instant::now() + self.spec.timeouts.leave;
            for child in &mut group {
                child.process.ask_to_leave();
            }
            let stops = join_all(group.iter_mut().map(|child| child.process.leave(deadline))).await;
            for (child, stopped) in group.iter().zip(stops) {
                let name = child.process.name().to_owned();
                match stopped? {
                    Stopped::Killed => report.killed.push(name),
                    Stopped::Left(status) if !status.success() => {
                        report.failed.push((name, status));
                    }
                    Stopped::Left(_) => {}
                }
            }
        }
        if let Some(broker) = &mut self.broker
            && !broker.stop().await?
        {
            report.killed.push("broker".to_owned());
        }
        Ok(report)
    }

    fn position(&self, name: &str) -> Result<usize, FleetError> {
        let found = self.children.iter().position(|child| child.process.name() == name);
        found.ok_or_else(|| FleetError::NoMember { name: name.to_owned() })
    }

    fn spawn_worker(&mut self, stage: usize, url: &str) -> Result<(Role, Process), FleetError> {
        let Some(n_started) = self.n_started.get_mut(stage) else {
            return Err(FleetError::NoMember { name: format!("worker-{stage}") });
        };
        let name = format!("worker-{stage}.{n_started}");
        *n_started += 1;
        let mut args = vec!["worker".into(), "--stage".into(), stage.to_string().into()];
        args.extend(self.shards_args());
        let cpus = self.spec.pinning.workers.get(stage).cloned().flatten();
        let process = self.spawn(name, args, &self.logins.worker, cpus, url)?;
        Ok((Role::Worker { stage }, process))
    }

    /// Where coordinators reach the broker.
    fn coordinators_url(&self) -> String {
        self.spec.routes.coordinators.as_ref().unwrap_or(&self.url).clone()
    }

    fn spawn_coordinator(&mut self, url: &str) -> Result<(Role, Process), FleetError> {
        let cpus = self.spec.pinning.coordinators.clone();
        let name = format!("coordinator.{}", self.n_coordinators_started);
        let mut args = vec!["coordinator".into()];
        if self.spec.host_stage0 {
            args.push("--host-stage0".into());
        }
        args.extend(self.shards_args());
        self.n_coordinators_started += 1;
        let process = self.spawn(name, args, &self.logins.coordinator, cpus, url)?;
        Ok((Role::Coordinator, process))
    }

    fn spawn_gateway(
        &self,
        listen: SocketAddr,
        model: &ModelName,
    ) -> Result<(Role, Process), FleetError> {
        let args = vec!["gateway".into(), "--listen".into(), listen.to_string().into()];
        // Lists of texts are the same in TOML and JSON.
        let list = |text: &str| json!([text]).to_string();
        let mut settings = self.logins.gateway.clone();
        settings.push(format!("gateway.models={}", list(model.as_str())));
        settings.push(format!("gateway.shards={}", list(&self.spec.shards.to_string_lossy())));
        settings.push(format!("gateway.drain_ms={}", GATEWAY_DRAIN.as_millis()));
        let process = self.spawn("gateway".to_owned(), args, &settings, None, &self.url)?;
        Ok((Role::Gateway, process))
    }

    fn shards_args(&self) -> [OsString; 2] {
        ["--shards".into(), self.spec.shards.clone().into_os_string()]
    }

    /// Adds what all children are told and starts one.
    fn spawn(
        &self,
        name: String,
        mut args: Vec<OsString>,
        login: &[String],
        cpus: Option<String>,
        url: &str,
    ) -> Result<Process, FleetError> {
        args.push("--exit-with-parent".into());
        if let Some(config) = &self.spec.config {
            args.extend(["--config".into(), config.clone().into_os_string()]);
        }
        let url = format!("broker.url={url}");
        for setting in std::iter::once(&url).chain(login).chain(&self.spec.settings) {
            args.extend(["--set".into(), setting.into()]);
        }
        let launch = Launch { name, program: self.spec.program.clone(), args, folder: None, cpus };
        Process::spawn(launch, self.spec.log.clone())
    }
}

async fn wait_ready(
    role: Role,
    mut process: Process,
    deadline: Instant,
) -> Result<Child, FleetError> {
    let ready = process.ready(deadline).await?;
    Ok(Child { role, process, ready })
}

/// The most memory that the process `pid` ever had resident, in bytes (Linux only).
///
/// # Errors
/// [`FleetError::File`] if the process is gone or the platform does not tell.
pub fn peak_rss_bytes(pid: u32) -> Result<u64, FleetError> {
    memory_bytes(pid, "VmHWM:")
}

/// The memory that the process `pid` has resident now, in bytes (Linux only).
///
/// # Errors
/// As [`peak_rss_bytes`].
pub fn rss_bytes(pid: u32) -> Result<u64, FleetError> {
    memory_bytes(pid, "VmRSS:")
}

/// The memory that the process `pid` has resident now and for itself alone, mapped files left out, in
/// bytes (Linux only).
///
/// # Errors
/// As [`peak_rss_bytes`].
pub fn own_bytes(pid: u32) -> Result<u64, FleetError> {
    memory_bytes(pid, "RssAnon:")
}

fn memory_bytes(pid: u32, field: &str) -> Result<u64, FleetError> {
    let path = Path::new("/proc").join(pid.to_string()).join("status");
    let text = std::fs::read_to_string(&path)
        .map_err(|source| FleetError::File { path: path.clone(), source })?;
    let kilobytes = text.lines().find_map(|line| {
        line.strip_prefix(field)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| FleetError::File {
        path,
        source: std::io::Error::from(std::io::ErrorKind::InvalidData),
    })
}

#[cfg(all(test, unix))]
mod tests;
