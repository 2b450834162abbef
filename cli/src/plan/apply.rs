//! Writes what the processes of a plan read, and says how they are started.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use stagebus_plan::Placed;
use stagebus_settings::BrokerSettings;

use super::report::Report;

/// The shard set's folder.
pub(super) const SHARDS: &str = "shards";

/// Least room for KV caches, in MiB: what a worker is worth starting with.
const LEAST_KV_MIB: u64 = 64;

/// A configuration that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub(super) struct WriteError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// What was written.
#[derive(Debug)]
pub(super) struct Applied {
    /// The folder.
    pub(super) dir: PathBuf,
    /// The commands, in the order in which they are best given.
    pub(super) commands: Vec<Command>,
    /// Whether the broker asks for keys, which are not copied.
    keys: bool,
}

/// A command on a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Command {
    /// The node's name.
    node: String,
    /// Its configuration.
    config: PathBuf,
    /// What to give in a shell there.
    command: String,
}

/// Writes a configuration for every node of the chosen layout.
///
/// # Errors
/// [`WriteError`].
pub(super) fn write(
    dir: &Path,
    report: &Report,
    broker: &BrokerSettings,
) -> Result<Applied, WriteError> {
    let keys = broker.nkey_seed_file.is_some() || broker.user.is_some() || broker.token.is_some();
    let mut commands = Vec::new();
    for (stage, placed) in report.layout().stages.iter().enumerate() {
        let name = report.node(placed.node);
        let config = dir.join(format!("{name}.toml"));
        let text = configuration(report, (stage, placed), &dir.join(SHARDS), (broker, keys));
        let written = fs::write(&config, text);
        written.map_err(|source| WriteError { path: config.clone(), source })?;
        let (shown, shards) = (quoted(&config), quoted(&dir.join(SHARDS)));
        let command = match stage {
            0 => format!("stagebus coordinator --config {shown} --shards {shards}"),
            _ => format!("stagebus worker --config {shown}"),
        };
        commands.push(Command { node: name.to_owned(), config, command });
    }
    Ok(Applied { dir: dir.to_owned(), commands, keys })
}

fn configuration(
    report: &Report,
    (stage, placed): (usize, &Placed),
    shards: &Path,
    (broker, keys): (&BrokerSettings, bool),
) -> String {
    let about = &report.nodes[placed.node].about;
    let device = report.device(placed.node, placed.device);
    let kv_mib = (placed.kv_bytes >> 20).saturating_add(1).max(LEAST_KV_MIB);
    let (first, end) = (placed.layers.start, placed.layers.end);
    let shards = text(&shards.to_string_lossy());
    let mut lines = vec![
        format!(
            "# Written by `stagebus plan`: {}, stage {stage}, layers {first}..{end}.",
            report.model
        ),
        String::new(),
        "[broker]".to_owned(),
    ];
    if keys {
        lines.push("# Add the lines of [broker] in the folder of this machine's key.".to_owned());
    }
    lines.extend([
        format!("url = {}", text(&broker.url)),
        String::new(),
        "[worker]".to_owned(),
        format!("shards = {shards}"),
        format!("stage = {stage}"),
        format!("device = {}", text(device)),
        format!("engine = {}", text(&about.engine)),
        format!("profile = {}", text(&about.profile)),
        format!("threads = {}", about.threads),
        format!("kv_memory_mib = {kv_mib}"),
    ]);
    if stage == 0 {
        lines.extend([String::new(), "[coordinator]".to_owned(), "host_stage0 = true".to_owned()]);
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A string of TOML, whose escapes those of JSON are.
fn text(value: &str) -> String {
    serde_json::Value::from(value).to_string()
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let path = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/\\:-_.".contains(c);
    if path.chars().all(plain) { path.into_owned() } else { format!("\"{path}\"") }
}

impl Applied {
    /// The text for people.
    pub(super) fn describe(&self) -> String {
        let mut text = format!("\nwritten to {}; end the nodes, then start\n", self.dir.display());
        for Command { node, command, .. } in &self.commands {
            text.push_str(&format!("  on {node}:  {command}\n"));
        }
        if self.commands.len() > 1 {
            text.push_str(
                "Copy the folder to the same place on the other machines, or share it. Or push the \
                 shards with `stagebus push`, and leave the line `shards` out of the workers' files: \
                 then they pull what they need.\n",
            );
        }
        if self.keys {
            text.push_str(
                "The broker asks for keys: add to each file the lines of [broker] in the folder of \
                 that machine's key.\n",
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use stagebus_settings::{Overrides, load};
    use stagebus_worker::WorkerSettings;

    use super::*;
    use crate::plan::report::tests::report;

    #[test]
    fn what_is_written_is_what_workers_and_coordinators_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let report = report(Some(2));
        let broker = BrokerSettings::default();
        let applied = write(folder.path(), &report, &broker).expect("a folder to write to");
        let [first, second] = applied.commands.as_slice() else { panic!("{applied:?}") };
        assert!(first.command.starts_with("stagebus coordinator --config "), "{first:?}");
        assert!(second.command.starts_with("stagebus worker --config "), "{second:?}");
        for (stage, command) in applied.commands.iter().enumerate() {
            let read =
                load::<WorkerSettings>("worker", Some(&command.config), &Overrides::default());
            let read = read.expect("a configuration");
            read.process.validate().expect("it can work");
            assert_eq!(read.process.stage.map(usize::from), Some(stage));
            assert_eq!(read.process.shards, folder.path().join(SHARDS));
            assert_eq!((read.process.threads, read.process.device.as_str()), (1, "CPU"));
            assert_eq!(read.broker.url, broker.url);
            let text = fs::read_to_string(&command.config).expect("the file");
            assert_eq!(text.contains("host_stage0 = true"), stage == 0, "{text}");
        }
        let text = applied.describe();
        assert!(text.contains(&first.command) && text.contains("Copy the folder"), "{text}");
        assert!(!text.contains("keys"), "{text}");
    }

    #[test]
    fn strange_names_survive() {
        assert_eq!(text("a\"b\\c"), "\"a\\\"b\\\\c\"");
        assert_eq!(quoted(Path::new("/a/b-c.toml")), "/a/b-c.toml");
        assert_eq!(quoted(Path::new("/a b")), "\"/a b\"");
    }

    #[test]
    fn a_broker_with_keys_is_said() {
        let folder = tempfile::tempdir().expect("a folder");
        let broker =
            BrokerSettings { nkey_seed_file: Some("seed.nk".into()), ..BrokerSettings::default() };
        let applied = write(folder.path(), &report(None), &broker).expect("a folder");
        assert!(applied.describe().contains("asks for keys"), "{}", applied.describe());
        let text = fs::read_to_string(&applied.commands[0].config).expect("the file");
        assert!(!text.contains("seed.nk"), "{text}");
    }
}
