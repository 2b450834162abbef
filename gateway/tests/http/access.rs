//! Who may ask: keys, names of hosts, origins, TLS.

use std::sync::Arc;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use stagebus_gateway::{GatewayError, ServerTls, SettingError};
use stagebus_settings::Secret;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::bed::{Bed, MODEL, config, soon};
use crate::client::{self, request};

/// A key of the file, and one of the environment.
const KEYS: [&str; 2] = ["sk-of-the-file-0123456789", "sk-of-the-environment-0123"];

#[tokio::test]
async fn only_those_with_a_key_may_ask() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let hash = Sha256::digest(KEYS[0]).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let file = bed.folder.path().join("keys");
    std::fs::write(&file, format!("ann {hash}\n")).unwrap();
    let gateway = bed
        .gateway(|settings| {
            settings.api_keys_file = Some(file);
            settings.api_keys = Some(Secret::new(KEYS[1].to_owned()));
        })
        .await;
    let ask = async |authorization: Option<&str>| {
        let mut headers = vec![("Content-Type", "application/json"), ("Host", "example.org")];
        headers.extend(authorization.map(|value| ("Authorization", value)));
        let body = json!({"model": MODEL, "prompt": "a"}).to_string();
        client::send(
            gateway.address,
            &request("POST", "/v1/completions", &headers, body.as_bytes()),
        )
        .await
    };
    for wrong in [None, Some("Bearer "), Some("Bearer x"), Some(KEYS[0]), Some("Basic YTpi")] {
        let response = ask(wrong).await;
        assert_eq!((response.status, response.header("www-authenticate")), (401, Some("Bearer")));
        assert_eq!(response.error()["code"], "invalid_api_key");
    }
    let hashed = format!("Bearer {hash}");
    assert_eq!(ask(Some(&hashed)).await.status, 401, "the hash is no key");
    for key in KEYS {
        assert_eq!(ask(Some(&format!("Bearer {key}"))).await.status, 200);
    }
    for (path, status) in [
        ("/health", 200),
        ("/ready", 200),
        ("/metrics", 401),
        ("/v1/models", 401),
        ("/nowhere", 404),
    ] {
        assert_eq!(client::get(gateway.address, path).await.status, status, "{path}");
    }
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn without_keys_a_page_of_another_name_is_refused() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let port = gateway.address.port();
    let ask = async |host: &str| {
        let sent = request("GET", "/v1/models", &[("Host", host)], b"");
        client::send(gateway.address, &sent).await.status
    };
    assert_eq!(ask(&format!("127.0.0.1:{port}")).await, 200);
    assert_eq!(ask(&format!("evil.example:{port}")).await, 403);
    gateway.end().await;
}

#[tokio::test]
async fn pages_of_configured_origins_only_may_ask() {
    let bed = Bed::new().await;
    let ours = "https://page.example";
    let closed = bed.gateway(|_| {}).await;
    let open = bed
        .gateway(|settings| {
            settings.cors_origins = vec![ours.to_owned()];
            settings.api_keys = Some(Secret::new(KEYS[1].to_owned()));
        })
        .await;
    let preflight = |origin: &str| {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "authorization,content-type"),
        ];
        request("OPTIONS", "/v1/chat/completions", &headers, b"")
    };
    let allowed = "access-control-allow-origin";
    let response = client::send(open.address, &preflight(ours)).await;
    assert_eq!((response.status, response.header(allowed)), (200, Some(ours)));
    let headers = response.header("access-control-allow-headers");
    assert_eq!(headers, Some("authorization,content-type"));
    let response = client::send(open.address, &preflight("https://evil.example")).await;
    assert_eq!(response.header(allowed), None);
    let asked = request("GET", "/v1/models", &[("Origin", ours)], b"");
    let response = client::send(open.address, &asked).await;
    let found = (response.status, response.header(allowed));
    assert_eq!(found, (401, Some(ours)), "the page may read why it is refused");
    let response = client::send(closed.address, &preflight(ours)).await;
    assert_eq!((response.status, response.header(allowed)), (405, None));
    open.end().await;
    closed.end().await;
}

#[tokio::test]
async fn with_a_certificate_it_speaks_tls_and_nothing_else() {
    let bed = Bed::new().await;
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let cert_file = bed.folder.path().join("cert.pem");
    let key_file = bed.folder.path().join("key.pem");
    std::fs::write(&cert_file, made.cert.pem()).unwrap();
    std::fs::write(&key_file, made.signing_key.serialize_pem()).unwrap();
    let tls = ServerTls { cert_file: Some(cert_file), key_file: Some(key_file) };
    let gateway = bed.gateway(|settings| settings.tls = tls).await;
    assert!(gateway.base_url.starts_with("https://127.0.0.1:"), "{}", gateway.base_url);

    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(made.cert.der().to_vec())).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = soon(TcpStream::connect(gateway.address)).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = BufReader::new(soon(connector.connect(name, stream)).await.unwrap());
    stream.write_all(&request("GET", "/health", &[], b"")).await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(soon(client::read_response(&mut stream)).await.status, 200);

    let mut plain = client::Connection::open(gateway.address).await;
    plain.write(&request("GET", "/health", &[], b"")).await;
    let answer = plain.rest().await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    drop(stream);
    gateway.end().await;
}

#[tokio::test]
async fn an_open_address_is_refused_before_anything_is_done() {
    let nobody = stagebus_settings::BrokerSettings {
        url: "nats://127.0.0.1:1".to_owned(),
        ..stagebus_settings::BrokerSettings::default()
    };
    let config = config(nobody, |settings| settings.listen = "0.0.0.0:0".parse().unwrap());
    let stop = tokio_util::sync::CancellationToken::new();
    let error = stagebus_gateway::run(config, stop, |_| Ok(())).await.unwrap_err();
    let insecure = matches!(&error, GatewayError::Setting(SettingError::Insecure { .. }));
    assert!(insecure && error.is_access_refusal(), "{error:?}");
}
