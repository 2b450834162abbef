//! Tests of the layers and of the messages.

use std::error::Error;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Worker {
    stage: u32,
    device: String,
    share: f32,
    resume: bool,
    cpus: Vec<u32>,
    limit: Option<u64>,
    kv: Kv,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Kv {
    blocks: u32,
    precision: Precision,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Precision {
    #[default]
    U8,
    Bf16,
}

impl Default for Worker {
    fn default() -> Self {
        Self {
            stage: 0,
            device: "CPU".to_owned(),
            share: 0.5,
            resume: true,
            cpus: vec![],
            limit: None,
            kv: Kv::default(),
        }
    }
}

/// Loads with the given layers; `file` is TOML text.
fn layered(
    file: &str,
    variables: &[(&str, &str)],
    flags: &[&str],
) -> Result<Settings<Worker>, SettingsError> {
    let mut toml = tempfile::Builder::new().suffix(".toml").tempfile().expect("temporary file");
    toml.write_all(file.as_bytes()).expect("write");
    let variables =
        variables.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect();
    let mut overrides = Overrides::default();
    for flag in flags {
        overrides.assign(flag)?;
    }
    load_layers("worker", Some(toml.path()), variables, &overrides)
}

/// Asserts that the settings are refused, for the key and origin given, and returns the message
/// with its cause.
fn refused(
    file: &str,
    variables: &[(&str, &str)],
    flags: &[&str],
    expect_key: &str,
    expect_origin: &str,
) -> String {
    let error = layered(file, variables, flags).expect_err("must be refused");
    match &error {
        SettingsError::WrongValue { key, origin, .. }
        | SettingsError::UnknownKey { key, origin, .. } => {
            assert_eq!(key, expect_key, "{error}");
            assert!(origin.contains(expect_origin), "{error}");
        }
        other => panic!("unexpected error {other:?}"),
    }
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[test]
fn keys_and_certificates_of_a_file_lie_beside_it() {
    let file = "[broker]\nnkey_seed_file = \"seed.nk\"\n\
                [broker.tls]\nca_file = \"sub/ca.pem\"\ncert_file = \"/etc/cert.pem\"\n\
                key_file = \"key.pem\"\n";
    let broker = layered(file, &[], &["broker.tls.key_file=own.pem"]).expect("valid").broker;
    let folder = std::env::temp_dir();
    assert_eq!(broker.nkey_seed_file, Some(folder.join("seed.nk")));
    assert_eq!(broker.tls.ca_file, Some(folder.join("sub/ca.pem")));
    assert_eq!(broker.tls.cert_file, Some("/etc/cert.pem".into()));
    assert_eq!(broker.tls.key_file, Some("own.pem".into()), "a flag's path starts here");
}

#[test]
fn the_key_of_a_hosted_worker_lies_beside_the_file() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("stagebus.toml");
    std::fs::write(&file, "[coordinator]\nhost_nkey_seed_file = \"w/seed.nk\"\n").expect("file");
    let Tree(tree) = read_file(&file).expect("valid");
    let key = lookup(&Value::from(tree), "coordinator.host_nkey_seed_file").map(Value::to_string);
    assert_eq!(key, Some(folder.path().join("w/seed.nk").display().to_string()));
}

#[test]
fn the_files_of_a_gateway_lie_beside_the_file() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("stagebus.toml");
    let text = "[gateway]\napi_keys_file = \"keys\"\n[gateway.tls]\ncert_file = \"c.pem\"\n\
                key_file = \"/etc/k.pem\"\n";
    std::fs::write(&file, text).expect("file");
    let Tree(tree) = read_file(&file).expect("valid");
    let tree = Value::from(tree);
    let found = |key: &str| lookup(&tree, key).map(Value::to_string);
    let beside = |name: &str| Some(folder.path().join(name).display().to_string());
    assert_eq!(found("gateway.api_keys_file"), beside("keys"));
    assert_eq!(found("gateway.tls.cert_file"), beside("c.pem"));
    assert_eq!(found("gateway.tls.key_file"), Some("/etc/k.pem".to_owned()));
}

#[test]
fn each_layer_wins_over_the_one_before() {
    let file = "[worker]\nstage = 1\ndevice = \"GPU\"\ncpus = [1, 2]\n[worker.kv]\nblocks = 7\n";
    let settings = layered(file, &[], &[]).expect("file");
    assert_eq!((settings.process.stage, settings.process.device.as_str()), (1, "GPU"));
    assert_eq!(settings.process.kv, Kv { blocks: 7, precision: Precision::U8 });

    let variables = [
        ("STAGEBUS_WORKER__STAGE", "2"),
        ("STAGEBUS_WORKER__KV__PRECISION", "bf16"),
        ("STAGEBUS_WORKER__CPUS", "[3]"),
        ("STAGEBUS_WORKER__LIMIT", "9"),
        ("STAGEBUS_WORKER__RESUME", "false"),
        ("STAGEBUS_BROKER__URL", "nats://127.0.0.1:9"),
    ];
    let settings = layered(file, &variables, &[]).expect("variables");
    assert_eq!(settings.process.stage, 2);
    assert_eq!(settings.process.device, "GPU");
    assert_eq!(settings.process.kv, Kv { blocks: 7, precision: Precision::Bf16 });
    assert_eq!(settings.process.cpus, [3]);
    assert_eq!(settings.process.limit, Some(9));
    assert!(!settings.process.resume);
    assert_eq!(settings.broker.url, "nats://127.0.0.1:9");

    let flags = ["worker.stage=3", "worker.cpus=[4,5]", "worker.share=0.25"];
    let settings = layered(file, &variables, &flags).expect("flags");
    assert_eq!(settings.process.stage, 3);
    assert_eq!(settings.process.cpus, [4, 5]);
    assert!((settings.process.share - 0.25).abs() < f32::EPSILON);
}

#[test]
fn text_that_looks_like_a_number_stays_text() {
    let settings = layered("", &[("STAGEBUS_WORKER__DEVICE", "10")], &[]).expect("text");
    assert_eq!(settings.process.device, "10");
}

#[test]
fn a_wrong_value_names_key_value_and_source() {
    let text = refused("[worker]\nstage = \"two\"", &[], &[], "worker.stage", ".toml");
    assert!(text.contains("two") && text.contains("integer"), "{text}");
    let text =
        refused("", &[("STAGEBUS_WORKER__STAGE", "x1")], &[], "worker.stage", "WORKER__STAGE");
    assert!(text.contains("x1"), "{text}");
    let text = refused("", &[], &["worker.kv.precision=f8"], "worker.kv.precision", "--set");
    assert!(text.contains("f8"), "{text}");
    refused("[worker]\nstage = 1.5", &[], &[], "worker.stage", ".toml");
    refused("[worker]\nresume = 3", &[], &[], "worker.resume", ".toml");
    refused("[worker]\nstage = -1", &[], &[], "worker.stage", ".toml");
    refused("[worker]\nkv = 3", &[], &[], "worker.kv", ".toml");
    refused("[worker]\nstage = {a = 1}", &[], &[], "worker.stage", ".toml");
    refused("", &[], &["worker.cpus=[1,"], "worker.cpus", "--set");
    refused("", &[], &["worker.cpus=[1,\"b\"]"], "worker.cpus[1]", "--set");
    refused("[log]\nformat = \"xml\"", &[], &[], "log.format", ".toml");
}

#[test]
fn an_unknown_key_names_the_known_ones() {
    let text = refused("[worker]\nstages = 1", &[], &[], "worker.stages", ".toml");
    assert!(text.contains("stage"), "{text}");
    refused("", &[], &["worker.kv.block=1"], "worker.kv.block", "--set");
    refused("", &[("STAGEBUS_BROKER__URI", "x")], &[], "broker.uri", "BROKER__URI");
    let text = refused("[wroker]\nstage = 1", &[], &[], "wroker", ".toml");
    assert!(text.contains("[worker]"), "{text}");
}

#[test]
fn other_processes_tables_are_left_alone() {
    let file = "[coordinator]\nanything = 1\n[worker]\nstage = 4\n";
    let variables = [("STAGEBUS_GATEWAY__PORT", "80"), ("STAGEBUS_BIN", "/bin/true")];
    assert_eq!(layered(file, &variables, &[]).expect("loads").process.stage, 4);
}

#[test]
fn an_unknown_variable_is_refused() {
    for name in ["STAGEBUS_WROKER__STAGE", "STAGEBUS_STAGE", "STAGEBUS_WORKER"] {
        assert!(matches!(layered("", &[(name, "1")], &[]),
                Err(SettingsError::UnknownVariable { name: found }) if found == name));
    }
}

#[test]
fn the_short_variable_sets_the_log_level() {
    let short = ("STAGEBUS_LOG", "debug");
    assert_eq!(layered("", &[short], &[]).expect("loads").log.level, "debug");
    let settings = layered("", &[short, ("STAGEBUS_LOG__LEVEL", "warn")], &[]).expect("loads");
    assert_eq!(settings.log.level, "warn");
}

#[test]
fn the_variable_of_opentelemetry_names_the_collector_unless_ours_does() {
    let theirs = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://theirs:4318");
    let read = |variables: &[(&str, &str)]| {
        let settings = layered("[telemetry]\notlp_endpoint = \"http://file:4318\"", variables, &[]);
        settings.expect("loads").telemetry.otlp_endpoint.map(String::from)
    };
    assert_eq!(read(&[]).as_deref(), Some("http://file:4318"));
    assert_eq!(read(&[theirs]).as_deref(), Some("http://theirs:4318"));
    let ours = ("STAGEBUS_TELEMETRY__OTLP_ENDPOINT", "http://ours:4318");
    assert_eq!(read(&[theirs, ours]).as_deref(), Some("http://ours:4318"));
    let for_others = ("OTEL_EXPORTER_OTLP_ENDPOINT", "theirs:4317");
    assert_eq!(read(&[for_others]).as_deref(), Some("http://file:4318"), "it is not for us");
    let wrong = [("STAGEBUS_TELEMETRY__OTLP_ENDPOINT", "ours:4317")];
    let text = refused("", &wrong, &[], "telemetry.otlp_endpoint", wrong[0].0);
    assert!(text.contains("http://127.0.0.1:4318"), "{text}");
    refused("[telemetry]\nsample_ratio = 2", &[], &[], "telemetry.sample_ratio", ".toml");
}

#[test]
fn secrets_are_not_repeated() {
    let text = refused("[broker]\ntoken = [\"hunter2\"]", &[], &[], "broker.token", ".toml");
    assert!(!text.contains("hunter2"), "{text}");
    let settings = layered("", &[], &["broker.token=[hunter2"]).expect("taken literally");
    assert_eq!(settings.broker.token.as_ref().map(crate::Secret::expose), Some("[hunter2"));
    assert!(!format!("{settings:?}").contains("hunter2"));
}

#[test]
fn an_unreadable_file_is_named() {
    let overrides = Overrides::default();
    let missing = Path::new("does-not-exist.toml");
    assert!(matches!(
        load_layers::<Worker>("worker", Some(missing), vec![], &overrides),
        Err(SettingsError::File { path, .. }) if path == missing
    ));
    assert!(matches!(layered("[worker", &[], &[]), Err(SettingsError::File { .. })));
    assert!(matches!(layered("", &[], &["stage=1"]), Err(SettingsError::Assignment { .. })));
}
