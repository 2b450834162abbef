//! Clients that vanish.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::dice::Dice;
use crate::workers::{N_TOKENS, counting, pairs};

#[tokio::test]
async fn clients_that_vanish_leave_nothing_and_disturb_nobody() -> Result<()> {
    let mut fleet = pairs().await?;
    let mut dice = Dice::new(8);
    let alone = fleet.ask(&counting()).await?;
    let mut neighbour = fleet.begin(&counting(), 1).await?;
    let mut n_answers = 0;
    for turn in 0..16 {
        // A prompt of some hundred tokens is still being read when its client vanishes.
        let words = "word ".repeat(300 + turn);
        let reading = json!({ "prompt": words, "max_tokens": 50 });
        if turn % 2 == 0 {
            let stream = fleet.send(serde_json::to_vec(&reading)?).await?;
            tokio::time::sleep(Duration::from_millis(dice.between(0, 100) as u64)).await;
            drop(stream);
        } else {
            drop(fleet.begin(&counting(), dice.between(1, 10)).await?);
        }
        if turn == 8 {
            // While a recovery is under way as well.
            let worker = fleet.workers(0).swap_remove(0);
            fleet.processes.kill(&worker.name).await?;
        }
        let goes_on = neighbour.0.n_events < N_TOKENS - 1;
        if goes_on && neighbour.0.next(&mut neighbour.1).await? && neighbour.0.end.is_none() {
            continue;
        }
        let answer = neighbour.0.clone().rest(&mut neighbour.1).await?;
        ensure!(answer.tokens == alone.tokens, "{answer:?}");
        n_answers += 1;
        neighbour = fleet.begin(&counting(), 1).await?;
    }
    let answer = neighbour.0.rest(&mut neighbour.1).await?;
    ensure!(answer.tokens == alone.tokens, "after {n_answers} others: {answer:?}");
    fleet.idle().await?;
    fleet.end().await
}
