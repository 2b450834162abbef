//! `stagebus keys`: a fleet's nkeys and certificates, and the broker configuration that matches.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};
use stagebus_keys::{Grant, Holder, HolderRole, KeyFolder, Plan};
use stagebus_schemas::ids::{HolderName, ModelName};

use crate::console;
use crate::exit::Outcome;

const EXAMPLES: &str = "Examples:
  stagebus keys new fleet-keys --model smollm2 --host broker.example
  stagebus keys add fleet-keys ann --role client --results
  stagebus keys add fleet-keys lab-3 --role worker --model smollm2
  stagebus keys remove fleet-keys ann
  stagebus keys list fleet-keys

`new` makes a folder with everything: fleet-keys/broker goes to the broker's machine (start nats-server in
it with -c nats.conf), and each other folder in keys to the machine of its holder, whose processes
take --config <folder>/stagebus.toml. After `add` and `remove` copy fleet-keys/broker/users.conf to the
broker and let it read it again: nats-server --signal reload. docs/security.md has the rest.";

/// Arguments of `stagebus keys`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub struct KeysArgs {
    #[command(subcommand)]
    action: Action,

    /// Print one JSON array: the keys that were made, are left, or are there
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Clone, Subcommand)]
enum Action {
    /// Make the keys of a new fleet, its certificates and the broker's configuration
    New {
        /// Folder to make
        #[arg(value_name = "DIR")]
        folder: PathBuf,

        /// Model that is served; once for each
        #[arg(long = "model", value_name = "NAME", required = true)]
        models: Vec<ModelName>,

        /// Name or address under which the broker is reached; once for each, the first one is
        /// written into every configuration [default: localhost]
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,

        /// Let the client's key read the events of durable requests, whoever asked
        #[arg(long)]
        results: bool,
    },
    /// Add a key
    Add {
        /// Folder of keys
        #[arg(value_name = "DIR")]
        folder: PathBuf,

        /// Name of the holder, and of its folder
        #[arg(value_name = "NAME")]
        name: HolderName,

        /// What the key is for
        #[arg(long, value_name = "ROLE")]
        role: RoleChoice,

        /// Model that it is for: one for a worker or coordinator, any number for a client or operator
        /// (all when absent)
        #[arg(long = "model", value_name = "NAME")]
        models: Vec<ModelName>,

        /// Let a client read the events of durable requests, whoever asked
        #[arg(long)]
        results: bool,

        /// Public half (U...) of a key that was made elsewhere; its seed stays there
        #[arg(long, value_name = "KEY")]
        public_key: Option<String>,
    },
    /// Remove a key
    Remove {
        /// Folder of keys
        #[arg(value_name = "DIR")]
        folder: PathBuf,

        /// Name of the holder
        #[arg(value_name = "NAME")]
        name: HolderName,
    },
    /// List the keys: name, role, models, public key
    List {
        /// Folder of keys
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RoleChoice {
    /// Sends requests
    Client,
    /// Drives sessions of one model
    Coordinator,
    /// Runs stages of one model
    Worker,
    /// Looks after workers: `stagebus drain`
    Operator,
}

impl From<RoleChoice> for HolderRole {
    fn from(role: RoleChoice) -> Self {
        match role {
            RoleChoice::Client => Self::Client,
            RoleChoice::Coordinator => Self::Coordinator,
            RoleChoice::Worker => Self::Worker,
            RoleChoice::Operator => Self::Operator,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What keeps keys from being made, changed or read.
pub fn run(args: KeysArgs, quiet: bool) -> anyhow::Result<Outcome> {
    let note = |text: &str| {
        if !quiet {
            console::note(text);
        }
    };
    let show = |holders: &[Holder]| {
        if args.json { console::print_json(&holders) } else { console::print(&describe(holders)) }
    };
    match args.action {
        Action::New { folder, models, hosts, results } => {
            let made = KeyFolder::create(&folder, &Plan { models, results, hosts })?;
            show(made.holders())?;
            note(&format!(
                "start the broker in {} with `nats-server -c nats.conf`; keep {} offline",
                made.broker().display(),
                folder.join("ca.key").display()
            ));
        }
        Action::Add { folder, name, role, models, results, public_key } => {
            let mut keys = KeyFolder::open(&folder)?;
            let grant = Grant { name, role: role.into(), models, results };
            let added = keys.add(grant, public_key.as_deref())?.clone();
            show(std::slice::from_ref(&added))?;
            note(&format!("give {} to its holder", keys.folder_of(&added).display()));
            note(&reload(&keys));
        }
        Action::Remove { folder, name } => {
            let mut keys = KeyFolder::open(&folder)?;
            keys.remove(&name)?;
            if args.json {
                console::print_json(&keys.holders())?;
            }
            note(&reload(&keys));
        }
        Action::List { folder } => show(KeyFolder::open(&folder)?.holders())?,
    }
    Ok(Outcome::Good)
}

fn reload(keys: &KeyFolder) -> String {
    let users = keys.broker().join("users.conf");
    format!("let the broker read {} again: nats-server --signal reload", users.display())
}

fn describe(holders: &[Holder]) -> String {
    let row = |holder: &Holder| {
        let models: Vec<&str> = holder.models.iter().map(ModelName::as_str).collect();
        let models = if models.is_empty() { "all".to_owned() } else { models.join(" ") };
        vec![
            holder.name.to_string(),
            holder.role.as_str().to_owned(),
            models,
            (if holder.results { "all" } else { "-" }).to_owned(),
            holder.public_key.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = holders.iter().map(row).collect();
    console::table(&["name", "role", "models", "results", "public key"], &rows)
}
