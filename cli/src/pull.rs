//! `stagebus pull`: fetches a shard set from the broker into a folder.

use std::path::PathBuf;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, ModelStore, Role};
use stagebus_delivery::{Wanted, choose, connection, find_model, list, open};
use stagebus_schemas::ids::ModelName;
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console::{self, mib};
use crate::exit::Outcome;
use crate::progress::DeliveryProgress;

/// Arguments of `stagebus pull`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus pull smollm2 --out shard-sets/smollm2
  stagebus pull smollm2 --stage 1 --out shard-sets/smollm2 --json
  stagebus pull --fingerprint 3f9a2c --out shards/old --config operator/stagebus.toml

Workers and coordinators pull by themselves; this is for those that shall start without the broker's
store. Every file is checked against the manifest. After whatever interrupts it, pull again: what has
come is kept. A broker with permissions takes it from an operator's key.")]
pub struct PullArgs {
    /// Name of the model; the only one that is stored, when absent
    #[arg(value_name = "MODEL")]
    model: Option<ModelName>,

    /// Folder for the files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Only what a worker of this stage needs
    #[arg(long, value_name = "K")]
    stage: Option<usize>,

    /// Fingerprint of the shard set, or its beginning; the one that was pushed last, when absent
    #[arg(long, value_name = "HEX")]
    fingerprint: Option<String>,

    #[command(flatten)]
    client: ClientArgs,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// What `stagebus pull --json` prints.
#[derive(Debug, Serialize)]
struct PullReport<'a> {
    model: &'a ModelName,
    fingerprint: &'a str,
    fetched_bytes: u64,
    fetched_parts: u64,
    kept_bytes: u64,
}

/// Runs the command until everything is here, or `stop`.
///
/// # Errors
/// A broker that cannot be reached or has no such shard set, files that are not those of the
/// manifest.
pub async fn run(args: PullArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let options = connection(args.client.options(Role::Operator, "stagebus-pull")?);
    let bus = Bus::connect(options).await?;
    let model = find_model(&bus, args.model.as_ref()).await?;
    let store = ModelStore::new(&bus, &model);
    let sets = list(&store).await?;
    let set = choose(&model, &sets, args.fingerprint.as_deref())?;
    let shards = open(&store, set, &args.out).await?;
    let wanted = args.stage.map_or(Wanted::Whole, Wanted::Stage);
    let bar = DeliveryProgress::new(quiet);
    let pulling =
        stagebus_delivery::pull(&store, set, &shards, &wanted, |progress| bar.update(progress));
    let pulled = tokio::select! {
        pulled = pulling => pulled.with_context(|| format!("{model} is not here"))?,
        () = stop.cancelled() => {
            bar.finish();
            console::note("interrupted; pull again to go on");
            return Ok(Outcome::Bad);
        }
    };
    bar.finish();
    if args.json {
        console::print_json(&PullReport {
            model: &model,
            fingerprint: &set.fingerprint,
            fetched_bytes: pulled.fetched_bytes,
            fetched_parts: pulled.fetched_parts,
            kept_bytes: pulled.kept_bytes,
        })?;
    } else {
        let (fetched, kept) = (mib(pulled.fetched_bytes), mib(pulled.kept_bytes));
        let place = args.out.display();
        console::print_line(&format!("{model} is in {place}: {fetched} fetched, {kept} kept"))?;
    }
    Ok(Outcome::Good)
}
