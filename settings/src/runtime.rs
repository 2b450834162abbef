//! Where the broker's program and the OpenVINO library are.
//!
//! `cargo xtask setup` puts both into the folder `.runtime` at the repository's root; a copied
//! program finds a `.runtime` beside itself or above.

use std::path::{Path, PathBuf};

use crate::environment;
use crate::error::RuntimeError;

/// Name of the runtime folder.
const FOLDER: &str = ".runtime";

/// Folder of models in the runtime folder.
const MODELS: &str = "models";

/// File name of the broker's program.
const NATS_SERVER: &str = if cfg!(windows) { "nats-server.exe" } else { "nats-server" };

/// Name of the OpenVINO C library without a version. The wheels carry the versioned names only:
/// `libopenvino_c.so.2641`, `libopenvino_c.2641.dylib`, and `openvino_c.dll` on Windows.
const OPENVINO_C: &str = if cfg!(windows) {
    "openvino_c.dll"
} else if cfg!(target_os = "macos") {
    "libopenvino_c.dylib"
} else {
    "libopenvino_c.so"
};

/// Where OpenVINO's archives keep libraries, below `OPENVINO_INSTALL_DIR/runtime`.
const INSTALL_FOLDERS: [&str; 4] = if cfg!(windows) {
    ["bin/intel64/Release", "bin/arm64/Release", "bin/intel64", "bin"]
} else if cfg!(target_os = "macos") {
    ["lib/arm64/Release", "lib/intel64/Release", "lib/arm64", "lib/intel64"]
} else if cfg!(target_arch = "aarch64") {
    ["lib/aarch64", "lib/arm64", "lib/intel64", "lib"]
} else {
    ["lib/intel64", "lib", "lib/aarch64", "lib/arm64"]
};

/// The OpenVINO C library to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenVinoLibrary {
    /// This file; its neighbours hold the rest of the runtime.
    File(PathBuf),
    /// No file at the usual places: the system's loader may still know the name.
    SystemName {
        /// Name to give to the loader.
        name: &'static str,
        /// Places without the library, for the message when the loader does not know it either.
        looked_at: Vec<PathBuf>,
    },
}

impl OpenVinoLibrary {
    /// What to give to the loader.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::SystemName { name, .. } => Path::new(name),
        }
    }

    /// The error for a library that the loader could not open by its plain name; `None` for a
    /// file, whose own error says more.
    #[must_use]
    pub fn not_found(&self) -> Option<RuntimeError> {
        match self {
            Self::File(_) => None,
            Self::SystemName { looked_at, .. } => Some(RuntimeError::NotFound {
                what: "OpenVINO",
                variable: environment::OPENVINO,
                looked_at: looked_at.clone(),
            }),
        }
    }
}

/// The runtime folder: `STAGEBUS_RUNTIME_DIR`, else the nearest `.runtime` at or above the working
/// directory, else at or above the running program.
#[must_use]
pub fn runtime_dir() -> Option<PathBuf> {
    if let Some(path) = environment::runtime_dir() {
        return Some(path);
    }
    let starts = [
        std::env::current_dir().ok(),
        std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned)),
    ];
    starts.into_iter().flatten().find_map(|start| nearest(&start))
}

/// Where draft models are looked for: the folder that `STAGEBUS_DRAFT_DIR` names, else the models
/// of the runtime folder.
#[must_use]
pub fn draft_folders() -> Vec<PathBuf> {
    let models = || runtime_dir().map(|runtime| runtime.join(MODELS));
    environment::draft_dir().or_else(models).into_iter().collect()
}

/// The `nats-server` program: `STAGEBUS_NATS_SERVER`, the runtime folder, then `PATH`.
///
/// # Errors
/// [`RuntimeError::WrongOverride`] if the variable names no file, [`RuntimeError::NotFound`] if no
/// place has it.
pub fn find_nats_server() -> Result<PathBuf, RuntimeError> {
    nats_server_from(
        environment::nats_server(),
        runtime_dir().as_deref(),
        &environment::program_folders(),
    )
}

/// The OpenVINO C library: `STAGEBUS_OPENVINO` (file or folder), the runtime folder,
/// `OPENVINO_INSTALL_DIR`, the loader's search path, and last the plain name.
///
/// # Errors
/// [`RuntimeError::WrongOverride`] if the variable names a place without the library.
pub fn find_openvino() -> Result<OpenVinoLibrary, RuntimeError> {
    let mut folders = Vec::new();
    if let Some(runtime) = runtime_dir() {
        folders.push(runtime.join("openvino").join("openvino").join("libs"));
    }
    if let Some(install) = environment::openvino_install_dir() {
        folders.extend(INSTALL_FOLDERS.map(|folder| install.join("runtime").join(folder)));
    }
    folders.extend(environment::library_folders());
    openvino_from(environment::openvino(), folders)
}

fn nearest(start: &Path) -> Option<PathBuf> {
    start.ancestors().map(|folder| folder.join(FOLDER)).find(|folder| folder.is_dir())
}

fn nats_server_from(
    named: Option<PathBuf>,
    runtime: Option<&Path>,
    path: &[PathBuf],
) -> Result<PathBuf, RuntimeError> {
    const WHAT: &str = "nats-server";
    if let Some(path) = named {
        let inside = path.join(NATS_SERVER);
        return match () {
            () if path.is_file() => Ok(path),
            () if inside.is_file() => Ok(inside),
            () => Err(RuntimeError::WrongOverride {
                what: WHAT,
                variable: environment::NATS_SERVER,
                path,
            }),
        };
    }
    let folders = runtime.map(|runtime| runtime.join("bin")).into_iter().chain(path.to_vec());
    let candidates: Vec<PathBuf> = folders.map(|folder| folder.join(NATS_SERVER)).collect();
    match candidates.iter().find(|file| file.is_file()) {
        Some(file) => Ok(file.clone()),
        None => Err(RuntimeError::NotFound {
            what: WHAT,
            variable: environment::NATS_SERVER,
            looked_at: candidates,
        }),
    }
}

fn openvino_from(
    named: Option<PathBuf>,
    folders: Vec<PathBuf>,
) -> Result<OpenVinoLibrary, RuntimeError> {
    if let Some(path) = named {
        if path.is_file() {
            return Ok(OpenVinoLibrary::File(path));
        }
        // A folder may also be the root of an unpacked wheel.
        let inside = [path.clone(), path.join("libs"), path.join("openvino").join("libs")];
        return match inside.iter().find_map(|folder| library_in(folder)) {
            Some(file) => Ok(OpenVinoLibrary::File(file)),
            None => Err(RuntimeError::WrongOverride {
                what: "OpenVINO C library",
                variable: environment::OPENVINO,
                path,
            }),
        };
    }
    Ok(match folders.iter().find_map(|folder| library_in(folder)) {
        Some(file) => OpenVinoLibrary::File(file),
        None => OpenVinoLibrary::SystemName { name: OPENVINO_C, looked_at: folders },
    })
}

/// The C library in `folder`: the plain name, else the highest version.
fn library_in(folder: &Path) -> Option<PathBuf> {
    let plain = folder.join(OPENVINO_C);
    if plain.is_file() {
        return Some(plain);
    }
    std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = version_of(entry.file_name().to_str()?)?;
            Some((version, entry.path()))
        })
        .max()
        .map(|(_, path)| path)
}

/// The version in `libopenvino_c.so.2641` or `libopenvino_c.2641.dylib`, as numbers.
fn version_of(name: &str) -> Option<Vec<u32>> {
    let version = if cfg!(windows) {
        return None;
    } else if cfg!(target_os = "macos") {
        name.strip_prefix("libopenvino_c.")?.strip_suffix(".dylib")?
    } else {
        name.strip_prefix("libopenvino_c.so.")?
    };
    version.split('.').map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Name of the library with a version, as the wheels of this platform carry it.
    fn versioned(version: &str) -> String {
        if cfg!(windows) {
            OPENVINO_C.to_owned()
        } else if cfg!(target_os = "macos") {
            format!("libopenvino_c.{version}.dylib")
        } else {
            format!("libopenvino_c.so.{version}")
        }
    }

    #[test]
    fn the_nearest_runtime_folder_is_found_from_below() {
        let root = tempfile::tempdir().expect("folder");
        let below = root.path().join("a").join("b");
        fs::create_dir_all(&below).expect("folders");
        fs::create_dir(root.path().join(FOLDER)).expect("folder");
        assert_eq!(nearest(&below), Some(root.path().join(FOLDER)));
        fs::create_dir(root.path().join("a").join(FOLDER)).expect("folder");
        assert_eq!(nearest(&below), Some(root.path().join("a").join(FOLDER)));
    }

    #[test]
    fn the_highest_version_of_the_library_is_taken() {
        let root = tempfile::tempdir().expect("folder");
        for version in ["2541", "2641", "990"] {
            fs::write(root.path().join(versioned(version)), "").expect("file");
        }
        let found = openvino_from(None, vec![root.path().join("no"), root.path().to_owned()]);
        let file = root.path().join(versioned("2641"));
        assert_eq!(found.expect("found"), OpenVinoLibrary::File(file.clone()));
        let by_folder = openvino_from(Some(root.path().to_owned()), vec![]).expect("found");
        assert_eq!(by_folder.path(), file);
    }

    #[test]
    fn a_named_place_without_the_library_is_an_error() {
        let root = tempfile::tempdir().expect("folder");
        let error = openvino_from(Some(root.path().to_owned()), vec![]).expect_err("empty folder");
        assert!(matches!(error, RuntimeError::WrongOverride { .. }));
        assert!(error.to_string().contains(environment::OPENVINO), "{error}");
        let error = nats_server_from(Some(root.path().to_owned()), None, &[]).expect_err("empty");
        assert!(matches!(error, RuntimeError::WrongOverride { .. }));
    }

    #[test]
    fn without_a_library_the_places_are_listed() {
        let root = tempfile::tempdir().expect("folder");
        let library = openvino_from(None, vec![root.path().to_owned()]).expect("plain name");
        assert_eq!(library.path(), Path::new(OPENVINO_C));
        let text = library.not_found().expect("not a file").to_string();
        assert!(text.contains("cargo xtask setup"), "{text}");
        assert!(text.contains(&root.path().display().to_string()), "{text}");
    }

    #[test]
    fn the_program_is_found_in_order() {
        let root = tempfile::tempdir().expect("folder");
        let path = root.path().join("path");
        let bin = root.path().join("bin");
        for folder in [&path, &bin] {
            fs::create_dir(folder).expect("folder");
        }
        fs::write(path.join(NATS_SERVER), "").expect("file");
        let find = || nats_server_from(None, Some(root.path()), std::slice::from_ref(&path));
        assert_eq!(find().expect("found"), path.join(NATS_SERVER));
        fs::write(bin.join(NATS_SERVER), "").expect("file");
        assert_eq!(find().expect("found"), bin.join(NATS_SERVER));
    }
}
