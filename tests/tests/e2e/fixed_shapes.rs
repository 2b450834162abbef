//! A shard set of the static form, served by a fleet as every other one.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::FinishReason;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::setup;

use crate::crowds::together;
use crate::prompts::{cases, of_case};

#[tokio::test]
async fn a_fleet_serves_graphs_of_fixed_shapes_within_their_window() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let set = folder.path().join("set");
    let options =
        ["shard", "--stages", "2", "--form", "static", "--window", "96", "--rows", "6", "--json"];
    let report = Call::new(options)
        .args(&["--slots", "2", "--out"])
        .arg(&set)
        .arg(setup::model()?)
        .run()
        .await?
        .success()?
        .json()?;
    let form = json!({ "static": { "window": 96, "rows": 6, "slots": 2 } });
    ensure!(report["form"] == form, "{report:#}");

    // Drafted rows are taken back, and three sessions take the slots of two banks.
    let fleet = Fleet::start(2, |spec| {
        spec.shards.clone_from(&set);
        spec.settings.push("coordinator.draft=ngram".to_owned());
    })
    .await?;
    let cases = cases()?;
    let chosen = [&cases[0], &cases[6], &cases[0]];
    let requests: Vec<Value> = chosen.iter().map(|case| of_case(case, 64)).collect();
    for (answer, case) in together(&fleet, &requests).await?.iter().zip(chosen) {
        ensure!(answer.tokens == case.output_ids, "{answer:?}");
    }

    // The window is the context: it ends an answer, and refuses what does not fit.
    let long = fleet.ask(&of_case(&cases[1], 64)).await?;
    let room = 96 - cases[1].input_ids.len();
    ensure!(long.reason()? == FinishReason::Length, "{long:?}");
    ensure!(long.tokens == cases[1].output_ids[..room], "{room}: {long:?}");
    let refused = fleet.ask(&json!({ "tokens": vec![1; 96] })).await?;
    let (class, message) = refused.failure()?;
    ensure!(class == ErrorClass::InvalidRequest && message.contains("96"), "{refused:?}");
    fleet.idle().await?;
    fleet.end().await
}
