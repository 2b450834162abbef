//! Merging of the layers, and the checks that name key, value and source.
//!
//! Every value carries its origin (file, variable or flag) through the merge. The tree of the
//! serialised defaults is both the weakest layer and the list of the keys that exist, so the
//! settings types must serialise all their fields (an absent `Option` as null).

use std::path::Path;

use config::{ConfigError, File, FileFormat, Map, Source, Value, ValueKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use crate::broker::BrokerSettings;
use crate::environment;
use crate::error::SettingsError;
use crate::logging::LogSettings;
use crate::metrics::MetricsSettings;
use crate::secret::REDACTED;
use crate::store::StoreSettings;
use crate::telemetry::{Collector, TelemetrySettings};

/// Tables that a configuration file may have. A process reads `broker`, `log`, `metrics`, `telemetry`,
/// `store` and its own.
pub const SECTIONS: [&str; 10] = [
    "broker",
    "log",
    "metrics",
    "telemetry",
    "store",
    "worker",
    "coordinator",
    "gateway",
    "fleet",
    "bench",
];

/// Last parts of keys whose values are not repeated in messages.
const SECRET_KEYS: [&str; 3] = ["token", "password", "api_keys"];

/// The effective settings of one process.
#[derive(Debug, Clone)]
pub struct Settings<T> {
    /// `[broker]`.
    pub broker: BrokerSettings,
    /// `[log]`.
    pub log: LogSettings,
    /// `[metrics]`.
    pub metrics: MetricsSettings,
    /// `[telemetry]`.
    pub telemetry: TelemetrySettings,
    /// `[store]`.
    pub store: StoreSettings,
    /// The process's own table.
    pub process: T,
}

/// Values given on the command line, the strongest layer. Later ones win.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    entries: Vec<Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    key: String,
    text: String,
    origin: String,
}

impl Overrides {
    /// Sets `key` (dotted, table first) to `value`; `flag` is named in errors.
    pub fn set(&mut self, key: &str, value: impl ToString, flag: &str) -> &mut Self {
        self.entries.push(Entry {
            key: key.to_owned(),
            text: value.to_string(),
            origin: format!("flag {flag}"),
        });
        self
    }

    /// Like [`Overrides::set`] when the flag was given.
    pub fn set_some(&mut self, key: &str, value: Option<impl ToString>, flag: &str) -> &mut Self {
        if let Some(value) = value {
            self.set(key, value, flag);
        }
        self
    }

    /// Adds what followed `--set`: `TABLE.KEY=VALUE`. Arrays and inline tables are written as in
    /// TOML.
    ///
    /// # Errors
    /// [`SettingsError::Assignment`] without `=` or without a table.
    pub fn assign(&mut self, text: &str) -> Result<(), SettingsError> {
        match text.split_once('=') {
            Some((key, value)) if key.trim().contains('.') => {
                let key = key.trim();
                self.set(key, value.trim(), &format!("--set {key}"));
                Ok(())
            }
            _ => Err(SettingsError::Assignment { text: text.to_owned() }),
        }
    }

    /// Adds all of `other`, which win.
    pub fn extend(&mut self, other: &Self) {
        self.entries.extend(other.entries.iter().cloned());
    }
}

/// Loads `[broker]`, `[log]`, `[metrics]`, `[telemetry]`, `[store]` and the table `process` from the
/// defaults, the file (or the one named by `STAGEBUS_CONFIG`), the variables and the flags.
///
/// # Errors
/// [`SettingsError`]: an unreadable file, an unknown key or variable, a value that does not fit,
/// or broker keys that do not fit together.
pub fn load<T>(
    process: &str,
    file: Option<&Path>,
    overrides: &Overrides,
) -> Result<Settings<T>, SettingsError>
where
    T: Serialize + DeserializeOwned + Default,
{
    let named = environment::config_file();
    load_layers(process, file.or(named.as_deref()), environment::variables(), overrides)
}

fn load_layers<T>(
    process: &str,
    file: Option<&Path>,
    variables: Vec<(String, String)>,
    overrides: &Overrides,
) -> Result<Settings<T>, SettingsError>
where
    T: Serialize + DeserializeOwned + Default,
{
    let layers = Layers {
        file: file.map(read_file).transpose()?,
        variables: parse(variable_entries(variables)?)?,
        flags: parse(overrides.entries.clone())?,
    };
    for source in layers.in_order() {
        check_sections(source)?;
    }
    let settings = Settings {
        broker: section::<BrokerSettings>("broker", &layers)?,
        log: section::<LogSettings>("log", &layers)?,
        metrics: section::<MetricsSettings>("metrics", &layers)?,
        telemetry: section::<TelemetrySettings>("telemetry", &layers)?,
        store: section::<StoreSettings>("store", &layers)?,
        process: section::<T>(process, &layers)?,
    };
    settings.broker.validate()?;
    Ok(settings)
}

/// The layers above the defaults, each a tree of values with their origins.
struct Layers {
    file: Option<Tree>,
    variables: Tree,
    flags: Tree,
}

impl Layers {
    fn in_order(&self) -> impl Iterator<Item = &Tree> {
        self.file.iter().chain([&self.variables, &self.flags])
    }
}

/// A parsed layer, in the form in which the `config` crate takes it.
#[derive(Debug, Clone, Default)]
struct Tree(Map<String, Value>);

impl Source for Tree {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ConfigError> {
        Ok(self.0.clone())
    }
}

fn read_file(path: &Path) -> Result<Tree, SettingsError> {
    let file_error =
        |source: ConfigError| SettingsError::File { path: path.to_owned(), source: source.into() };
    let mut tree =
        File::from(path).format(FileFormat::Toml).required(true).collect().map_err(file_error)?;
    if let Some(Value { kind: ValueKind::Table(broker), .. }) = tree.get_mut("broker") {
        place_beside(path, broker, &["nkey_seed_file"]);
        if let Some(Value { kind: ValueKind::Table(tls), .. }) = broker.get_mut("tls") {
            place_beside(path, tls, &["ca_file", "cert_file", "key_file"]);
        }
    }
    if let Some(Value { kind: ValueKind::Table(coordinator), .. }) = tree.get_mut("coordinator") {
        place_beside(path, coordinator, &["host_nkey_seed_file"]);
    }
    if let Some(Value { kind: ValueKind::Table(gateway), .. }) = tree.get_mut("gateway") {
        place_beside(path, gateway, &["api_keys_file"]);
        if let Some(Value { kind: ValueKind::Table(tls), .. }) = gateway.get_mut("tls") {
            place_beside(path, tls, &["cert_file", "key_file"]);
        }
    }
    Ok(Tree(tree))
}

/// Keys and certificates lie beside the configuration file that names them: a relative path starts
/// in that file's folder, wherever the process was started.
fn place_beside(file: &Path, table: &mut Map<String, Value>, keys: &[&str]) {
    let Some(folder) = file.parent() else { return };
    for key in keys {
        if let Some(Value { kind: ValueKind::String(path), .. }) = table.get_mut(*key) {
            *path = folder.join(path.as_str()).to_string_lossy().into_owned();
        }
    }
}

/// Turns `STAGEBUS_TABLE__KEY` into `table.key`.
fn variable_entries(variables: Vec<(String, String)>) -> Result<Vec<Entry>, SettingsError> {
    let mut entries = Vec::with_capacity(variables.len());
    for (name, text) in variables {
        let key = if name == environment::LOG {
            "log.level".to_owned()
        } else if name == environment::OTLP_ENDPOINT {
            // It is there for every program of the machine, and those that speak gRPC take other
            // forms of it.
            if Collector::try_from(text.clone()).is_err() {
                continue;
            }
            "telemetry.otlp_endpoint".to_owned()
        } else if environment::RESERVED.contains(&name.as_str()) {
            continue;
        } else {
            let Some(rest) = name.strip_prefix(environment::PREFIX) else { continue };
            rest.to_lowercase().replace("__", ".")
        };
        match key.split_once('.') {
            Some((section, _)) if SECTIONS.contains(&section) => {
                let origin = format!("variable {name}");
                entries.push(Entry { key, text, origin });
            }
            _ => return Err(SettingsError::UnknownVariable { name }),
        }
    }
    Ok(entries)
}

/// Parses the texts of variables and flags. Text stays text, which the settings types turn into
/// numbers and booleans; arrays, inline tables and quoted strings are read as TOML, except where
/// the text is a secret.
fn parse(entries: Vec<Entry>) -> Result<Tree, SettingsError> {
    let mut root = Value::from(Map::<String, Value>::new());
    for Entry { key, text, origin } in entries {
        let value = if text.starts_with(['[', '{', '"', '\'']) && !is_secret(&key) {
            let wrapped = File::from_str(&format!("value = {text}"), FileFormat::Toml).collect();
            match wrapped.map(|mut table| table.remove("value")) {
                Ok(value) => with_origin(value.unwrap_or_default(), &origin),
                Err(source) => {
                    return Err(SettingsError::WrongValue {
                        value: shown(&key, &text),
                        key,
                        origin,
                        source: source.into(),
                    });
                }
            }
        } else {
            Value::new(Some(&origin), text)
        };
        insert(&mut root, &key, value, &origin);
    }
    match root.kind {
        ValueKind::Table(table) => Ok(Tree(table)),
        _ => Ok(Tree::default()),
    }
}

fn with_origin(value: Value, origin: &String) -> Value {
    let kind = match value.kind {
        ValueKind::Table(table) => ValueKind::Table(
            table.into_iter().map(|(key, value)| (key, with_origin(value, origin))).collect(),
        ),
        ValueKind::Array(items) => {
            ValueKind::Array(items.into_iter().map(|value| with_origin(value, origin)).collect())
        }
        plain => plain,
    };
    Value::new(Some(origin), kind)
}

/// Puts `value` at the dotted `key`, over whatever an earlier entry put there.
fn insert(root: &mut Value, key: &str, value: Value, origin: &String) {
    let (first, rest) = match key.split_once('.') {
        Some((first, rest)) => (first, Some(rest)),
        None => (key, None),
    };
    if !matches!(root.kind, ValueKind::Table(_)) {
        *root = Value::new(Some(origin), Map::<String, Value>::new());
    }
    let ValueKind::Table(table) = &mut root.kind else { return };
    match rest {
        None => {
            table.insert(first.to_owned(), value);
        }
        Some(rest) => {
            let child = table
                .entry(first.to_owned())
                .or_insert_with(|| Value::new(Some(origin), Map::<String, Value>::new()));
            insert(child, rest, value, origin);
        }
    }
}

/// Refuses tables that no process has.
fn check_sections(tree: &Tree) -> Result<(), SettingsError> {
    match tree.0.iter().find(|(key, _)| !SECTIONS.contains(&key.as_str())) {
        None => Ok(()),
        Some((key, value)) => Err(SettingsError::UnknownKey {
            key: key.clone(),
            origin: origin(value),
            known: SECTIONS.iter().map(|&section| format!("[{section}]")).collect(),
        }),
    }
}

/// Merges one table over its defaults and turns it into its type.
fn section<T>(name: &str, layers: &Layers) -> Result<T, SettingsError>
where
    T: Serialize + DeserializeOwned + Default,
{
    let defaults = serde_json::to_value(T::default())
        .map(from_json)
        .map_err(|source| SettingsError::Defaults { section: name.to_owned(), source })?;
    let mut merged = Value::from(Map::from([(name.to_owned(), defaults.clone())]));
    for tree in layers.in_order() {
        if let Some(value) = tree.0.get(name) {
            check_against(&defaults, value, name)?;
            let one = Tree(Map::from([(name.to_owned(), value.clone())]));
            one.collect_to(&mut merged).map_err(|source| wrong_value(value, name, source))?;
        }
    }
    let value = lookup(&merged, name).cloned().unwrap_or_default();
    value.try_deserialize::<T>().map_err(|source| wrong_value(&merged, name, source))
}

/// The serialised defaults as a tree without origins.
fn from_json(json: Json) -> Value {
    let kind = match json {
        Json::Null => ValueKind::Nil,
        Json::Bool(flag) => ValueKind::Boolean(flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => ValueKind::I64(signed),
            (None, Some(unsigned)) => ValueKind::U64(unsigned),
            (None, None) => number.as_f64().map_or(ValueKind::Nil, ValueKind::Float),
        },
        Json::String(text) => ValueKind::String(text),
        Json::Array(items) => ValueKind::Array(items.into_iter().map(from_json).collect()),
        Json::Object(members) => ValueKind::Table(
            members.into_iter().map(|(key, member)| (key, from_json(member))).collect(),
        ),
    };
    Value::new(None, kind)
}

/// Walks a layer beside the defaults: unknown keys, tables where values belong and the reverse,
/// and numbers that the conversion would quietly round or turn into booleans.
fn check_against(defaults: &Value, value: &Value, key: &str) -> Result<(), SettingsError> {
    match (&defaults.kind, &value.kind) {
        (ValueKind::Table(known), ValueKind::Table(found)) if !known.is_empty() => {
            for (name, value) in found {
                let key = format!("{key}.{name}");
                match known.get(name) {
                    Some(defaults) => check_against(defaults, value, &key)?,
                    None => {
                        let mut known: Vec<String> = known.keys().cloned().collect();
                        known.sort();
                        return Err(SettingsError::UnknownKey {
                            key,
                            origin: origin(value),
                            known,
                        });
                    }
                }
            }
            Ok(())
        }
        (ValueKind::Table(_), ValueKind::Table(_)) => Ok(()),
        (ValueKind::Table(_), _) => Err(mismatch(key, value, "a table")),
        (default, ValueKind::Table(_)) if !matches!(default, ValueKind::Nil) => {
            Err(mismatch(key, value, "a value, not a table"))
        }
        (default, ValueKind::Float(_) | ValueKind::Boolean(_)) if is_integer(default) => {
            Err(mismatch(key, value, "an integer"))
        }
        (ValueKind::Boolean(_), found) if is_integer(found) => {
            Err(mismatch(key, value, "true or false"))
        }
        _ => Ok(()),
    }
}

fn is_integer(kind: &ValueKind) -> bool {
    matches!(kind, ValueKind::I64(_) | ValueKind::I128(_) | ValueKind::U64(_) | ValueKind::U128(_))
}

fn mismatch(key: &str, value: &Value, expected: &str) -> SettingsError {
    SettingsError::WrongValue {
        key: key.to_owned(),
        value: shown(key, &value.to_string()),
        origin: origin(value),
        source: Box::new(ConfigError::Message(format!("expected {expected}"))),
    }
}

/// Finds the value that an error of the conversion is about.
fn wrong_value(merged: &Value, section: &str, error: ConfigError) -> SettingsError {
    let (path, source) = without_place(error);
    let key = match path {
        Some(path) if path.starts_with('[') => format!("{section}{path}"),
        Some(path) => format!("{section}.{path}"),
        None => section.to_owned(),
    };
    // An index into an array has no origin of its own.
    let array = key.split('[').next().unwrap_or(&key);
    let value = lookup(merged, array);
    SettingsError::WrongValue {
        value: value.map_or_else(String::new, |value| shown(&key, &value.to_string())),
        origin: value.map_or_else(|| "defaults".to_owned(), origin),
        key,
        source: source.into(),
    }
}

/// Splits an error into the key it names and what is left to say.
fn without_place(error: ConfigError) -> (Option<String>, ConfigError) {
    match error {
        ConfigError::Type { unexpected, expected, key, .. } => {
            (key, ConfigError::Type { unexpected, expected, key: None, origin: None })
        }
        ConfigError::At { error, key, .. } => (key, *error),
        ConfigError::NotFound(key) => (Some(key.clone()), ConfigError::NotFound(key)),
        other => (None, other),
    }
}

fn lookup<'a>(root: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(root, |value, name| match &value.kind {
        ValueKind::Table(table) => table.get(name),
        _ => None,
    })
}

/// The file, variable or flag that a value came from.
fn origin(value: &Value) -> String {
    if let Some(origin) = value.origin() {
        return origin.to_owned();
    }
    // The merge builds tables anew; their members know where they came from.
    match &value.kind {
        ValueKind::Table(table) => table.values().next().map_or("defaults".to_owned(), origin),
        _ => "defaults".to_owned(),
    }
}

fn shown(key: &str, text: &str) -> String {
    if is_secret(key) { REDACTED.to_owned() } else { format!("`{text}`") }
}

fn is_secret(key: &str) -> bool {
    SECRET_KEYS.contains(&key.rsplit('.').next().unwrap_or(key))
}

#[cfg(test)]
mod tests;
