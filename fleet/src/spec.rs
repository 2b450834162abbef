//! What a local fleet consists of.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use stagebus_keys::{Holder, HolderRole, KeyFolder};
use stagebus_schemas::ids::ModelName;

use crate::broker::BrokerOptions;
use crate::error::FleetError;
use crate::output::LogSink;

/// Name of the manifest in a shard set.
const MANIFEST: &str = "manifest.json";

/// The processes of a fleet and how they are started.
#[derive(Debug, Clone)]
pub struct FleetSpec {
    /// The `stagebus` program, whose subcommands `worker`, `coordinator` and `gateway` are started.
    pub program: PathBuf,
    /// The shard set.
    pub shards: PathBuf,
    /// Workers of every stage.
    pub workers_per_stage: usize,
    /// Coordinators.
    pub n_coordinators: usize,
    /// Every coordinator runs a worker of stage 0 in its own process; there are no others of that
    /// stage at the start.
    pub host_stage0: bool,
    /// Address of a gateway to the fleet's model, which starts last and ends first; none when
    /// absent.
    pub gateway: Option<SocketAddr>,
    /// A private broker, or an address.
    pub broker: BrokerChoice,
    /// Processes that reach the broker by another way.
    pub routes: Routes,
    /// Configuration file of every process; without it the one that `STAGEBUS_CONFIG` names, if
    /// any.
    pub config: Option<PathBuf>,
    /// Settings for every process, each `table.key=value`, handed on with `--set`. A worker leaves
    /// the table `coordinator` alone, and the reverse.
    pub settings: Vec<String>,
    /// Folder of keys, as `stagebus keys` makes it: every process takes the key of its role, and a
    /// private broker the configuration that matches. Nobody needs a key when absent.
    pub keys: Option<PathBuf>,
    /// Which processors the processes run on.
    pub pinning: Pinning,
    /// Where their log lines go.
    pub log: LogSink,
    /// How long things may take.
    pub timeouts: Timeouts,
}

/// Which broker a fleet uses.
#[derive(Debug, Clone)]
pub enum BrokerChoice {
    /// Starts one that belongs to the fleet.
    Private(BrokerOptions),
    /// Uses a running one at this address; it is left alone at the end.
    Running(String),
}

/// Addresses at which processes reach the broker, such as those of links to it; an absent entry
/// leaves the broker's own.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    /// By stage; all workers of a stage that the start brings share them.
    pub workers: Vec<Option<String>>,
    /// For all coordinators.
    pub coordinators: Option<String>,
}

/// Processors by process, in the form of `taskset` (Linux only); an absent entry leaves the choice
/// to the system.
#[derive(Debug, Clone, Default)]
pub struct Pinning {
    /// By stage; all workers of a stage share them.
    pub workers: Vec<Option<String>>,
    /// For all coordinators.
    pub coordinators: Option<String>,
}

/// Deadlines of a fleet.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// From the start of a process until it says that it is ready. Loading and compiling a shard
    /// of several gigabytes on a slow disk takes minutes.
    pub ready: Duration,
    /// For all coordinators to leave, and again for all workers.
    pub leave: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { ready: Duration::from_secs(300), leave: Duration::from_secs(15) }
    }
}

impl FleetSpec {
    /// One worker a stage, one coordinator and a private broker.
    #[must_use]
    pub fn new(program: PathBuf, shards: PathBuf) -> Self {
        Self {
            program,
            shards,
            workers_per_stage: 1,
            n_coordinators: 1,
            host_stage0: false,
            gateway: None,
            broker: BrokerChoice::Private(BrokerOptions::default()),
            routes: Routes::default(),
            config: None,
            settings: Vec::new(),
            keys: None,
            pinning: Pinning::default(),
            log: LogSink::default(),
            timeouts: Timeouts::default(),
        }
    }

    /// Like [`FleetSpec::new`] with the program named by `STAGEBUS_BIN`, else the running one.
    ///
    /// # Errors
    /// [`FleetError::File`] if the running program cannot be found.
    pub fn with_this_program(shards: PathBuf) -> Result<Self, FleetError> {
        let program = match stagebus_settings::environment::stagebus_bin() {
            Some(program) => program,
            None => std::env::current_exe()
                .map_err(|source| FleetError::File { path: "current program".into(), source })?,
        };
        Ok(Self::new(program, shards))
    }
}

/// What a fleet must know of its shard set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShardSetFacts {
    pub n_stages: usize,
    pub model: ModelName,
}

/// Reads the manifest of the shard set in `folder`.
pub(crate) fn shard_set(folder: &Path) -> Result<ShardSetFacts, FleetError> {
    let path = folder.join(MANIFEST);
    let text = fs::read_to_string(&path)
        .map_err(|source| FleetError::File { path: path.clone(), source })?;
    let facts = |manifest: Value| {
        let n_stages = manifest["stages"].as_array()?.len();
        let model = manifest["model"].as_str()?.parse().ok()?;
        (n_stages > 0).then_some(ShardSetFacts { n_stages, model })
    };
    serde_json::from_str(&text).ok().and_then(facts).ok_or(FleetError::Manifest { path })
}

/// The setting with which a coordinator's hosted worker logs in.
pub(crate) fn hosted_login(keys: &Path, model: &ModelName) -> Result<String, FleetError> {
    let folder = KeyFolder::open(keys)?;
    let holder = holder(keys, &folder, (HolderRole::Worker, model))?;
    Ok(format!("coordinator.host_nkey_seed_file={}", folder.seed_of(holder).display()))
}

/// The settings with which the processes of a role log in.
pub(crate) fn login(
    keys: &Path,
    role: HolderRole,
    model: &ModelName,
) -> Result<Vec<String>, FleetError> {
    let folder = KeyFolder::open(keys)?;
    let holder = holder(keys, &folder, (role, model))?;
    Ok(vec![
        format!("broker.nkey_seed_file={}", folder.seed_of(holder).display()),
        format!("broker.tls.ca_file={}", folder.ca().display()),
    ])
}

fn holder<'a>(
    keys: &Path,
    folder: &'a KeyFolder,
    (role, model): (HolderRole, &ModelName),
) -> Result<&'a Holder, FleetError> {
    folder.find(role, model).ok_or_else(|| FleetError::NoKey {
        folder: keys.to_owned(),
        role: role.as_str(),
        model: model.to_string(),
    })
}
