//! Builds the paged attention library (`native/`) against the OpenVINO headers.
//!
//! It becomes a shared library of its own, carried inside the crate and opened at run time, so that
//! a binary does not need OpenVINO to start. Without headers or compiler the crate still builds:
//! the paged backend then says why it is not there and the stateful one serves.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a build script is told everything by its environment and answers on stdout"
)]

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// OpenVINO release whose C++ interface the library uses; headers of another one are refused.
const OPENVINO_RELEASE: &str = "2026.4";

fn main() {
    println!("cargo::rerun-if-changed=native");
    for name in ["STAGEBUS_OPENVINO", "OPENVINO_INSTALL_DIR", "CXX"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let library = out.join("stagebus-paged");
    let failure = match build(&library) {
        Ok(()) => String::new(),
        Err(reason) => {
            println!("cargo::warning=no paged attention library: {reason}");
            if let Err(error) = std::fs::write(&library, []) {
                println!("cargo::error=cannot write {}: {error}", library.display());
            }
            reason
        }
    };
    println!("cargo::rustc-env=STAGEBUS_PAGED_LIBRARY={}", library.display());
    println!("cargo::rustc-env=STAGEBUS_PAGED_FAILURE={}", failure.replace('\n', " "));
    println!("cargo::rustc-env=STAGEBUS_PAGED_VERSION={OPENVINO_RELEASE}");
}

/// A folder with `include` and the folder that holds the runtime libraries.
struct OpenVino {
    include: PathBuf,
    libraries: PathBuf,
}

fn build(library: &Path) -> Result<(), String> {
    let openvino = find_openvino()?;
    let native = Path::new("native");
    let compiler = cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .warnings(false)
        .include(&openvino.include)
        .cargo_metadata(false)
        .try_get_compiler()
        .map_err(|error| error.to_string())?;
    let runtime = runtime_library(&openvino.libraries)?;
    let mut command = compiler.to_command();
    command.args(["paged.cpp", "state.cpp"].map(|file| native.join(file)));
    if compiler.is_like_msvc() {
        // Not run here: written by the compiler's documentation.
        command.arg("/LD").arg(format!("/Fe:{}", library.display())).arg(runtime);
    } else {
        command.args(["-shared", "-fPIC", "-fvisibility=hidden", "-o"]).arg(library).arg(runtime);
    }
    run(&mut command)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let first = text.lines().find(|line| line.contains("error")).unwrap_or("no message");
    Err(format!("the C++ compiler failed: {first}"))
}

fn find_openvino() -> Result<OpenVino, String> {
    let mut roots = Vec::new();
    if let Some(path) = env::var_os("STAGEBUS_OPENVINO") {
        // The C library or the folder that holds it: headers are beside that folder.
        roots.extend(PathBuf::from(path).ancestors().take(3).map(Path::to_path_buf));
    }
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    for folder in here.ancestors() {
        let root = folder.join(".runtime").join("openvino").join("openvino");
        if Some(folder) == here.parent() || root.is_dir() {
            // A path that does not exist yet makes cargo look again at every build.
            println!("cargo::rerun-if-changed={}", root.join("include").display());
        }
        roots.push(root);
    }
    if let Some(path) = env::var_os("OPENVINO_INSTALL_DIR") {
        roots.push(PathBuf::from(path).join("runtime"));
    }
    for root in roots {
        let include = root.join("include");
        if !include.join("openvino").join("openvino.hpp").is_file() {
            continue;
        }
        let libraries =
            ["libs", "lib/intel64", "lib/aarch64", "lib/intel64/Release", "lib/arm64/Release"]
                .iter()
                .map(|folder| root.join(folder))
                .find(|folder| folder.is_dir());
        if let Some(libraries) = libraries {
            return Ok(OpenVino { include, libraries });
        }
    }
    Err("no OpenVINO headers found: run `cargo xtask setup` or set STAGEBUS_OPENVINO, then build \
         again"
        .to_owned())
}

/// The library to link with: `libopenvino.so.2641`, `libopenvino.2641.dylib`, `openvino.lib`.
fn runtime_library(folder: &Path) -> Result<PathBuf, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| error.to_string())?;
    let is_runtime = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| {
            name == "openvino.lib"
                || name.starts_with("libopenvino.so")
                || (name.starts_with("libopenvino.") && name.ends_with(".dylib"))
        })
    };
    entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(is_runtime)
        .ok_or_else(|| format!("no OpenVINO library in {}", folder.display()))
}
