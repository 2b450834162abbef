//! The short form of `stagebus bench faults`: everything that breaks, under load.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use stagebus_tests::program::Call;
use stagebus_tests::turn;

/// Longest time for all of it on a slow machine.
const PATIENCE: Duration = Duration::from_secs(540);

/// Requests that may be on their way to a coordinator or broker when it is killed.
const MOST_UNHEARD: u64 = 2;

/// Claims that say what happened, not how fast.
const CLAIMS: [(&str, f64); 4] = [
    ("kills_identical", 1.0),
    ("disconnect_leaks", 0.0),
    ("rolling_failures", 0.0),
    ("soak_wrong", 0.0),
];

#[tokio::test]
async fn a_minute_of_faults_under_load_changes_no_answer() -> Result<()> {
    let _turn = turn::take().await;
    let call = Call::new(["bench", "faults", "--json", "--seed", "11"]);
    let call = call.args(&["--kills", "4", "--disconnects", "32", "--soak", "60"]);
    let told = call.within(PATIENCE).run().await?.success()?;
    let report = told.last_json()?;
    let claims = report["claims"].as_array().context("there are no claims")?;
    for (name, expected) in CLAIMS {
        let value = claims.iter().find(|claim| claim["name"] == name).map(|claim| &claim["value"]);
        let found = value.and_then(Value::as_f64);
        ensure!(found == Some(expected), "{name} is {found:?}, not {expected}\n{}", told.report());
    }
    let asked = &report["soak"]["asked"];
    ensure!(asked["n_failed"] == 0, "{asked}\n{}", told.report());
    let unheard = asked["n_unheard"].as_u64().context("a number")?;
    ensure!(unheard <= MOST_UNHEARD, "{asked}\n{}", told.report());
    ensure!(asked["n"].as_u64() > Some(0), "nobody asked\n{}", told.report());
    Ok(())
}
