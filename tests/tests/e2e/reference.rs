//! Every token of the reference, for every number of stages, judged by `stagebus check`.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::program::Call;
use stagebus_tests::{setup, shard_sets, turn};

async fn all_cases_are_equal(engine: &str, n_stages: usize) -> Result<()> {
    all_cases_are_equal_with(engine, n_stages, "off", "0").await
}

/// Compares with the reference once for each of the draft lengths `ks`.
async fn all_cases_are_equal_with(
    engine: &str,
    n_stages: usize,
    draft: &str,
    ks: &str,
) -> Result<()> {
    let _turn = turn::take().await;
    let options = ["check", "--json", "--engine", engine, "--draft", draft, "--k", ks];
    let report = Call::new(options)
        .arg("--reference")
        .arg(setup::reference())
        .arg("--shards")
        .arg(shard_sets::get(n_stages).await?)
        .run()
        .await?
        .success()?
        .json()?;
    ensure!(report["profile"] == "exact" && report["equal"] == true, "{report:#}");
    let runs = report["runs"].as_array().context("a list of runs")?;
    let found: Vec<&str> = runs.iter().filter_map(|run| run["k"].as_str()).collect();
    ensure!(found.join(",") == ks, "{report:#}");
    for run in runs {
        let found = json!([run["stages"], run["weights"], run["cases_equal"], run["cases_total"]]);
        ensure!(found == json!([n_stages, "exact", 8, 8]), "{report:#}");
    }
    Ok(())
}

#[tokio::test]
async fn one_stage_gives_the_reference_with_paged_attention() -> Result<()> {
    all_cases_are_equal("paged", 1).await
}

#[tokio::test]
async fn two_stages_give_the_reference_with_paged_attention() -> Result<()> {
    all_cases_are_equal("paged", 2).await
}

#[tokio::test]
async fn three_stages_give_the_reference_with_paged_attention() -> Result<()> {
    all_cases_are_equal("paged", 3).await
}

#[tokio::test]
async fn five_stages_give_the_reference_with_paged_attention() -> Result<()> {
    all_cases_are_equal("paged", 5).await
}

#[tokio::test]
async fn one_stage_gives_the_reference_with_a_request_per_session() -> Result<()> {
    all_cases_are_equal("stateful", 1).await
}

#[tokio::test]
async fn two_stages_give_the_reference_with_a_request_per_session() -> Result<()> {
    all_cases_are_equal("stateful", 2).await
}

#[tokio::test]
async fn three_stages_give_the_reference_with_a_request_per_session() -> Result<()> {
    all_cases_are_equal("stateful", 3).await
}

#[tokio::test]
async fn five_stages_give_the_reference_with_a_request_per_session() -> Result<()> {
    all_cases_are_equal("stateful", 5).await
}

#[tokio::test]
async fn one_stage_gives_the_reference_with_a_draft_model() -> Result<()> {
    all_cases_are_equal_with("paged", 1, "model", "5").await
}

#[tokio::test]
async fn two_stages_give_the_reference_for_short_and_long_drafts() -> Result<()> {
    all_cases_are_equal_with("paged", 2, "hybrid", "1,4,10,auto").await
}

#[tokio::test]
async fn three_stages_give_the_reference_with_prompt_look_up() -> Result<()> {
    all_cases_are_equal_with("paged", 3, "ngram", "7").await
}

#[tokio::test]
async fn mask_rewinds_give_the_reference() -> Result<()> {
    all_cases_are_equal_with("stateful", 2, "model", "3").await
}

/// Runs `check` on a changed copy of the first two cases.
async fn check(change: impl FnOnce(&mut Value)) -> Result<stagebus_tests::program::Ended> {
    let _turn = turn::take().await;
    let mut cases: Value = serde_json::from_slice(&std::fs::read(setup::reference())?)?;
    if let Some(cases) = cases.as_array_mut() {
        cases.truncate(2);
    }
    change(&mut cases);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("changed.json");
    std::fs::write(&file, serde_json::to_vec(&cases)?)?;
    Call::new(["check", "--reference"])
        .arg(&file)
        .arg("--shards")
        .arg(shard_sets::get(2).await?)
        .run()
        .await
}

#[tokio::test]
async fn one_altered_token_is_found_and_named() -> Result<()> {
    let mut right = 0;
    let ended = check(|cases| {
        right = cases[1]["output_ids"][5].as_u64().unwrap_or_default();
        cases[1]["output_ids"][5] = json!(right + 1);
    })
    .await?;
    ensure!(ended.code() == Some(1), "{}", ended.report());
    let text = ended.stdout();
    let difference = format!("token 5: expected {}, found {right}", right + 1);
    for part in ["1 of 2 cases equal", "ok     0 short-factual", "DIFF   1 reasoning", &difference]
    {
        ensure!(text.contains(part), "{part:?} is missing\n{}", ended.report());
    }
    Ok(())
}

#[tokio::test]
async fn a_missing_end_token_is_found() -> Result<()> {
    // The first case ends by itself: an implementation that goes on past the end token differs.
    let ended = check(|cases| {
        if let Some(ids) = cases[0]["output_ids"].as_array_mut() {
            ids.push(json!(1));
        }
    })
    .await?;
    ensure!(ended.code() == Some(1), "{}", ended.report());
    let difference = "token 8: expected 1, found the end";
    ensure!(ended.stdout().contains(difference), "{}", ended.report());
    Ok(())
}

#[tokio::test]
async fn an_altered_prompt_is_found() -> Result<()> {
    let ended = check(|cases| cases[0]["input_ids"][3] = json!(7)).await?;
    ensure!(ended.code() == Some(1), "{}", ended.report());
    ensure!(ended.stdout().contains("the prompt's tokens differ at token 3"), "{}", ended.report());
    Ok(())
}

#[tokio::test]
async fn a_malformed_reference_is_refused_before_anything_starts() -> Result<()> {
    check(|cases| *cases = json!({ "cases": [] }))
        .await?
        .failure(&["changed.json", "JSON array"])?;
    check(|cases| *cases = json!([])).await?.failure(&["changed.json", "no case"])?;
    check(|cases| cases[1]["output_ids"] = json!(["x"])).await?.failure(&["changed.json"])?;
    Call::new(["check", "--reference", "no/such.json"])
        .run()
        .await?
        .failure(&["cannot read the reference file no/such.json"])?;
    Ok(())
}
