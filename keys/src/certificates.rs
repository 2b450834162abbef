//! An authority of the fleet's own and the broker's certificate, signed by it.

use std::time::{SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use crate::error::KeyError;

/// Whole years for which the certificates hold, after the rest of the current one.
const YEARS: i32 = 10;

/// Mean length of a year, in seconds.
const YEAR_S: u64 = 31_556_952;

/// Names under which the broker can always be reached on its own machine.
const THIS_MACHINE: [&str; 2] = ["localhost", "127.0.0.1"];

/// The texts of the files, in PEM.
pub(crate) struct Certificates {
    pub ca: String,
    pub ca_key: String,
    pub server: String,
    pub server_key: String,
}

/// Makes an authority and a certificate for a broker that is reached as `hosts`, or locally.
///
/// # Errors
/// [`KeyError::Certificate`].
pub(crate) fn make(hosts: &[String]) -> Result<Certificates, KeyError> {
    let mut names = hosts.to_vec();
    names.extend(THIS_MACHINE.iter().map(|&name| name.to_owned()));
    names.sort_unstable();
    names.dedup();
    sign(names.clone()).map_err(|source| KeyError::Certificate { hosts: names, source })
}

fn sign(names: Vec<String>) -> Result<Certificates, rcgen::Error> {
    let ca_key = KeyPair::generate()?;
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.distinguished_name.push(DnType::CommonName, "Stagebus fleet authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    hold(&mut authority);
    let ca = authority.self_signed(&ca_key)?.pem();
    let ca_key_pem = ca_key.serialize_pem();
    let issuer = Issuer::new(authority, ca_key);

    let server_key = KeyPair::generate()?;
    let mut server = CertificateParams::new(names)?;
    server.distinguished_name.push(DnType::CommonName, "Stagebus broker");
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    server.use_authority_key_identifier_extension = true;
    hold(&mut server);
    Ok(Certificates {
        ca,
        ca_key: ca_key_pem,
        server: server.signed_by(&server_key, &issuer)?.pem(),
        server_key: server_key.serialize_pem(),
    })
}

/// From the beginning of last year, so that clocks may differ, for [`YEARS`] years.
fn hold(params: &mut CertificateParams) {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let year = i32::try_from(since_1970.as_secs() / YEAR_S).map_or(2026, |years| 1970 + years);
    params.not_before = rcgen::date_time_ymd(year - 1, 1, 1);
    params.not_after = rcgen::date_time_ymd(year + 1 + YEARS, 1, 1);
}
