//! Model files and options that cannot be sharded: a message that names the thing, and nothing
//! left behind.

use std::fs;

use anyhow::{Context, Result, ensure};
use stagebus_tests::program::Call;
use stagebus_tests::setup;

use crate::gguf_edit::{set_string, set_tensor_type};

/// Shards `model` (its bytes) and checks that it fails with `parts` in the message, and that there
/// is nothing in the output's folder.
async fn refused(model: &[u8], options: &[&str], parts: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("spoilt.gguf");
    fs::write(&file, model)?;
    refused_file(&file, options, parts).await
}

async fn refused_file(file: &std::path::Path, options: &[&str], parts: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ended = Call::new(["shard"])
        .arg(file)
        .arg("--out")
        .arg(folder.path().join("set"))
        .args(options)
        .run()
        .await?
        .failure(parts)?;
    let left: Vec<_> = fs::read_dir(folder.path())?.collect();
    ensure!(left.is_empty(), "{left:?} was left\n{}", ended.report());
    Ok(())
}

fn model() -> Result<Vec<u8>> {
    fs::read(setup::model()?).context("the model")
}

const TWO: &[&str] = &["--stages", "2"];

#[tokio::test]
async fn a_truncated_file_is_refused_wherever_it_ends() -> Result<()> {
    let model = model()?;
    for n in [5, 23, 1000, 100_000, 3_000_000, model.len() / 2, model.len() - 1] {
        let refusal = refused(&model[..n], TWO, &["spoilt.gguf", "truncated"]).await;
        refusal.with_context(|| format!("cut after {n} bytes"))?;
    }
    refused(&[], TWO, &["spoilt.gguf"]).await
}

#[tokio::test]
async fn a_file_of_another_kind_is_refused() -> Result<()> {
    refused(b"{\"model\": \"no\"}", TWO, &["spoilt.gguf", "not a GGUF file"]).await?;
    let mut model = model()?;
    model[4] = 99;
    refused(&model, TWO, &["spoilt.gguf", "version 99"]).await?;
    refused_file("no/such.gguf".as_ref(), TWO, &["no/such.gguf", "cannot be opened"]).await?;
    let folder = tempfile::tempdir()?;
    let name = folder.path().display().to_string();
    refused_file(folder.path(), TWO, &[&name]).await
}

#[tokio::test]
async fn an_unknown_architecture_is_named() -> Result<()> {
    let mut model = model()?;
    set_string(&mut model, "general.architecture", "zebra")?;
    refused(&model, TWO, &["zebra", "llama"]).await
}

#[tokio::test]
async fn an_unknown_or_unsupported_tensor_type_is_named() -> Result<()> {
    let mut model = model()?;
    let tensor = "blk.3.ffn_up.weight";
    set_tensor_type(&mut model, tensor, 4242)?;
    refused(&model, TWO, &[tensor, "4242"]).await?;
    // IQ4_NL: known, as large as the tensor's own type or smaller, but not read.
    set_tensor_type(&mut model, tensor, 20)?;
    refused(&model, TWO, &[tensor, "IQ4_NL"]).await
}

#[tokio::test]
async fn a_wrong_number_of_stages_is_refused() -> Result<()> {
    let model = setup::model()?;
    let layers = setup::N_LAYERS.to_string();
    for stages in ["0", "31", "4000000000"] {
        let refusal = refused_file(&model, &["--stages", stages], &[stages, &layers]).await;
        refusal.with_context(|| format!("{stages} stages"))?;
    }
    for (split, part) in [("16,15", "31"), ("30,0", "stage 1"), ("1", "1 layers")] {
        let refusal = refused_file(&model, &["--split", split], &[part]).await;
        refusal.with_context(|| format!("split {split}"))?;
    }
    refused_file(&model, &["--stages", "3", "--split", "15,15"], &["--stages 3", "--split"]).await
}

#[tokio::test]
async fn an_existing_folder_is_left_alone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let note = folder.path().join("note.txt");
    fs::write(&note, "mine")?;
    for force in [&[][..], &["--force"]] {
        Call::new(["shard", "--stages", "2"])
            .arg(setup::model()?)
            .arg("--out")
            .arg(folder.path())
            .args(force)
            .run()
            .await?
            .failure(&["not a shard set"])?;
        let files: Vec<_> = fs::read_dir(folder.path())?.collect::<Result<_, _>>()?;
        ensure!(files.len() == 1 && fs::read_to_string(&note)? == "mine", "{files:?}");
    }
    Ok(())
}
