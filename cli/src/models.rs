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

Shows the shard sets that `stagebus push` has stored; the last complete one of a model is the one
that is pulled. Without --fingerprint `remove` takes away everything of the model. Processes that have
pulled what they need do not notice. A broker with permissions takes it from an operator's key.";

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
        remove(&ModelStore::new(&bus, model), fingerprint.as_deref()).await?;
    }
    let reports = reports(&bus, shown).await?;
    if args.json {
        console::print_json(&reports)?;
    } else {
        console::print(&describe(&reports))?;
    }
    Ok(Outcome::Good)
}

async fn remove(store: &ModelStore, fingerprint: Option<&str>) -> anyhow::Result<()> {
    let Some(wanted) = fingerprint else { return Ok(store.delete().await?) };
    let sets = list(store).await?;
    let fitting: Vec<_> = sets.iter().filter(|set| set.fingerprint.starts_with(wanted)).collect();
    match fitting.as_slice() {
        [set] => Ok(stagebus_delivery::remove(store, set).await?),
        several => Err(DeliveryError::Fingerprint {
            model: store.model().clone(),
            wanted: wanted.to_owned(),
            found: several.len(),
            stored: sets.iter().map(|set| set.fingerprint.clone()).collect(),
        }
        .into()),
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
        match report(&ModelStore::new(bus, &model)).await {
            Ok(report) => reports.push(report),
            Err(DeliveryError::Store(StoreError::NoBucket { .. })) => {}
            Err(DeliveryError::Store(StoreError::Forbidden(_))) if !is_named => {
                console::note(&format!("{model} is not open to this key"));
            }
            Err(error) => return Err(error).with_context(|| format!("{model} cannot be read")),
        }
    }
    Ok(reports)
}

async fn report(store: &ModelStore) -> Result<ModelReport, DeliveryError> {
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
    Ok(ModelReport {
        model: store.model().clone(),
        sets: reports.collect(),
        unfinished_bytes: unfinished_parts * PART_BYTES as u64,
    })
}

fn describe(reports: &[ModelReport]) -> String {
    if reports.is_empty() {
        return "nothing is stored; see `stagebus push`\n".to_owned();
    }
    let mut rows = Vec::new();
    for ModelReport { model, sets, unfinished_bytes } in reports {
        for set in sets {
            let state = match (set.current, set.complete) {
                (true, _) => "pulled",
                (false, true) => "older",
                (false, false) => "incomplete",
            };
            rows.push(vec![
                model.to_string(),
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
            unfinished_bytes: 1 << 20,
        }];
        let shown = describe(&reports);
        let states = ["older", "pulled", "incomplete", "interrupted"];
        let lines: Vec<&str> = shown.lines().skip(1).collect();
        assert_eq!(lines.len(), states.len(), "{shown}");
        for (line, state) in lines.iter().zip(states) {
            assert!(line.contains(state), "{shown}");
        }
        assert!(lines[1].contains("cdcdcdcdcdcd ") && lines[1].ends_with("3.0 MiB"), "{shown}");
        assert!(describe(&[]).contains("stagebus push"));
    }
}
