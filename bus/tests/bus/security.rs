//! Addresses, credentials and TLS.

use std::path::PathBuf;

use stagebus_bus::{
    Bus, BusError, BusOptions, Credentials, Operation, RequestError, Requirement, StreamError, Tls,
    TlsIdentity, Violation,
};
use stagebus_schemas::codec::ContentType;

use crate::PATIENCE;
use crate::broker::Broker;

async fn refused(options: BusOptions) -> BusError {
    Bus::connect(options).await.expect_err("must be refused")
}

fn far(url: &str) -> BusOptions {
    BusOptions::new(url, "test")
}

fn user() -> Credentials {
    Credentials::UserPassword { user: "u".into(), password: "s3cret".into() }
}

#[tokio::test]
async fn another_machine_needs_tls_and_credentials() {
    // Documentation addresses (RFC 5737, RFC 3849, RFC 2606): refused before anything is sent.
    for host in ["192.0.2.1", "[2001:db8::1]", "broker.example", "0.0.0.0", "localhost.example"] {
        let plain = far(&format!("nats://{host}:4222"));
        let missing = |error| match error {
            BusError::Insecure { missing, .. } => missing,
            other => panic!("{host}: {other}"),
        };
        assert_eq!(missing(refused(plain.clone()).await), Requirement::Tls);
        let only_user = BusOptions { credentials: user(), ..plain.clone() };
        assert_eq!(missing(refused(only_user).await), Requirement::Tls);
        let only_tls = far(&format!("tls://{host}:4222"));
        assert_eq!(missing(refused(only_tls).await), Requirement::Credentials);
        let mixed = BusOptions {
            urls: vec!["nats://127.0.0.1:4222".into(), format!("nats://{host}:4222")],
            ..plain
        };
        assert_eq!(missing(refused(mixed).await), Requirement::Tls);
    }
}

#[tokio::test]
async fn this_machine_needs_neither() {
    let broker = Broker::start();
    for host in ["127.0.0.1", "localhost", "LOCALHOST"] {
        let options = BusOptions::new(format!("nats://{host}:{}", broker.port()), "test");
        Bus::connect(options).await.unwrap_or_else(|error| panic!("{host}: {error}"));
    }
}

#[tokio::test]
async fn an_address_is_checked_and_its_secrets_are_hidden() {
    for url in ["nats://u:s3cret@", "nats://u:s3cret@host:port", "ws://u:s3cret@127.0.0.1:1"] {
        let error = refused(BusOptions::new(url, "test")).await;
        assert!(matches!(error, BusError::Url { .. } | BusError::Scheme { .. }), "{url}: {error}");
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
    }
    let none = BusOptions { urls: Vec::new(), ..BusOptions::default() };
    assert!(matches!(refused(none).await, BusError::NoUrl));
}

#[tokio::test]
async fn credentials_are_tried_and_a_refusal_is_told_without_them() {
    let config = "authorization { user: u, password: \"s3/cret\" }\n";
    let broker = Broker::start_with(config, &[]);
    let url = broker.url();
    let with = |credentials| BusOptions { credentials, ..BusOptions::new(&url, "test") };
    for credentials in [
        Credentials::None,
        Credentials::Token("s3cret-token".into()),
        Credentials::UserPassword { user: "u".into(), password: "wrong-s3cret".into() },
    ] {
        let kind = credentials.kind();
        let error = refused(with(credentials)).await;
        assert!(
            matches!(&error, BusError::AuthRefused { offered, .. } if *offered == kind),
            "{error}"
        );
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
    }
    // In the address, percent-encoded, they work too and do not show up anywhere.
    let embedded = format!("nats://u:s3%2Fcret@127.0.0.1:{}", broker.port());
    let bus = Bus::connect(BusOptions::new(embedded, "test")).await.expect("connects");
    assert_eq!(bus.url(), url);
    assert!(!format!("{bus:?}").contains("cret"));
}

#[tokio::test]
async fn a_token_in_the_address_works() {
    let broker = Broker::start_with("authorization { token: \"s3cret\" }\n", &[]);
    let url = format!("nats://s3cret@127.0.0.1:{}", broker.port());
    Bus::connect(BusOptions::new(url, "test")).await.expect("connects");
    let bad = BusOptions {
        credentials: Credentials::NkeySeed("not a seed".into()),
        ..BusOptions::new(broker.url(), "test")
    };
    assert!(matches!(refused(bad).await, BusError::NkeySeed { .. }));
}

#[test]
fn options_show_no_secret() {
    for credentials in
        [Credentials::Token("s3cret".into()), user(), Credentials::NkeySeed("s3cret".into())]
    {
        let options = BusOptions { credentials, ..BusOptions::default() };
        assert!(!format!("{options:?}").contains("s3cret"));
    }
}

/// A certificate authority and what it signed, as PEM texts.
struct Certificates {
    ca: String,
    server: String,
    server_key: String,
    client: String,
    client_key: String,
    stranger_ca: String,
}

fn certificates() -> Certificates {
    let authority = |name: &str| {
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut params = rcgen::CertificateParams::new(Vec::new()).expect("parameters");
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).expect("a certificate");
        (certificate.pem(), rcgen::Issuer::new(params, key))
    };
    let (ca, issuer) = authority("test authority");
    let (stranger_ca, _) = authority("another authority");
    let leaf = |names: Vec<String>| {
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::new(names).expect("parameters");
        let certificate = params.signed_by(&key, &issuer).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    };
    let (server, server_key) = leaf(vec!["localhost".into(), "127.0.0.1".into()]);
    let (client, client_key) = leaf(vec!["worker".into()]);
    Certificates { ca, server, server_key, client, client_key, stranger_ca }
}

fn tls_broker(verify: bool) -> Broker {
    let pem = certificates();
    let config = format!(
        "tls {{ cert_file: \"{{}}/srv.pem\", key_file: \"{{}}/srv.key\", ca_file: \"{{}}/ca.pem\", \
         timeout: 30, verify: {verify} }}\n"
    );
    let files = [
        ("srv.pem", pem.server.as_str()),
        ("srv.key", &pem.server_key),
        ("ca.pem", &pem.ca),
        ("client.pem", &pem.client),
        ("client.key", &pem.client_key),
        ("stranger.pem", &pem.stranger_ca),
    ];
    Broker::start_with(&config, &files)
}

fn tls_options(broker: &Broker, tls: Tls) -> BusOptions {
    BusOptions { tls, ..BusOptions::new(format!("tls://localhost:{}", broker.port()), "test") }
}

#[tokio::test]
async fn tls_works_with_the_right_authority_only() {
    let broker = tls_broker(false);
    let ca = |path: PathBuf| Tls { ca: Some(path), ..Tls::default() };
    let good = tls_options(&broker, ca(broker.path("ca.pem")));
    let bus = Bus::connect(good).await.expect("connects");
    assert_eq!(bus.url(), format!("tls://localhost:{}", broker.port()));
    let error = refused(tls_options(&broker, ca(broker.path("stranger.pem")))).await;
    assert!(matches!(error, BusError::Tls { .. }), "{error:?}");
    let error = refused(tls_options(&broker, ca(broker.path("missing.pem")))).await;
    assert!(matches!(&error, BusError::TlsFile { path, .. } if path.ends_with("missing.pem")));
}

#[tokio::test]
async fn a_broker_without_tls_is_refused_when_tls_is_required() {
    let broker = Broker::start();
    let tls = Tls { required: true, ..Tls::default() };
    let error = refused(BusOptions { tls, ..BusOptions::new(broker.url(), "test") }).await;
    assert!(matches!(error, BusError::Tls { .. } | BusError::Unreachable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_broker_that_verifies_clients_gets_our_certificate() {
    let broker = tls_broker(true);
    let identity =
        TlsIdentity { certificate: broker.path("client.pem"), key: broker.path("client.key") };
    let tls = Tls { ca: Some(broker.path("ca.pem")), identity: Some(identity), required: true };
    Bus::connect(tls_options(&broker, tls.clone())).await.expect("connects");
    let without = Tls { identity: None, ..tls };
    let error = refused(tls_options(&broker, without)).await;
    assert!(matches!(error, BusError::Tls { .. } | BusError::Unreachable { .. }), "{error:?}");
}

/// A broker on which the user `w` may use `ok.>` and its own inbox only, and a connection of `w`.
async fn restricted(inbox: &str) -> (Broker, Bus) {
    let config = r#"
authorization { users: [
  { user: w, password: p, permissions: { publish: ["ok.>"], subscribe: ["ok.>", "_INBOX.w.>"] } }
] }
"#;
    let broker = Broker::start_with(config, &[]);
    let options = BusOptions {
        credentials: Credentials::UserPassword { user: "w".into(), password: "p".into() },
        inbox_prefix: inbox.to_owned(),
        ..BusOptions::new(broker.url(), "test")
    };
    let bus = Bus::connect(options).await.expect("connects");
    (broker, bus)
}

/// Far beyond the test's own patience: only the refusal itself can end these waits.
const LONG: std::time::Duration = std::time::Duration::from_secs(3600);

#[tokio::test]
async fn a_forbidden_question_is_refused_instead_of_timing_out() {
    let (_broker, bus) = restricted("_INBOX.w").await;
    let ask = bus.request_bytes("secret.1", None, bytes::Bytes::new(), LONG);
    let error = tokio::time::timeout(PATIENCE, ask).await.expect("at once").expect_err("forbidden");
    let subject = "secret.1".to_owned();
    let expected = Violation { operation: Operation::Publish, subject };
    assert!(
        matches!(&error, RequestError::Forbidden { violation, .. } if *violation == expected),
        "{error:?}"
    );
}

#[tokio::test]
async fn answers_to_a_forbidden_inbox_are_refused_each_time() {
    let (_broker, bus) = restricted("_INBOX.other").await;
    let _listener = bus.subscribe("ok.1").await.expect("subscribes");
    for _ in 0..2 {
        let ask = bus.request_bytes("ok.1", None, bytes::Bytes::new(), LONG);
        let asked = tokio::time::timeout(PATIENCE, ask).await.expect("at once");
        let error = asked.expect_err("forbidden");
        assert!(
            matches!(&error, RequestError::Forbidden { violation, .. }
                if violation.operation == Operation::Subscribe
                    && violation.subject.starts_with("_INBOX.other.")),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn a_forbidden_prompt_is_refused_instead_of_waiting_for_events() {
    for (inbox, subject, operation) in [
        ("_INBOX.w", "secret.1", Operation::Publish),
        ("_INBOX.other", "ok.1", Operation::Subscribe),
    ] {
        let (_broker, bus) = restricted(inbox).await;
        let mut events = bus
            .event_stream(subject, ContentType::Json, bytes::Bytes::new(), LONG)
            .await
            .expect("seems to succeed");
        // Without a listener the broker's word that nobody hears it may come as well.
        let _listener = bus.subscribe(subject).await.expect("seems to succeed");
        let next = tokio::time::timeout(PATIENCE, events.next()).await.expect("at once");
        let error = next.expect_err("forbidden");
        assert!(
            matches!(&error, StreamError::Forbidden { violation, .. }
                if violation.operation == operation),
            "{error:?}"
        );
    }
}
