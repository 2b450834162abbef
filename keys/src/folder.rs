//! The folder with all keys of a fleet: made once, changed key by key.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use stagebus_schemas::ids::{HolderName, ModelName};
use tempfile::TempDir;

use crate::certificates;
use crate::configuration;
use crate::error::KeyError;
use crate::files;
use crate::holder::{Grant, Holder, HolderRole};

const LIST: &str = "keys.json";
const BROKER: &str = "broker";
const USERS: &str = "users.conf";
const SEED: &str = "seed.nk";
const CA: &str = "ca.pem";

/// Version of `keys.json`.
const VERSION: u32 = 1;

/// What a new fleet needs.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The models that are served; each gets a key for its coordinators and one for its workers.
    pub models: Vec<ModelName>,
    /// Whether the client's key reads results of durable requests, see [`Grant::results`].
    pub results: bool,
    /// Names and addresses under which the broker is reached; the first one stands in the holders'
    /// configuration.
    pub hosts: Vec<String>,
}

/// The list of keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    version: u32,
    hosts: Vec<String>,
    keys: Vec<Holder>,
}

/// A folder of keys.
#[derive(Debug, Clone)]
pub struct KeyFolder {
    path: PathBuf,
    list: List,
}

impl KeyFolder {
    /// Makes the folder with an authority, the broker's files, a client's and an operator's key for
    /// all models, and per model one key for coordinators and one for workers.
    ///
    /// # Errors
    /// [`KeyError`]; nothing is left behind then.
    pub fn create(path: &Path, plan: &Plan) -> Result<Self, KeyError> {
        if fs::symlink_metadata(path).is_ok() {
            return Err(KeyError::Exists { path: path.to_owned() });
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let made = TempDir::with_prefix_in(".stagebus-keys-", parent)
            .map_err(|source| KeyError::File { path: parent.to_owned(), source })?;
        let hosts =
            if plan.hosts.is_empty() { vec!["localhost".to_owned()] } else { plan.hosts.clone() };
        let certificates = certificates::make(&hosts)?;
        let list = List { version: VERSION, hosts, keys: Vec::new() };
        let mut folder = Self { path: made.path().join("keys"), list };
        files::create_folder(&folder.path)?;
        files::write(&folder.path.join(CA), &certificates.ca)?;
        files::write_secret(&folder.path.join("ca.key"), &certificates.ca_key)?;
        let broker = folder.broker();
        files::create_folder(&broker)?;
        files::write(&broker.join("nats.conf"), configuration::BROKER)?;
        files::write(&broker.join("server.pem"), &certificates.server)?;
        files::write_secret(&broker.join("server.key"), &certificates.server_key)?;
        for grant in grants(plan)? {
            folder.insert(grant, None)?;
        }
        folder.save()?;
        fs::rename(&folder.path, path).map_err(files::failed(path))?;
        path.clone_into(&mut folder.path);
        Ok(folder)
    }

    /// Reads the list of an existing folder.
    ///
    /// # Errors
    /// [`KeyError::File`], [`KeyError::List`], [`KeyError::Version`].
    pub fn open(path: &Path) -> Result<Self, KeyError> {
        let file = path.join(LIST);
        let text = fs::read(&file).map_err(files::failed(&file))?;
        let list: List = serde_json::from_slice(&text)
            .map_err(|source| KeyError::List { path: file.clone(), source })?;
        if list.version != VERSION {
            return Err(KeyError::Version { path: file, found: list.version, expected: VERSION });
        }
        Ok(Self { path: path.to_owned(), list })
    }

    /// The keys that the broker lets in.
    #[must_use]
    pub fn holders(&self) -> &[Holder] {
        &self.list.keys
    }

    /// The folder for the broker's machine.
    #[must_use]
    pub fn broker(&self) -> PathBuf {
        self.path.join(BROKER)
    }

    /// The certificate of the authority.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.path.join(CA)
    }

    /// The folder for the holder's machine.
    #[must_use]
    pub fn folder_of(&self, holder: &Holder) -> PathBuf {
        self.path.join(holder.name.as_str())
    }

    /// The file with the holder's secret.
    #[must_use]
    pub fn seed_of(&self, holder: &Holder) -> PathBuf {
        self.folder_of(holder).join(SEED)
    }

    /// The first key of a role for a model, or for all models.
    #[must_use]
    pub fn find(&self, role: HolderRole, model: &ModelName) -> Option<&Holder> {
        let fits = |models: &[ModelName]| models.is_empty() || models.contains(model);
        self.holders().iter().find(|holder| holder.role == role && fits(&holder.models))
    }

    /// Adds a key. With a public key, its secret half stays with the holder and is not known here.
    ///
    /// # Errors
    /// [`KeyError`]; the broker's users are unchanged then.
    pub fn add(&mut self, grant: Grant, public_key: Option<&str>) -> Result<&Holder, KeyError> {
        self.insert(grant, public_key)?;
        self.save()?;
        self.list.keys.last().ok_or_else(|| KeyError::File {
            path: self.path.join(LIST),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }

    /// Removes a key and its folder. The broker cuts its connections off when it reads its users
    /// again.
    ///
    /// # Errors
    /// [`KeyError::Unknown`], [`KeyError::Last`], [`KeyError::File`].
    pub fn remove(&mut self, name: &HolderName) -> Result<(), KeyError> {
        let found = self.list.keys.iter().position(|holder| holder.name == *name);
        let index = found.ok_or_else(|| KeyError::Unknown { name: name.clone() })?;
        if self.list.keys.len() == 1 {
            return Err(KeyError::Last { name: name.clone() });
        }
        let holder = self.list.keys.remove(index);
        self.save()?;
        let folder = self.folder_of(&holder);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(files::failed(&folder)(error))
            }
            _ => Ok(()),
        }
    }

    fn insert(&mut self, grant: Grant, public_key: Option<&str>) -> Result<(), KeyError> {
        let name = grant.name.clone();
        if name.as_str() == BROKER {
            return Err(KeyError::Reserved { name });
        }
        if self.list.keys.iter().any(|holder| holder.name == name) {
            return Err(KeyError::Taken { name });
        }
        let (public_key, seed) = match public_key {
            Some(public_key) => (public_key.to_owned(), None),
            None => {
                let pair = nkeys::KeyPair::new_user();
                (pair.public_key(), Some(pair.seed().map_err(KeyError::Nkey)?))
            }
        };
        let holder = Holder::new(grant, &public_key)?;
        let folder = self.folder_of(&holder);
        files::create_folder(&folder)?;
        if let Some(seed) = seed {
            files::write_secret(&folder.join(SEED), &format!("{seed}\n"))?;
        }
        let ca = self.ca();
        let ca = fs::read_to_string(&ca).map_err(files::failed(&ca))?;
        files::write(&folder.join(CA), &ca)?;
        let host = self.list.hosts.first().map_or("localhost", String::as_str);
        let text = configuration::holder(&holder, host, configuration::PORT);
        files::write(&folder.join("stagebus.toml"), &text)?;
        self.list.keys.push(holder);
        Ok(())
    }

    /// Writes the broker's users and the list.
    fn save(&self) -> Result<(), KeyError> {
        let users = configuration::users(&self.list.keys)?;
        files::replace(&self.broker().join(USERS), &users)?;
        let path = self.path.join(LIST);
        let list = serde_json::to_string_pretty(&self.list)
            .map_err(|source| KeyError::List { path: path.clone(), source })?;
        files::replace(&path, &format!("{list}\n"))
    }
}

/// The keys of a new fleet.
fn grants(plan: &Plan) -> Result<Vec<Grant>, KeyError> {
    let name = |text: &str| {
        HolderName::new(text).map_err(|source| KeyError::Name { name: text.to_owned(), source })
    };
    let all = |role: HolderRole, results| {
        Ok(Grant { name: name(role.as_str())?, role, models: Vec::new(), results })
    };
    let mut grants =
        vec![all(HolderRole::Client, plan.results)?, all(HolderRole::Operator, false)?];
    for model in &plan.models {
        for role in [HolderRole::Coordinator, HolderRole::Worker] {
            let name = name(&format!("{}-{model}", role.as_str()))?;
            grants.push(Grant { name, role, models: vec![model.clone()], results: false });
        }
    }
    Ok(grants)
}

#[cfg(test)]
mod tests;
