//! The keys that clients show, known by their SHA-256 only.
//!
//! A file has one key a line, a name and the hash in hexadecimal:
//!
//! ```text
//! # printf %s "$KEY" | sha256sum
//! ann 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
//! ```

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use stagebus_settings::Secret;
use subtle::ConstantTimeEq as _;

use crate::config::GatewaySettings;

/// Fewest characters of a key that is given itself: a guess of fewer is too likely to hit.
const MIN_KEY_LEN: usize = 16;

/// Bytes of a hash.
const HASH_LEN: usize = 32;

/// Why keys cannot be used. No key is in it.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error("cannot read gateway.api_keys_file {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A line has another form.
    #[error(
        "line {line} of gateway.api_keys_file {} is not a name and a SHA-256 of 64 hexadecimal \
         digits",
        path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
    /// There are keys, and none of them.
    #[error("{origin} has no key, so nobody could ask")]
    Empty {
        /// Where keys were expected.
        origin: String,
    },
    /// A key is too short.
    #[error("key {number} of gateway.api_keys has {found} characters, expected at least {least}")]
    Short {
        /// Which key, from 1.
        number: usize,
        /// Its length.
        found: usize,
        /// Least length.
        least: usize,
    },
}

/// Who may ask.
#[derive(Clone, Default)]
pub(crate) struct ApiKeys {
    keys: Vec<ApiKey>,
}

#[derive(Clone)]
struct ApiKey {
    name: String,
    hash: [u8; HASH_LEN],
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.name)).finish()
    }
}

impl ApiKeys {
    /// Reads the keys that the settings name; nothing if they name none.
    ///
    /// # Errors
    /// [`KeyError`].
    pub(crate) fn load(settings: &GatewaySettings) -> Result<Option<Self>, KeyError> {
        if !settings.has_keys() {
            return Ok(None);
        }
        let mut keys = Vec::new();
        if let Some(path) = &settings.api_keys_file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| KeyError::Unreadable { path: path.clone(), source })?;
            keys.extend(read_file(&text, path)?);
        }
        if let Some(secret) = &settings.api_keys {
            keys.extend(read_list(secret)?);
        }
        Ok(Some(Self { keys }))
    }

    /// The name of a key that a client shows, if it is one of ours. Every key is compared, each
    /// in constant time, so that the time taken tells nothing.
    pub(crate) fn holder(&self, shown: &[u8]) -> Option<&str> {
        let hash = Sha256::digest(shown);
        self.keys.iter().fold(None, |found, key| {
            if bool::from(key.hash.as_slice().ct_eq(hash.as_slice())) {
                Some(key.name.as_str())
            } else {
                found
            }
        })
    }
}

fn read_file(text: &str, path: &Path) -> Result<Vec<ApiKey>, KeyError> {
    let mut keys = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let key = text.split_once(char::is_whitespace).and_then(|(name, hash)| {
            Some(ApiKey { name: name.to_owned(), hash: hash_from_hex(hash.trim())? })
        });
        keys.push(key.ok_or_else(|| KeyError::Line { path: path.to_owned(), line })?);
    }
    if keys.is_empty() {
        return Err(KeyError::Empty {
            origin: format!("gateway.api_keys_file {}", path.display()),
        });
    }
    Ok(keys)
}

fn read_list(secret: &Secret) -> Result<Vec<ApiKey>, KeyError> {
    let mut keys = Vec::new();
    let given = secret.expose().split(',').map(str::trim).filter(|key| !key.is_empty());
    for (number, key) in (1..).zip(given) {
        if key.len() < MIN_KEY_LEN {
            return Err(KeyError::Short { number, found: key.len(), least: MIN_KEY_LEN });
        }
        let (name, hash) = (format!("key-{number}"), Sha256::digest(key).into());
        keys.push(ApiKey { name, hash });
    }
    if keys.is_empty() {
        return Err(KeyError::Empty { origin: "gateway.api_keys".to_owned() });
    }
    Ok(keys)
}

fn hash_from_hex(text: &str) -> Option<[u8; HASH_LEN]> {
    if text.len() != 2 * HASH_LEN || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut hash = [0; HASH_LEN];
    for (i, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `abc`, from FIPS 180-2.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_key_is_known_by_its_hash() {
        let text = format!("# people\n\nann  {ABC}\nben {}\n", ABC.replace('b', "c"));
        let keys = ApiKeys { keys: read_file(&text, Path::new("keys")).expect("two keys") };
        assert_eq!(keys.holder(b"abc"), Some("ann"));
        assert_eq!(keys.holder(b"abd"), None);
        assert_eq!(keys.holder(b""), None);
        assert_eq!(format!("{keys:?}"), r#"["ann", "ben"]"#);
    }

    #[test]
    fn a_wrong_line_is_named_and_not_repeated() {
        let digits = ABC.replace('b', "z");
        let long = format!("ann {ABC}0");
        for wrong in ["ann", ABC, &long, &format!("ann {digits}")] {
            let text = format!("ann {ABC}\n{wrong}");
            let error = read_file(&text, Path::new("keys")).err().expect("a wrong line");
            assert!(matches!(error, KeyError::Line { line: 2, .. }), "{error}");
            assert!(!error.to_string().contains(ABC), "{error}");
        }
        let empty = read_file("# nobody\n", Path::new("keys")).err().expect("no key");
        assert!(matches!(empty, KeyError::Empty { .. }), "{empty}");
    }

    #[test]
    fn keys_of_the_environment_are_long_enough() {
        let read = |text: &str| read_list(&Secret::new(text.to_owned()));
        let keys = ApiKeys { keys: read("0123456789abcdef, fedcba9876543210").expect("two keys") };
        assert_eq!(keys.holder(b"fedcba9876543210"), Some("key-2"));
        let short = read("0123456789abcdef,short").err().expect("a short one");
        assert!(matches!(short, KeyError::Short { number: 2, found: 5, .. }), "{short}");
        assert!(matches!(read(" , ").err(), Some(KeyError::Empty { .. })));
    }
}
