//! The result files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// What every result must say about how it came about.
const NEEDED: [(&str, &[&str]); 2] = [
    ("origin", &["command", "date", "stagebus", "openvino", "nats_server"]),
    ("machine", &["processor", "n_cpus", "os", "arch"]),
];

/// Results by name: the file's, without its ending.
#[derive(Debug, Default)]
pub(super) struct Results(BTreeMap<String, Value>);

impl Results {
    /// Reads all `*.json` of a folder.
    ///
    /// # Errors
    /// A folder or file that cannot be read.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let entries =
            fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
        let mut results = BTreeMap::new();
        for entry in entries {
            let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let shown = path.display();
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {shown}"))?;
            let result =
                serde_json::from_str(&text).with_context(|| format!("{shown}: no JSON"))?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            results.insert(name, result);
        }
        Ok(Self(results))
    }

    /// The result of this name.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// All of them, in order.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, result)| (name.as_str(), result))
    }

    /// The objections to results that do not say how they came about.
    pub(super) fn objections(&self) -> Vec<String> {
        let mut objections = Vec::new();
        for (name, result) in self.all() {
            for (table, keys) in NEEDED {
                let missing = keys.iter().filter(|key| result[table][**key].is_null());
                objections
                    .extend(missing.map(|key| format!("result {name}: has no {table}.{key}")));
            }
        }
        objections
    }

    #[cfg(test)]
    pub(super) fn of(name: &str, result: Value) -> Self {
        Self(BTreeMap::from([(name.to_owned(), result)]))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_must_say_how_it_came_about() {
        let origin = json!({"command": "c", "date": "d", "openvino": null, "stagebus": "0.1.0",
            "nats_server": "n"});
        let machine = json!({"processor": "P", "n_cpus": 2, "os": "linux"});
        let results = Results::of("hop", json!({"origin": origin, "machine": machine}));
        let expected = ["result hop: has no origin.openvino", "result hop: has no machine.arch"];
        assert_eq!(results.objections(), expected);
    }

    #[test]
    fn other_files_of_the_folder_are_left_alone() {
        let folder = tempfile::tempdir().expect("folder");
        fs::write(folder.path().join("a.svg"), "<svg/>").expect("file");
        fs::write(folder.path().join("hop.json"), "{}").expect("file");
        let results = Results::read(folder.path()).expect("readable");
        assert_eq!(results.all().map(|(name, _)| name).collect::<Vec<_>>(), ["hop"]);
        fs::write(folder.path().join("b.json"), "{").expect("file");
        Results::read(folder.path()).expect_err("no JSON");
    }
}
