//! `stagebus bench all`: every scenario, one after the other, into one folder.
//!
//! Each scenario is a process of its own, started as a user would start it with `--json`; what it
//! prints is kept. The folder gets, for each scenario, the JSON object, a page with the claims and
//! tables, and plots; and a page over all of them. A scenario that fails leaves the others alone.

mod page;
mod plots;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context as _;
use serde_json::Value;

use crate::harness::claims::Listed;
use crate::harness::{machine, output};
use page::Page;

/// Arguments of `stagebus bench all`.
#[derive(Debug, Clone, clap::Args)]
pub struct AllArgs {
    /// The folder for the results; files of earlier runs are replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Only these scenarios
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    only: Vec<String>,

    /// A first look: few rounds, short answers
    #[arg(long)]
    quick: bool,

    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,
}

/// What a scenario printed.
#[derive(Debug)]
struct Printed {
    /// Its tables.
    text: String,
    /// Its JSON object.
    result: Value,
}

/// Runs the scenarios and writes the folder.
///
/// # Errors
/// An unknown scenario, a folder that cannot be written; and, after all of them, scenarios that
/// failed.
pub async fn run(args: AllArgs, scenarios: &[Listed], quiet: bool) -> anyhow::Result<()> {
    let names: Vec<&str> = scenarios.iter().map(|listed| listed.name).collect();
    for name in &args.only {
        anyhow::ensure!(
            names.contains(&name.as_str()),
            "--only: there is no scenario {name}, there are {}",
            names.join(", ")
        );
    }
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    let mut pages = Vec::new();
    let mut failed = Vec::new();
    for listed in scenarios {
        if !args.only.is_empty() && !args.only.iter().any(|name| name == listed.name) {
            continue;
        }
        output::note(quiet, &format!("== {}", listed.name));
        match scenario(&args, listed, quiet).await {
            Ok(printed) => pages.push(write(&args.out, listed.name, printed)?),
            Err(error) => {
                output::note(quiet, &format!("{}: {error:#}", listed.name));
                failed.push(listed.name);
            }
        }
    }
    let summary = page::summary(&pages, &failed);
    put(&args.out.join("README.md"), &summary)?;
    output::print(&summary)?;
    anyhow::ensure!(failed.is_empty(), "these scenarios failed: {}", failed.join(", "));
    Ok(())
}

/// Runs one scenario in a process of its own.
async fn scenario(args: &AllArgs, listed: &Listed, quiet: bool) -> anyhow::Result<Printed> {
    let mut command = tokio::process::Command::new(machine::this_program()?);
    command.args(["bench", listed.name, "--json"]);
    if quiet {
        command.arg("--quiet");
    }
    if args.quick {
        command.args(listed.quick);
    }
    if let Some(model) = args.model.as_ref().filter(|_| takes_model(listed.name)) {
        command.arg("--model").arg(model);
    }
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn();
    let ended = child.context("cannot start it")?.wait_with_output();
    let ended = ended.await.context("cannot wait for it")?;
    anyhow::ensure!(ended.status.success(), "it ended with {}", ended.status);
    parse(&String::from_utf8_lossy(&ended.stdout))
}

/// These measure no model.
fn takes_model(name: &str) -> bool {
    !["hop", "gateway", "delivery", "link"].contains(&name)
}

/// The last line is the JSON object, everything before it is for people.
fn parse(printed: &str) -> anyhow::Result<Printed> {
    let printed = printed.trim_end();
    let (text, json) = printed.rsplit_once('\n').unwrap_or(("", printed));
    let result: Value = serde_json::from_str(json).context("its last line is no JSON")?;
    anyhow::ensure!(result["claims"].is_array(), "its result has no claims");
    Ok(Printed { text: text.to_owned(), result })
}

/// Writes the files of one scenario.
fn write(folder: &Path, name: &'static str, printed: Printed) -> anyhow::Result<Page> {
    let mut json = serde_json::to_string_pretty(&printed.result)?;
    json.push('\n');
    put(&folder.join(format!("{name}.json")), &json)?;
    let mut plot_files = Vec::new();
    for plot in plots::of(name, &printed.result) {
        if plot.is_empty() {
            continue;
        }
        let file = format!("{}.svg", plot.name);
        put(&folder.join(&file), &plot.svg()?)?;
        plot_files.push((file, plot.title));
    }
    let page = Page { name, text: printed.text, result: printed.result, plots: plot_files };
    put(&folder.join(format!("{name}.md")), &page.markdown())?;
    Ok(page)
}

fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_result() {
        let printed = parse("a table\nof two lines\n{\"claims\":[]}\n").expect("valid");
        assert_eq!(printed.text, "a table\nof two lines");
        parse("a table\n").expect_err("no JSON");
        parse("{}").expect_err("no claims");
    }

    #[test]
    fn a_scenario_has_a_page_its_result_and_plots() {
        let folder = tempfile::tempdir().expect("a folder");
        let printed = parse(
            "table\n{\"claims\":[],\"points\":[{\"n_stages\":1,\"n_tokens\":64,\"ttft_ms\":{\"median\":9.5}}]}",
        );
        let page = write(folder.path(), "prefill", printed.expect("valid")).expect("written");
        assert_eq!(page.plots.len(), 1);
        let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect(name);
        assert!(text("prefill.md").contains("](prefill.svg)"));
        assert!(text("prefill.json").contains("9.5"));
        assert!(text("prefill.svg").contains("</svg>"));
    }
}
