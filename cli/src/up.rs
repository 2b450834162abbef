//! `stagebus up`: a whole fleet on this machine, until Ctrl-C.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use stagebus_fleet::{BrokerChoice, Ended, LocalFleet};
use stagebus_keys::{HolderRole, KeyFolder};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::subjects::Subjects;
use stagebus_settings::ProcessArgs;
use stagebus_worker::ProfileChoice;
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::exit::Outcome;
use crate::local::{self, LocalArgs, Wanted};

/// Port on which clients look for a broker when they are told nothing.
const DEFAULT_BROKER_PORT: u16 = 4222;

/// Name of a holder's configuration in its folder.
const CLIENT_CONFIG: &str = "stagebus.toml";

/// Arguments of `stagebus up`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus up --shards shard-sets/smollm2
  stagebus up --model model.gguf --stages 3 --workers-per-stage 2
  stagebus up --shards shard-sets/smollm2 --keep-jobs jobs
  stagebus up --shards shard-sets/smollm2 --broker-port 0 --json --set coordinator.max_sessions=8
  stagebus up --shards shard-sets/smollm2 --host-stage0
  stagebus up --shards shard-sets/smollm2 --gateway
  stagebus up --shards shard-sets/smollm2 --keys fleet-keys --listen 0.0.0.0

Starts a broker on the loopback interface (elsewhere with keys only), one or more workers per stage
and a coordinator, with --gateway also an OpenAI-compatible HTTP API with a web page, and shows
their log. Ctrl-C ends them in order: gateway, coordinator, workers, broker. A part that ends by
itself ends them all: to go on without it, start each with a command of its own.")]
pub struct UpArgs {
    /// The model: a GGUF file or a folder, sharded into a cache folder unless it is there already
    #[arg(long, value_name = "MODEL", conflicts_with = "shards")]
    model: Option<PathBuf>,

    /// Number of stages of a model file [default: 2]
    #[arg(long, value_name = "N")]
    stages: Option<usize>,

    /// Numerics: fast is what the device does best, exact is f32 throughout
    #[arg(long, value_name = "PROFILE")]
    profile: Option<ProfileChoice>,

    #[command(flatten)]
    local: LocalArgs,

    /// Coordinators that share the requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    coordinators: usize,

    /// Every coordinator runs a worker of the first stage itself, in the place of separate ones
    #[arg(long)]
    host_stage0: bool,

    /// Start a gateway too, on this address [default without one: 127.0.0.1:8000]; others than
    /// loopback need API keys and TLS
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, default_missing_value = "127.0.0.1:8000")]
    gateway: Option<SocketAddr>,

    /// Port of the broker on the loopback interface; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_BROKER_PORT)]
    broker_port: u16,

    /// Address of the broker; other machines reach it with keys only
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    listen: IpAddr,

    /// Folder of keys made by `stagebus keys`: TLS, and nobody without a key
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,

    /// Folder for durable jobs and their results; without it they end with the fleet, or stay in
    /// the folder of keys
    #[arg(long, value_name = "DIR", conflicts_with_all = ["broker", "keys"])]
    keep_jobs: Option<PathBuf>,

    /// Use the broker at this address instead of starting one
    #[arg(long, value_name = "URL", conflicts_with_all = ["broker_port", "listen"])]
    broker: Option<String>,

    #[command(flatten)]
    process: ProcessArgs,

    /// Print one JSON object when the fleet is ready, instead of the text for people
    #[arg(long)]
    json: bool,
}

/// What `stagebus up --json` prints when the fleet is ready.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Ready {
    ready: bool,
    broker: String,
    /// Configuration file for clients, where they need a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_config: Option<PathBuf>,
    /// What OpenAI's libraries call the base URL; the page is at `/` of the same address.
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<String>,
    model: ModelName,
    stages: usize,
    subjects: ReadySubjects,
    members: Vec<ReadyMember>,
    startup_ms: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ReadySubjects {
    prompt: String,
    job: String,
    cancel: String,
    fleet: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ReadyMember {
    name: String,
    pid: u32,
    stage: Option<usize>,
    id: Option<String>,
    /// The worker that a coordinator hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    hosted: Option<String>,
    /// Where its metrics are to be had.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<SocketAddr>,
}

/// Runs the fleet until `stop` is cancelled or a part of it ends.
///
/// # Errors
/// What keeps the fleet from starting, a part that ends by itself, or one that does not leave.
pub async fn run(args: UpArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    let wanted = Wanted {
        model: args.model.as_deref(),
        n_stages: args.stages,
        profile: args.profile,
        quiet,
    };
    let set = args.local.shard_set(&wanted, &stop).await?;
    let log = local::log_sink(!quiet);
    let mut spec = args.local.spec(&set, args.profile, args.broker, &args.process)?;
    spec.n_coordinators = args.coordinators;
    spec.host_stage0 = args.host_stage0;
    spec.gateway = args.gateway;
    spec.log = log.clone();
    spec.keys.clone_from(&args.keys);
    if let BrokerChoice::Private(options) = &mut spec.broker {
        options.listen = args.listen;
        options.port = (args.broker_port != 0).then_some(args.broker_port);
        options.log = log;
        options.store_dir = args.keep_jobs;
    }
    let mut fleet = local::start(spec, &stop).await?;
    let mut ready = Ready::of(&fleet, set.manifest.model.parse()?, started);
    ready.client_config = client_config(args.keys.as_deref(), &ready.model)?;
    if args.json {
        console::print_json(&ready)?;
    } else {
        console::print(&describe(&ready))?;
    }
    let gone = tokio::select! {
        () = stop.cancelled() => None,
        ended = fleet.ended() => Some(ended?),
    };
    if !quiet {
        console::note(match gone {
            None => "stopping: gateway, coordinators, workers, broker",
            Some(_) => "a part of the fleet is gone, stopping the rest",
        });
    }
    let end = local::end(fleet).await;
    match gone {
        Some(ended) => {
            if let Err(error) = end {
                console::note(&format!("and the rest did not end in order: {error}"));
            }
            Err(lost(&ended, quiet))
        }
        None => end.map(|()| Outcome::Good),
    }
}

/// The error for a part that ended by itself; its log is repeated unless it was shown.
fn lost(ended: &Ended, quiet: bool) -> anyhow::Error {
    let Ended { name, status, last_lines } = ended;
    if quiet {
        anyhow::anyhow!("{name} ended by itself ({status}); its last lines:\n{last_lines}")
    } else {
        anyhow::anyhow!("{name} ended by itself ({status}); its log is above")
    }
}

impl Ready {
    fn of(fleet: &LocalFleet, model: ModelName, started: Instant) -> Self {
        let subjects = Subjects::new(&model);
        let member = |member: stagebus_fleet::Member| ReadyMember {
            name: member.name,
            pid: member.pid,
            stage: member.stage,
            id: member.id,
            hosted: member.hosted,
            metrics: member.metrics,
        };
        Self {
            ready: true,
            broker: fleet.url().to_owned(),
            client_config: None,
            gateway: fleet.gateway().map(str::to_owned),
            subjects: ReadySubjects {
                prompt: subjects.prompt(),
                job: subjects.job(),
                cancel: subjects.cancel_all(),
                fleet: subjects.fleet_all(),
            },
            model,
            stages: fleet.n_stages(),
            members: fleet.members().into_iter().map(member).collect(),
            startup_ms: started.elapsed().as_secs_f64() * 1e3,
        }
    }
}

/// The configuration of the first key with which a client of the model may ask.
fn client_config(keys: Option<&Path>, model: &ModelName) -> anyhow::Result<Option<PathBuf>> {
    let Some(keys) = keys else { return Ok(None) };
    let folder = KeyFolder::open(keys)?;
    let holder = folder.find(HolderRole::Client, model);
    Ok(holder.map(|holder| folder.folder_of(holder).join(CLIENT_CONFIG)))
}

fn describe(ready: &Ready) -> String {
    let Ready { broker, client_config, model, stages, subjects, members, startup_ms, .. } = ready;
    let default = format!("nats://127.0.0.1:{DEFAULT_BROKER_PORT}");
    let mut option = if *broker == default { String::new() } else { format!(" --broker {broker}") };
    if let Some(config) = client_config {
        option.push_str(&format!(" --config {}", config.display()));
    }
    let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
    let http = ready.gateway.as_deref().map(describe_gateway).unwrap_or_default();
    let scraped = members.iter().filter_map(|member| member.metrics);
    let metrics: String =
        scraped.map(|address| format!("  metrics  http://{address}/metrics\n")).collect();
    // A broker with keys wants more than an address.
    let nats = match client_config {
        None => describe_nats(broker, &subjects.prompt),
        Some(_) => String::new(),
    };
    format!(
        "
{model} is up: {stages} stages, ready after {:.1} s
  parts    {}
  broker   {broker}
  prompt   {}
  job      {}
  cancel   {}
  fleet    {}
{http}{metrics}
ask it:
  stagebus ask{option} \"What is the capital of Japan?\"
let it work, and come back for the answer:
  stagebus submit{option} \"Write a story about a lighthouse.\"
{nats}see who is there:
  stagebus status{option}
Ctrl-C ends it.

",
        startup_ms / 1e3,
        names.join(" "),
        subjects.prompt,
        subjects.job,
        subjects.cancel,
        subjects.fleet,
    )
}

/// A request with the command line of NATS.
fn describe_nats(broker: &str, prompt: &str) -> String {
    format!(
        "with any NATS client:
  nats -s {broker} req {prompt} '{{\"prompt\":\"The capital of Japan is\",\"max_tokens\":8}}' --replies=0 --timeout=5s --raw
"
    )
}

/// The page is where the API is, without the path of its version.
fn describe_gateway(base_url: &str) -> String {
    let page = base_url.trim_end_matches("v1");
    format!("  API      {base_url}\n  page     {page}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_for_people_has_what_a_client_needs() {
        let model: ModelName = "m-1".parse().expect("a valid name");
        let subjects = Subjects::new(&model);
        let ready = Ready {
            ready: true,
            broker: "nats://127.0.0.1:5000".to_owned(),
            subjects: ReadySubjects {
                prompt: subjects.prompt(),
                job: subjects.job(),
                cancel: subjects.cancel_all(),
                fleet: subjects.fleet_all(),
            },
            client_config: None,
            gateway: Some("http://127.0.0.1:8000/v1".to_owned()),
            model,
            stages: 2,
            members: Vec::new(),
            startup_ms: 1500.0,
        };
        let text = describe(&ready);
        for part in [
            "m-1 is up: 2 stages, ready after 1.5 s",
            "stagebus ask --broker nats://127.0.0.1:5000 ",
            "req stagebus.v1.m-1.prompt '{\"prompt\":",
            "  API      http://127.0.0.1:8000/v1\n  page     http://127.0.0.1:8000/\n\nask it:",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        assert!(!text.contains("metrics"), "{text}");
        let broker = "nats://127.0.0.1:4222".to_owned();
        let default = Ready { broker, gateway: None, ..ready };
        assert!(!describe(&default).contains("page"));
        assert!(describe(&default).contains("stagebus ask \"What"));
    }
}
