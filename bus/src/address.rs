//! Broker addresses: parsing, taking the secrets out, and what a host beyond this machine needs.

use std::net::IpAddr;

use async_nats::ServerAddr;

use crate::credentials::Credentials;
use crate::error::{BusError, Requirement};
use crate::options::BusOptions;

/// Checked addresses, free of secrets, and the credentials to use with them.
pub(crate) struct Addresses {
    pub(crate) servers: Vec<ServerAddr>,
    pub(crate) credentials: Credentials,
    pub(crate) require_tls: bool,
}

impl Addresses {
    /// Lists the addresses for messages.
    pub(crate) fn display(&self) -> String {
        let names: Vec<&str> = self.servers.iter().map(ServerAddr::as_url_str).collect();
        names.join(", ")
    }
}

/// Parses the addresses and applies the security rule.
pub(crate) fn check(options: &BusOptions) -> Result<Addresses, BusError> {
    if options.urls.is_empty() {
        return Err(BusError::NoUrl);
    }
    let mut credentials = options.credentials.clone();
    let mut servers = Vec::with_capacity(options.urls.len());
    for text in &options.urls {
        let (server, embedded) = parse(text)?;
        if credentials == Credentials::None {
            credentials = embedded;
        }
        servers.push(server);
    }
    let require_tls = options.tls.required || servers.iter().any(ServerAddr::tls_required);
    if !options.allow_insecure {
        for server in servers.iter().filter(|server| !is_this_machine(server.host())) {
            let insecure =
                |missing| BusError::Insecure { url: server.as_url_str().into(), missing };
            if !require_tls {
                return Err(insecure(Requirement::Tls));
            }
            if credentials == Credentials::None {
                return Err(insecure(Requirement::Credentials));
            }
        }
    }
    Ok(Addresses { servers, credentials, require_tls })
}

fn parse(text: &str) -> Result<(ServerAddr, Credentials), BusError> {
    let invalid = |source: Box<dyn std::error::Error + Send + Sync>| BusError::Url {
        url: redact(text),
        source,
    };
    if let Some((scheme, _)) = text.split_once("://")
        && !matches!(scheme, "nats" | "tls")
    {
        return Err(BusError::Scheme { url: redact(text), scheme: scheme.to_owned() });
    }
    let server: ServerAddr = text.trim().parse().map_err(|e: std::io::Error| invalid(e.into()))?;
    if server.host().is_empty() {
        return Err(invalid("the host is empty".into()));
    }
    let embedded = match (server.username(), server.password()) {
        (Some(user), Some(password)) => Credentials::UserPassword {
            user: percent_decoded(user).ok_or_else(|| invalid("the user is not UTF-8".into()))?,
            password: percent_decoded(password)
                .ok_or_else(|| invalid("the password is not UTF-8".into()))?,
        },
        (Some(token), None) => Credentials::Token(
            percent_decoded(token).ok_or_else(|| invalid("the token is not UTF-8".into()))?,
        ),
        (None, _) => Credentials::None,
    };
    // The NATS client logs addresses, so the secrets must not stay in them.
    let mut url = server.into_inner();
    if url.set_username("").is_err() || url.set_password(None).is_err() {
        return Err(invalid("the address cannot hold a user".into()));
    }
    let server = ServerAddr::from_url(url).map_err(|e| invalid(e.into()))?;
    Ok((server, embedded))
}

/// Undoes `%41` in the user part of an address.
fn percent_decoded(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8(out).ok()
}

/// Takes out everything that may be a secret: what stands between the scheme and the last `@`.
fn redact(text: &str) -> String {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), text),
    };
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}{rest}")
}

fn is_this_machine(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(ip) => ip.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}
