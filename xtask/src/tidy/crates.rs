//! Checks of the crates: who may depend on whom, and what every manifest must have.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

/// What our packages' names start with, except the command line's.
const PREFIX: &str = "stagebus";

/// The crates from the lowest layer up. A crate may use those of lower layers only.
const LAYERS: [&[&str]; 8] = [
    &["stagebus-schemas"],
    &["stagebus-shards", "stagebus-view", "stagebus-plan", "stagebus-settings", "stagebus-keys"],
    &["stagebus-engine", "stagebus-bus", "stagebus-fleet", "stagebus-telemetry"],
    &["stagebus-draft", "stagebus-delivery"],
    &["stagebus-worker", "stagebus-coordinator", "stagebus-gateway"],
    &["stagebus-bench"],
    &["stagebus"],
    &["stagebus-tests", "stagebus-fuzz"],
];

/// Crates that do no I/O with the network and know no runtime, and what that excludes.
const PURE: [&str; 5] =
    ["stagebus-schemas", "stagebus-shards", "stagebus-view", "stagebus-plan", "stagebus-draft"];
const IMPURE: [&str; 4] = ["tokio", "async-nats", "openvino", "openvino-sys"];

/// Packages with one owner among our crates, also in tests.
const OWNED: [(&str, &str); 8] = [
    ("openvino", "stagebus-engine"),
    ("openvino-sys", "stagebus-engine"),
    ("async-nats", "stagebus-bus"),
    ("llguidance", "stagebus-draft"),
    ("opentelemetry", "stagebus-telemetry"),
    ("opentelemetry-http", "stagebus-telemetry"),
    ("opentelemetry-otlp", "stagebus-telemetry"),
    ("opentelemetry_sdk", "stagebus-telemetry"),
];

/// One crate of the workspace.
#[derive(Debug)]
pub(crate) struct Crate {
    /// Package name.
    name: String,
    /// Folder, relative to the repository's root.
    pub folder: PathBuf,
    /// Path of its `Cargo.toml`.
    pub manifest: PathBuf,
    /// Packages that it depends on, and whether for tests only.
    dependencies: Vec<(String, bool)>,
}

/// Reads the output of `cargo metadata --no-deps`.
///
/// # Errors
/// Output of another form.
pub(crate) fn parse(metadata: &str) -> Result<Vec<Crate>> {
    let metadata: Value =
        serde_json::from_str(metadata).context("`cargo metadata` wrote no JSON")?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let root = text(&metadata["workspace_root"]).context("no workspace root in the metadata")?;
    let packages = metadata["packages"].as_array().context("no packages in the metadata")?;
    let one = |package: &Value| {
        let manifest = PathBuf::from(text(&package["manifest_path"])?);
        let dependencies = package["dependencies"].as_array()?.iter();
        Some(Crate {
            name: text(&package["name"])?,
            folder: manifest.parent()?.strip_prefix(&root).ok()?.to_owned(),
            dependencies: dependencies
                .map(|dependency| Some((text(&dependency["name"])?, dependency["kind"] == "dev")))
                .collect::<Option<_>>()?,
            manifest,
        })
    };
    packages.iter().map(|package| one(package).context("a package lacks a field")).collect()
}

/// The objections to who depends on whom.
pub(crate) fn check(crates: &[Crate]) -> Vec<String> {
    let mut objections = Vec::new();
    for Crate { name, dependencies, .. } in crates {
        if name != "xtask" && layer(name).is_none() {
            objections.push(format!("{name} has no layer in xtask/src/tidy/crates.rs"));
        }
        for (dependency, for_tests) in dependencies {
            let owner = OWNED.iter().find(|(owned, _)| owned == dependency);
            if let Some((_, owner)) = owner.filter(|(_, owner)| owner != name) {
                objections.push(format!("{name} uses {dependency}, which belongs to {owner}"));
            }
            if *for_tests {
                continue;
            }
            if PURE.contains(&name.as_str()) && IMPURE.contains(&dependency.as_str()) {
                objections.push(format!("{name} uses {dependency}, but must not do I/O"));
            }
            if dependency.starts_with(PREFIX) && layer(dependency) >= layer(name) {
                objections.push(format!("{name} uses {dependency}, which is not below it"));
            }
        }
    }
    objections
}

/// The objections to a manifest: every crate takes the workspace's lints.
pub(crate) fn check_manifest(folder: &Path, text: &str) -> Option<String> {
    let mut lines = text.lines().map(str::trim).skip_while(|&line| line != "[lints]").skip(1);
    let shares = lines.next().is_some_and(|line| line.replace(' ', "") == "workspace=true");
    (!shares).then(|| format!("{}/Cargo.toml: lacks `[lints] workspace = true`", folder.display()))
}

/// The objection to a crate that the map of the code does not name.
pub(crate) fn check_named(folder: &Path, architecture: &str) -> Option<String> {
    let name = format!("{}/", folder.display());
    let named = architecture
        .match_indices(&name)
        .any(|(at, _)| !architecture[..at].ends_with(|c: char| c.is_alphanumeric() || c == '-'));
    (!named).then(|| format!("ARCHITECTURE.md does not name {name}"))
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Objections to one crate with these dependencies.
    fn objections(name: &str, dependencies: &[(&str, bool)]) -> Vec<String> {
        let dependencies = dependencies.iter().map(|&(name, dev)| (name.to_owned(), dev)).collect();
        let folder = PathBuf::from("x");
        check(&[Crate { name: name.to_owned(), manifest: folder.clone(), folder, dependencies }])
    }

    #[test]
    fn dependencies_point_downwards() {
        assert!(objections("stagebus-bus", &[("stagebus-schemas", false)]).is_empty());
        for (name, dependency) in [
            ("stagebus-schemas", "stagebus-bus"),
            ("stagebus-engine", "stagebus-bus"),
            ("stagebus-coordinator", "stagebus-worker"),
            ("stagebus-bus", "stagebus"),
            ("xtask", "stagebus-schemas"),
        ] {
            assert_eq!(objections(name, &[(dependency, false)]).len(), 1, "{name} {dependency}");
        }
        assert!(objections("stagebus-worker", &[("stagebus-coordinator", true)]).is_empty());
    }

    #[test]
    fn some_packages_have_one_owner() {
        assert!(objections("stagebus-bus", &[("async-nats", false)]).is_empty());
        assert_eq!(objections("stagebus-tests", &[("async-nats", true)]).len(), 1);
        assert!(objections("stagebus-engine", &[("openvino-sys", false)]).is_empty());
        assert_eq!(objections("stagebus-bench", &[("openvino", false)]).len(), 1);
    }

    #[test]
    fn pure_crates_know_no_runtime() {
        assert_eq!(objections("stagebus-shards", &[("tokio", false)]).len(), 1);
        assert!(objections("stagebus-shards", &[("tokio", true)]).is_empty());
    }

    #[test]
    fn a_new_crate_needs_a_layer() {
        assert_eq!(objections("stagebus-extra", &[]).len(), 1);
    }

    #[test]
    fn metadata_is_read() {
        let json = r#"{"workspace_root":"/r","packages":[{"name":"stagebus-bus",
            "manifest_path":"/r/bus/Cargo.toml","dependencies":[
            {"name":"bytes","kind":null},{"name":"tempfile","kind":"dev"}]}]}"#;
        let crates = parse(json).expect("metadata");
        assert_eq!(crates[0].folder, PathBuf::from("bus"));
        let dependencies = [("bytes".to_owned(), false), ("tempfile".to_owned(), true)];
        assert_eq!(crates[0].dependencies, dependencies);
        assert!(parse("{}").is_err());
    }

    #[test]
    fn manifests_share_the_lints() {
        assert!(check_manifest(Path::new("bus"), "[lints]\nworkspace = true\n").is_none());
        assert!(check_manifest(Path::new("bus"), "[package]\nname = \"x\"\n").is_some());
    }

    #[test]
    fn the_map_names_the_folder_itself() {
        assert!(check_named(Path::new("bus"), "- `bus/` talks").is_none());
        assert!(check_named(Path::new("bus"), "- `minibus/` drives").is_some());
    }
}
