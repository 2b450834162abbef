//! The scenario `delivery`: a shard set through the broker's store, over a way that breaks.
//!
//! A shard set of random bytes is pushed and pulled over a whole link, then pulled once more while the
//! link is cut three times and the broker is killed and started again. Parts that came from the broker
//! are counted: a part that came twice is one too many. Every file is hashed on arrival.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, BusOptions, ModelStore, PART_BYTES};
use stagebus_delivery::{Pulled, Wanted, choose, connection, list, open};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::ids::ModelName;
use stagebus_shards::ShardSet;
use tokio::sync::watch;

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::harness::table::{number, table};
use crate::link::{Conditions, Link, LinkPlan, Passage, Traffic};
use crate::random_shard_set;

const FETCHED: Target = Target {
    name: "pull_fetched_over_size",
    target: 1.0,
    bound: Bound::AtMost,
    what: "parts that came from the broker over parts of a shard set, with breaks in between",
};
const BREAKS: Target = Target {
    name: "pull_breaks_survived",
    target: 4.0,
    bound: Bound::AtLeast,
    what: "cut connections and broker restarts that a pull survived",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[FETCHED, BREAKS];

/// How much of a pull is done when something breaks, in percent; the last break is the broker's.
const BREAK_AT: [u64; 4] = [15, 35, 55, 75];

/// How long one push or pull may take.
const PATIENCE: Duration = Duration::from_secs(1800);

/// Arguments of `stagebus bench delivery`.
#[derive(Debug, Clone, clap::Args)]
pub struct DeliveryArgs {
    /// Size of the shard set, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(16..))]
    mib: u32,

    /// Delay of the emulated link one way, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0)]
    delay: u32,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// One way of the shard set.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Way {
    /// Seconds.
    seconds: f64,
    /// Megabytes (10^6) of files per second.
    mb_s: f64,
    /// Parts that were sent or came.
    parts: u64,
    /// Times that the connection was made again.
    reconnects: u64,
    /// Bytes that came over the link, with everything around the parts.
    link_bytes: u64,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct DeliveryReport {
    scenario: &'static str,
    machine: Machine,
    bytes: u64,
    parts: u64,
    delay_ms: u32,
    push: Way,
    pull: Way,
    /// The same with breaks.
    broken_pull: Way,
    claims: Vec<Claim>,
}

/// Where everything happens.
struct Bench {
    broker: LocalBroker,
    link: Link,
    shards: ShardSet,
    model: ModelName,
    /// Bytes and parts of all files but the manifest.
    bytes: u64,
    parts: u64,
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Files that come back differently; anything that does not run.
pub async fn run(args: DeliveryArgs, quiet: bool) -> anyhow::Result<()> {
    let mut machine = Machine::look();
    let folder = tempfile::tempdir().context("there is no temporary folder")?;
    output::note(quiet, "making the shard set");
    let made = folder.path().join("set");
    let weights = u64::from(args.mib) << 20;
    let shards = tokio::task::spawn_blocking(move || random_shard_set::make(&made, weights));
    let shards = shards.await??;
    let broker = LocalBroker::start(BrokerOptions::default()).await?;
    let conditions = Conditions::delay(Duration::from_millis(args.delay.into()));
    let link = Link::to_broker(&broker.url(), LinkPlan::both(conditions))?;
    let model = ModelName::new(shards.manifest.model.as_str())?;
    let (bytes, parts) = size(&shards);
    let mut bench = Bench { broker, link, shards, model, bytes, parts };
    output::note(quiet, "pushing");
    let push = bench.push().await?;
    output::note(quiet, "pulling");
    let whole = folder.path().join("whole");
    let pull = bench.pull(&whole, &[]).await?;
    // Its room is needed.
    std::fs::remove_dir_all(&whole).context("a folder cannot be removed")?;
    output::note(quiet, "pulling with breaks");
    let broken_pull = bench.pull(&folder.path().join("broken"), &BREAK_AT).await?;
    bench.broker.stop().await?;
    machine.finish();
    let claims = vec![fetched_claim(&broken_pull, parts, bytes), breaks_claim(&broken_pull)];
    let report = DeliveryReport {
        scenario: "delivery",
        machine,
        bytes,
        parts,
        delay_ms: args.delay,
        push,
        pull,
        broken_pull,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, None, args.json)?)
}

/// Bytes and parts of the files that a whole pull brings.
fn size(shards: &ShardSet) -> (u64, u64) {
    let stages = shards.manifest.stages.iter().flat_map(|stage| [&stage.xml, &stage.bin]);
    let files: Vec<u64> =
        stages.chain(&shards.manifest.text_files).map(|file| file.bytes).collect();
    let parts = files.iter().map(|bytes| bytes.div_ceil(PART_BYTES as u64)).sum();
    (files.iter().sum(), parts)
}

impl Bench {
    async fn connect(&self) -> anyhow::Result<Bus> {
        let options = BusOptions::new(self.link.url(), "bench-delivery");
        Ok(Bus::connect(connection(options)).await?)
    }

    fn way(&self, bus: &Bus, parts: u64, (began, before): (Instant, Traffic)) -> Way {
        let seconds = began.elapsed().as_secs_f64();
        let now = self.link.traffic();
        let passed = |traffic: Traffic| traffic.up.n_bytes + traffic.down.n_bytes;
        Way {
            seconds,
            mb_s: self.bytes as f64 / 1e6 / seconds,
            parts,
            reconnects: bus.reconnects(),
            link_bytes: passed(now) - passed(before),
        }
    }

    async fn push(&self) -> anyhow::Result<Way> {
        let bus = self.connect().await?;
        let begun = (Instant::now(), self.link.traffic());
        let store = ModelStore::new(&bus, &self.model);
        let pushing = stagebus_delivery::push(&store, &self.shards, |_| ());
        tokio::time::timeout(PATIENCE, pushing).await.context("the push does not end")??;
        Ok(self.way(&bus, self.parts, begun))
    }

    /// Pulls everything into a folder while the way breaks where `breaks` say.
    async fn pull(&mut self, to: &Path, breaks: &[u64]) -> anyhow::Result<Way> {
        let bus = self.connect().await?;
        let begun = (Instant::now(), self.link.traffic());
        let store = ModelStore::new(&bus, &self.model);
        let sets = list(&store).await?;
        let set = choose(&self.model, &sets, None)?;
        let shards = open(&store, set, to).await?;
        let (tell, told) = watch::channel(0);
        let pulling = stagebus_delivery::pull(&store, set, &shards, &Wanted::Whole, |progress| {
            tell.send_replace(progress.bytes_done);
        });
        let pulling = tokio::time::timeout(PATIENCE, pulling);
        let (pulled, broken) = tokio::join!(pulling, self.disturb(told, breaks));
        broken?;
        let pulled: Pulled = pulled.context("the pull does not end")??;
        shards.verify_text()?;
        for stage in 0..shards.manifest.n_stages() {
            shards.verify_stage(stage)?;
        }
        Ok(self.way(&bus, pulled.fetched_parts, begun))
    }

    /// Cuts the link, and last ends the broker, whenever so many percent have come.
    async fn disturb(&mut self, mut told: watch::Receiver<u64>, at: &[u64]) -> anyhow::Result<()> {
        for (i, percent) in at.iter().enumerate() {
            let enough = self.bytes * percent / 100;
            let come = told.wait_for(|bytes| *bytes >= enough).await.map(drop);
            come.context("the pull ended before everything was broken")?;
            if i + 1 == at.len() {
                self.broker.kill().await?;
                self.broker.restart().await?;
            } else {
                self.link.set_passage(Passage::Cut);
                self.link.set_passage(Passage::Open);
            }
        }
        Ok(())
    }
}

fn fetched_claim(pull: &Way, parts: u64, bytes: u64) -> Claim {
    let how = format!("{} parts came, the {} MiB have {parts}", pull.parts, bytes >> 20);
    FETCHED.measured(pull.parts as f64 / parts as f64, how)
}

fn breaks_claim(pull: &Way) -> Claim {
    BREAKS.measured(pull.reconnects as f64, "times that the connection was made again")
}

impl DeliveryReport {
    /// The table for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |name: &str, way: &Way| {
            vec![
                name.to_owned(),
                number(Some(way.seconds), 2),
                number(Some(way.mb_s), 0),
                way.parts.to_string(),
                number(Some(way.link_bytes as f64 / self.bytes as f64), 4),
                way.reconnects.to_string(),
            ]
        };
        let header = ["", "s", "MB/s", "parts", "link bytes over size", "reconnects"];
        let rows = [
            row("push", &self.push),
            row("pull", &self.pull),
            row("pull with breaks", &self.broken_pull),
        ];
        let (mib, parts, delay) = (self.bytes >> 20, self.parts, self.delay_ms);
        format!("{mib} MiB in {parts} parts, {delay} ms one way\n{}\n", table(&header, &rows))
    }
}
