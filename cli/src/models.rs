//! `stagebus models`: what the broker has stored, and its removal.

use std::collections::HashSet;

use anyhow::Context as _;
use clap::Subcommand;
use serde::Serialize;
use stagebus_bus::{Bus, ModelStore, PART_BYTES, Role, StoreError, StoredObject};
use stagebus_delivery::{DeliveryError, StoredSet, list};
use stagebus_schemas::ids::ModelName;

use crate::client::ClientArgs;
use crate::console::{self, mib};
use crate::exit::Outcome;

/// Digits of a fingerprint that are shown.
const SHOWN_FINGERPRINT: usize = 12;

const EXAMPLES: &str = "Examples:
  stagebus models
  stagebus models --model smollm2 --json
  stagebus models remove smollm2 --fingerprint 3f9a2c
  stagebus models remove smollm2

Shows the shard sets that `stagebus push` has stored, draft models with the model that they are for;
the last complete one is the one that is pulled. A probe is what `stagebus plan` lends to nodes.
Without --fingerprint `remove` takes away everything of the model. Processes that have pulled what
they need do not notice. A broker with permissions takes it from an operator's key.";

/// Arguments of `stagebus models`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct ModelsArgs {
    #[command(subcommand)]
    action: Option<Action>,

    /// Show this model only
    #[arg(long, value_name = "NAME")]
    model: Option<ModelName>,

    #[command(flatten)]
    client: ClientArgs,

    /// Print one JSON array: the models that are stored, or are left
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Clone, Subcommand)]
enum Action {
    /// Remove a model's shard sets from the broker
    Remove {
        /// Name of the model
        #[arg(value_name = "MODEL")]
        model: ModelName,

        /// Only the shard set whose fingerprint begins with this
        #[arg(long, value_name = "HEX")]
        fingerprint: Option<String>,

        #[command(flatten)]
        client: ClientArgs,
    },
}

/// A model in `stagebus models --json`.
#[derive(Debug, Serialize)]
struct ModelReport {
    model: ModelName,
    sets: Vec<SetReport>,
    /// Shard sets of its draft models.
    drafts: Vec<SetReport>,
    /// What a plan that is made, or did not end, lends to nodes.
    probes: Vec<SetReport>,
    /// At most this much is left of pushes that were interrupted.
    unfinished_bytes: u64,
}

/// A shard set in `stagebus models --json`.
#[derive(Debug, Serialize)]
struct SetReport {
    fingerprint: String,
    /// Whether it is the one that is pulled.
    current: bool,
    complete: bool,
    files: usize,
    bytes: u64,
}

/// Runs the command.
///
/// # Errors
/// A broker that cannot be reached, keeps nothing or refuses, a shard set that is not there.
pub async fn run(args: ModelsArgs) -> anyhow::Result<Outcome> {
    let (client, shown) = match &args.action {
        None => (&args.client, args.model),
        Some(Action::Remove { model, client, .. }) => (client, Some(model.clone())),
    };
    let bus = Bus::connect(client.options(Role::Operator, "stagebus-models")?).await?;
    if let Some(Action::Remove { model, fingerprint, .. }) = &args.action {
        remove(&bus, model, fingerprint.as_deref()).await?;
    }
    let reports = reports(&bus, shown).await?;
    if args.json {
        console::print_json(&reports)?;
    } else {
        console::print(&describe(&reports))?;
    }
    Ok(Outcome::Good)
}

/// The buckets of a model: its own, that of its draft models and that of its probe.
fn stores(bus: &Bus, model: &ModelName) -> [ModelStore; 3] {
    [ModelStore::new, ModelStore::of_drafts, ModelStore::of_probe].map(|of| of(bus, model))
}

/// Removes everything of a model, or one of its shard sets.
async fn remove(bus: &Bus, model: &ModelName, fingerprint: Option<&str>) -> anyhow::Result<()> {
    let stores = stores(bus, model);
    let Some(wanted) = fingerprint else {
        let mut n_removed = 0;
        for store in &stores {
            n_removed += usize::from(if_there(store.delete().await)?.is_some());
        }
        anyhow::ensure!(n_removed > 0, StoreError::NoBucket { model: model.clone() });
        return Ok(());
    };
    let mut sets = Vec::new();
    for store in &stores {
        let found = if_there(list(store).await)?.unwrap_or_default();
        sets.extend(found.into_iter().map(|set| (store, set)));
    }
    let mut fitting = sets.iter().filter(|(_, set)| set.fingerprint.starts_with(wanted));
    match (fitting.next(), fitting.count()) {
        (Some((store, set)), 0) => Ok(stagebus_delivery::remove(store, set).await?),
        (first, others) => Err(DeliveryError::Fingerprint {
            model: model.clone(),
            wanted: wanted.to_owned(),
            found: usize::from(first.is_some()) + others,
            stored: sets.iter().map(|(_, set)| set.fingerprint.clone()).collect(),
        }
        .into()),
    }
}

/// What came of asking a bucket; nothing if there is no such bucket.
fn if_there<T>(outcome: Result<T, impl Into<DeliveryError>>) -> Result<Option<T>, DeliveryError> {
    match outcome.map_err(Into::into) {
        Ok(value) => Ok(Some(value)),
        Err(DeliveryError::Store(StoreError::NoBucket { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What is stored of a model, or of all that this key may see.
async fn reports(bus: &Bus, shown: Option<ModelName>) -> anyhow::Result<Vec<ModelReport>> {
    let is_named = shown.is_some();
    let models = match shown {
        Some(model) => vec![model],
        None => bus.stored_models().await?,
    };
    let mut reports = Vec::new();
    for model in models {
        match report(bus, &model).await {
            Ok(report) => reports.extend(report),
            Err(DeliveryError::Store(StoreError::Forbidden(_))) if !is_named => {
                console::note(&format!("{model} is not open to this key"));
            }
            Err(error) => return Err(error).with_context(|| format!("{model} cannot be read")),
        }
    }
    Ok(reports)
}

/// What is stored of a model; nothing if nothing ever was.
async fn report(bus: &Bus, model: &ModelName) -> Result<Option<ModelReport>, DeliveryError> {
    let [of_model, of_drafts, of_probe] = stores(bus, model);
    let found = [
        if_there(look(&of_model).await)?,
        if_there(look(&of_drafts).await)?,
        if_there(look(&of_probe).await)?,
    ];
    if found.iter().all(Option::is_none) {
        return Ok(None);
    }
    let found = found.map(Option::unwrap_or_default);
    let unfinished_bytes = found.iter().map(|(_, unfinished)| unfinished).sum();
    let [sets, drafts, probes] = found.map(|(sets, _)| sets);
    Ok(Some(ModelReport { model: model.clone(), sets, drafts, probes, unfinished_bytes }))
}

/// The shard sets in a bucket, and the bytes that no set has at most.
async fn look(store: &ModelStore) -> Result<(Vec<SetReport>, u64), DeliveryError> {
    let sets = list(store).await?;
    let named = |set: &StoredSet| -> Vec<String> {
        let objects = set.files.values().chain(&set.manifest);
        objects.map(|StoredObject { content, .. }| content.clone()).collect()
    };
    let finished: HashSet<String> = sets.iter().flat_map(named).collect();
    let contents = store.contents().await?.into_iter();
    let unfinished = contents.filter(|(content, _)| !finished.contains(content));
    let unfinished_parts: u64 = unfinished.map(|(_, n_parts)| n_parts).sum();
    let current = sets.iter().rfind(|set| set.manifest.is_some());
    let current = current.map(|set| set.fingerprint.clone());
    let reports = sets.into_iter().map(|set| SetReport {
        current: current.as_ref() == Some(&set.fingerprint),
        complete: set.manifest.is_some(),
        files: set.files.len(),
        bytes: set.bytes(),
        fingerprint: set.fingerprint,
    });
    Ok((reports.collect(), unfinished_parts * PART_BYTES as u64))
}

fn describe(reports: &[ModelReport]) -> String {
    if reports.is_empty() {
        return "nothing is stored; see `stagebus push`\n".to_owned();
    }
    let mut rows = Vec::new();
    for ModelReport { model, sets, drafts, probes, unfinished_bytes } in reports {
        let of_model = sets.iter().map(|set| (model.to_string(), set));
        let of_drafts = drafts.iter().map(|set| (format!("draft of {model}"), set));
        let of_probe = probes.iter().map(|set| (format!("probe of {model}"), set));
        for (name, set) in of_model.chain(of_drafts).chain(of_probe) {
            let state = match (set.current, set.complete) {
                (true, _) => "pulled",
                (false, true) => "older",
                (false, false) => "incomplete",
            };
            rows.push(vec![
                name,
                set.fingerprint.chars().take(SHOWN_FINGERPRINT).collect(),
                state.to_owned(),
                set.files.to_string(),
                mib(set.bytes),
            ]);
        }
        if *unfinished_bytes > 0 {
            let (state, none) = ("interrupted".to_owned(), String::new);
            rows.push(vec![model.to_string(), none(), state, none(), mib(*unfinished_bytes)]);
        }
    }
    console::table(&["model", "fingerprint", "state", "files", "size"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_shown_with_its_state() {
        let set = |fingerprint: &str, current, complete| SetReport {
            fingerprint: fingerprint.repeat(32),
            current,
            complete,
            files: 6,
            bytes: 3 << 20,
        };
        let reports = [ModelReport {
            model: "m".parse().expect("a name"),
            sets: vec![set("ab", false, true), set("cd", true, true), set("ef", false, false)],
            drafts: vec![set("01", true, true)],
            probes: vec![set("02", false, false)],
            unfinished_bytes: 1 << 20,
        }];
        let shown = describe(&reports);
        let states = ["older", "pulled", "incomplete", "pulled", "incomplete", "interrupted"];
        let lines: Vec<&str> = shown.lines().skip(1).collect();
        assert_eq!(lines.len(), states.len(), "{shown}");
        for (line, state) in lines.iter().zip(states) {
            assert!(line.contains(state), "{shown}");
        }
        assert!(lines[1].contains("cdcdcdcdcdcd ") && lines[1].ends_with("3.0 MiB"), "{shown}");
        assert!(lines[3].starts_with("draft of m ") && lines[3].contains("0101"), "{shown}");
        assert!(lines[4].starts_with("probe of m "), "{shown}");
        assert!(describe(&[]).contains("stagebus push"));
    }
}
