//! The probe on the broker, for nodes that have no model file, as long as they measure.

use std::sync::OnceLock;

use anyhow::Context as _;
use stagebus_bus::{Bus, ModelStore, Role, StoreError};
use stagebus_delivery::connection;
use stagebus_shards::ShardSet;

use super::ask::Found;
use crate::client::ClientArgs;
use crate::console;
use crate::progress::DeliveryProgress;

/// A probe that may have been stored.
#[derive(Debug, Default)]
pub(super) struct Lent {
    store: OnceLock<ModelStore>,
}

impl Lent {
    /// Stores the probe if one of the nodes has no model file.
    ///
    /// # Errors
    /// A broker that does not store; a key that may not.
    pub(super) async fn store(
        &self,
        probe: &ShardSet,
        nodes: &[Found],
        client: &ClientArgs,
        quiet: bool,
    ) -> anyhow::Result<()> {
        let without = nodes.iter().filter(|node| !node.about.has_model);
        let without: Vec<&str> = without.map(|node| node.name.as_str()).collect();
        if without.is_empty() {
            return Ok(());
        }
        let without = format!("no model file on {}", without.join(", "));
        if !quiet {
            console::note(&format!("{without}: the probe is lent"));
        }
        let bus =
            Bus::connect(connection(client.options(Role::Operator, "stagebus-plan")?)).await?;
        let model = probe.manifest.model.parse().context("the model's name is not valid")?;
        let store = self.store.get_or_init(|| ModelStore::of_probe(&bus, &model));
        let bar = DeliveryProgress::new(quiet);
        let pushed = stagebus_delivery::push(store, probe, |progress| bar.update(progress)).await;
        bar.finish();
        pushed.map(drop).with_context(|| format!("{without}, and the probe is not stored"))
    }

    /// Takes the probe from the broker again. What cannot be removed is told, and harms no plan.
    pub(super) async fn take_back(&self) {
        let Some(store) = self.store.get() else { return };
        match store.delete().await {
            Ok(())
            | Err(
                StoreError::NoJetStream | StoreError::NoBucket { .. } | StoreError::Forbidden(_),
            ) => {}
            Err(error) => {
                let model = store.model();
                console::note(&format!(
                    "the probe of {model} stays on the broker: {error}; `stagebus models --model \
                     {model}` shows it"
                ));
            }
        }
    }
}
