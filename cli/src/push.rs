//! `stagebus push`: stores a shard set on the broker.

use std::path::PathBuf;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, ModelStore, Role};
use stagebus_delivery::connection;
use stagebus_schemas::ids::ModelName;
use stagebus_shards::ShardSet;
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console::{self, mib};
use crate::exit::Outcome;
use crate::progress::DeliveryProgress;

/// Arguments of `stagebus push`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus push shard-sets/smollm2
  stagebus push shard-sets/smollm2 --config operator/stagebus.toml --json
  stagebus push shard-sets/draft --draft-of smollm2

Workers and coordinators without files of their own pull what they need. What is stored is checked
against the manifest on its way, and complete or not there. After whatever interrupts it, push again:
it goes on where it was. The shard set that was pushed last is the one that is pulled. A broker with
permissions takes it from an operator's key (docs/security.md).")]
pub struct PushArgs {
    /// Folder of the shard set
    #[arg(value_name = "DIR")]
    shards: PathBuf,

    /// Store it as the draft model of this model, for its coordinators
    #[arg(long, value_name = "MODEL")]
    draft_of: Option<ModelName>,

    #[command(flatten)]
    client: ClientArgs,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// What `stagebus push --json` prints.
#[derive(Debug, Serialize)]
struct PushReport<'a> {
    model: &'a ModelName,
    fingerprint: &'a str,
    sent_bytes: u64,
    kept_bytes: u64,
}

/// Runs the command until everything is stored, or `stop`.
///
/// # Errors
/// A shard set that is not valid, a broker that cannot be reached or does not store.
pub async fn run(args: PushArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let shards = ShardSet::open(&args.shards)
        .with_context(|| format!("cannot use the shard set {}", args.shards.display()))?;
    let model = ModelName::new(shards.manifest.model.as_str())?;
    let n_stages = shards.manifest.n_stages();
    anyhow::ensure!(
        args.draft_of.is_none() || n_stages == 1,
        "a draft model has one stage, {} has {n_stages}",
        args.shards.display()
    );
    let options = connection(args.client.options(Role::Operator, "stagebus-push")?);
    let bus = Bus::connect(options).await?;
    let store = match &args.draft_of {
        Some(target) => ModelStore::of_drafts(&bus, target),
        None => ModelStore::new(&bus, &model),
    };
    let bar = DeliveryProgress::new(quiet);
    let pushing = stagebus_delivery::push(&store, &shards, |progress| bar.update(progress));
    let pushed = tokio::select! {
        pushed = pushing => pushed.with_context(|| format!("{model} is not stored"))?,
        () = stop.cancelled() => {
            bar.finish();
            console::note("interrupted; push again to go on");
            return Ok(Outcome::Bad);
        }
    };
    bar.finish();
    let fingerprint = shards.manifest.fingerprint.as_str();
    if args.json {
        let (sent_bytes, kept_bytes) = (pushed.sent_bytes, pushed.kept_bytes);
        console::print_json(&PushReport { model: &model, fingerprint, sent_bytes, kept_bytes })?;
    } else if pushed.kept_bytes > 0 {
        let (sent, kept) = (mib(pushed.sent_bytes), mib(pushed.kept_bytes));
        console::print_line(&format!("{model} is stored: {sent} sent, {kept} were there"))?;
    } else {
        console::print_line(&format!("{model} is stored: {} sent", mib(pushed.sent_bytes)))?;
    }
    Ok(Outcome::Good)
}
