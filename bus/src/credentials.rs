//! Who we are for the broker, and how the connection is encrypted. Secrets never show in `Debug`.

use std::fmt;
use std::path::PathBuf;

/// What proves our identity to the broker.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    /// Nothing; only for a broker on this machine.
    #[default]
    None,
    /// A token.
    Token(String),
    /// A user and a password.
    UserPassword {
        /// User.
        user: String,
        /// Password.
        password: String,
    },
    /// Seed of an nkey (`SU...`); the seed itself never leaves the process.
    NkeySeed(String),
}

impl Credentials {
    /// Names the kind, for messages.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::None => "no credentials",
            Self::Token(_) => "a token",
            Self::UserPassword { .. } => "user and password",
            Self::NkeySeed(_) => "an nkey",
        }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Token(_) => f.write_str("Token(<redacted>)"),
            Self::UserPassword { user, .. } => f
                .debug_struct("UserPassword")
                .field("user", user)
                .field("password", &format_args!("<redacted>"))
                .finish(),
            Self::NkeySeed(_) => f.write_str("NkeySeed(<redacted>)"),
        }
    }
}

/// Encryption of the connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Refuse a broker that does not speak TLS; a `tls://` URL has the same effect.
    pub required: bool,
    /// Certificates (PEM) of the authorities that are trusted; the system's when absent.
    pub ca: Option<PathBuf>,
    /// Our own certificate (PEM) for a broker that verifies clients, with its key.
    pub identity: Option<TlsIdentity>,
}

/// A client certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// Certificate chain (PEM).
    pub certificate: PathBuf,
    /// Private key (PEM).
    pub key: PathBuf,
}
