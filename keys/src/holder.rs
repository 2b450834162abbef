//! Who holds a key, and with which rights.

use serde::{Deserialize, Serialize};
use stagebus_schemas::access::Permissions;
use stagebus_schemas::ids::{ClientName, HolderName, ModelName};

use crate::error::KeyError;

/// What a key is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HolderRole {
    /// Sends requests.
    Client,
    /// Drives sessions.
    Coordinator,
    /// Runs a stage.
    Worker,
    /// Looks after the workers.
    Operator,
}

impl HolderRole {
    /// The role's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Coordinator => "coordinator",
            Self::Worker => "worker",
            Self::Operator => "operator",
        }
    }

    /// Whether a key of this role acts for exactly one model.
    const fn is_of_one_model(self) -> bool {
        matches!(self, Self::Coordinator | Self::Worker)
    }
}

/// The rights that a key shall have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Name of the holder.
    pub name: HolderName,
    /// What the key is for.
    pub role: HolderRole,
    /// The models: exactly one for a coordinator or worker; none means all for the other roles.
    pub models: Vec<ModelName>,
    /// Whether a client may read the events of durable requests, those of other clients too.
    pub results: bool,
}

/// A key that the broker lets in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Holder {
    /// Name of the holder.
    pub name: HolderName,
    /// What the key is for.
    pub role: HolderRole,
    /// The models, as in [`Grant::models`].
    pub models: Vec<ModelName>,
    /// As in [`Grant::results`].
    pub results: bool,
    /// The public half of the nkey, which starts with `U`.
    pub public_key: ClientName,
}

impl Holder {
    /// The model of a coordinator's or worker's key.
    pub(crate) fn only_model(&self) -> Option<&ModelName> {
        self.models.first().filter(|_| self.role.is_of_one_model())
    }

    /// Checks rights and public key.
    ///
    /// # Errors
    /// [`KeyError::Models`], [`KeyError::Results`], [`KeyError::PublicKey`].
    pub(crate) fn new(grant: Grant, public_key: &str) -> Result<Self, KeyError> {
        let Grant { name, role, models, results } = grant;
        if results && role != HolderRole::Client {
            return Err(KeyError::Results { role: role.as_str() });
        }
        if role.is_of_one_model() && models.len() != 1 {
            return Err(KeyError::Models { role: role.as_str(), found: models.len() });
        }
        let wrong = || KeyError::PublicKey { found: public_key.to_owned() };
        let is_user =
            public_key.starts_with('U') && nkeys::KeyPair::from_public_key(public_key).is_ok();
        if !is_user {
            return Err(wrong());
        }
        let public_key = ClientName::new(public_key).map_err(|_no_token| wrong())?;
        Ok(Self { name, role, models, results, public_key })
    }

    /// The subjects that the holder may use, in a fleet that serves the models `served`.
    ///
    /// # Errors
    /// [`KeyError::Models`], for a list that was written by hand.
    pub(crate) fn permissions(&self, served: &[ModelName]) -> Result<Permissions, KeyError> {
        match (self.role, self.models.as_slice()) {
            (HolderRole::Client, models) => {
                Ok(Permissions::client(&self.public_key, models, self.results))
            }
            (HolderRole::Operator, models) => {
                let stored = if models.is_empty() { served } else { models };
                Ok(Permissions::operator(&self.public_key, models, stored))
            }
            (HolderRole::Coordinator, [model]) => Ok(Permissions::coordinator(model)),
            (HolderRole::Worker, [model]) => Ok(Permissions::worker(model)),
            (role, models) => Err(KeyError::Models { role: role.as_str(), found: models.len() }),
        }
    }
}
