//! The texts of configuration files: the broker's users, and each holder's `[broker]`.

use stagebus_schemas::access::Permissions;

use crate::error::KeyError;
use crate::holder::Holder;

/// The broker's configuration; it takes `users.conf`, certificate and key from its own folder.
pub(crate) const BROKER: &str = include_str!("../../nats.production.conf");

/// The port in it.
pub(crate) const PORT: u16 = 4222;

/// Writes the users and what each may do.
///
/// # Errors
/// [`KeyError::Models`], for a list that was written by hand.
pub(crate) fn users(holders: &[Holder]) -> Result<String, KeyError> {
    let mut text = String::from(
        "# Written by `stagebus keys`, which writes it anew at every change of a key. Let a running\n\
         # server read it again: nats-server --signal reload\n\
         authorization {\n  timeout: 10\n  users: [\n",
    );
    let mut served: Vec<_> = holders.iter().filter_map(Holder::only_model).cloned().collect();
    served.sort();
    served.dedup();
    for holder in holders {
        let Permissions { publish, publish_denied, subscribe } = holder.permissions(&served)?;
        let mut publish = format!("allow: {}", list(&publish));
        if !publish_denied.is_empty() {
            publish.push_str(&format!(", deny: {}", list(&publish_denied)));
        }
        text.push_str(&format!(
            "    # {name}, {role}\n    {{\n      nkey: {key}\n      permissions: {{\n        \
             publish: {{ {publish} }}\n        subscribe: {{ allow: {subscribe} }}\n      }}\n    \
             }}\n",
            name = holder.name,
            role = holder.role.as_str(),
            key = holder.public_key,
            subscribe = list(&subscribe),
        ));
    }
    text.push_str("  ]\n}\n");
    Ok(text)
}

/// Subjects have no character that needs an escape.
fn list(subjects: &[String]) -> String {
    let quoted: Vec<String> = subjects.iter().map(|subject| format!("\"{subject}\"")).collect();
    format!("[{}]", quoted.join(", "))
}

/// Writes the configuration of a holder, with the model that a worker or coordinator serves.
pub(crate) fn holder(holder: &Holder, host: &str, port: u16) -> String {
    // An address with colons stands in brackets.
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let mut text = format!(
        "# Written by `stagebus keys`. Paths start in this file's folder.\n\
         [broker]\nurl = \"tls://{host}:{port}\"\nnkey_seed_file = \"seed.nk\"\n\n\
         [broker.tls]\nca_file = \"ca.pem\"\n"
    );
    if let Some(model) = holder.only_model() {
        text.push_str(&format!("\n[{}]\nmodel = \"{model}\"\n", holder.role.as_str()));
    }
    text
}
