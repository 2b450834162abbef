//! What is looked at, what can be wrong, and what to do then.

use std::fmt;

use serde::Serialize;

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Not looked at, or not to be found out from here.
    Skipped,
    /// It works, but not well, or not for long.
    Warn,
    /// It does not work.
    Fail,
}

/// What is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// The configuration file, variables and flags.
    Configuration,
    /// The OpenVINO library.
    Openvino,
    /// The device that runs stages.
    Device,
    /// The broker's program.
    NatsServer,
    /// The folder in which shard sets are kept.
    Cache,
    /// Room on the disk of that folder.
    Disk,
    /// A shard set.
    Shards,
    /// A draft model.
    Draft,
    /// The file with the key.
    KeyFile,
    /// The connection to the broker.
    Broker,
    /// The time to the broker and back.
    RoundTrip,
    /// The clock of this machine against the broker's.
    Clock,
    /// The largest message.
    Payload,
    /// The broker's JetStream.
    Jetstream,
    /// What these credentials may do.
    Permissions,
    /// Whether requests can be served.
    Fleet,
    /// The state of single workers.
    Workers,
}

/// Declares [`Fault`] with the level and the advice of each.
macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident: $check:ident, $level:ident, $advice:literal;)*) => {
        /// Something that is wrong, by a name that does not change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// All faults, in the order in which they are looked for.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// What was looked at when it was found.
            #[must_use]
            pub const fn check(self) -> Check {
                match self { $(Self::$name => Check::$check),* }
            }

            /// How bad it is.
            #[must_use]
            pub const fn level(self) -> Level {
                match self { $(Self::$name => Level::$level),* }
            }

            /// What to do.
            #[must_use]
            pub const fn advice(self) -> &'static str {
                match self { $(Self::$name => $advice),* }
            }
        }
    };
}

faults! {
    /// A setting is unknown, or its value does not fit.
    ConfigurationWrong: Configuration, Fail,
        "correct the setting that is named; README.md lists them all";
    /// The OpenVINO library is not there.
    OpenvinoMissing: Openvino, Fail,
        "run `cargo xtask setup`, or set STAGEBUS_OPENVINO to the C library or its folder";
    /// The OpenVINO library is there and does not start, or is too old.
    OpenvinoUnusable: Openvino, Fail,
        "run `cargo xtask setup` for the version that is tested, or install that one";
    /// OpenVINO does not find the device.
    DeviceMissing: Device, Fail,
        "install the device's driver, or choose one of those that are listed with worker.device";
    /// The broker's program is not there.
    NatsServerMissing: NatsServer, Warn,
        "needed only where a broker is started: run `cargo xtask setup`, or set STAGEBUS_NATS_SERVER";
    /// The folder for shard sets cannot be written.
    CacheNotWritable: Cache, Fail,
        "let this user write the folder, or name another one with --cache";
    /// Little room is left on the disk.
    DiskLow: Disk, Warn,
        "make room, or keep shard sets on another disk with --cache";
    /// There is no manifest, or it cannot be read.
    ShardSetMissing: Shards, Fail,
        "name a folder made by `stagebus shard`, which this user may read";
    /// The manifest contradicts itself, or is of another version.
    ManifestInvalid: Shards, Fail,
        "copy the shard set again, or make it again with this version's `stagebus shard`";
    /// The shard set has no such stage.
    StageUnknown: Shards, Fail,
        "choose a stage that the shard set has, with --stage or worker.stage";
    /// A file of the shard set is missing, or cannot be read.
    ShardUnreadable: Shards, Fail,
        "copy the file again, and let this user read it";
    /// A file of the shard set is shorter or longer than it should be.
    ShardSizeDiffers: Shards, Fail,
        "copy the file again: the last copy was not complete";
    /// A file of the shard set holds other bytes than it should.
    ShardHashDiffers: Shards, Fail,
        "copy the file again: it is damaged, or of another shard set";
    /// The draft model's shard set cannot be used.
    DraftUnusable: Draft, Fail,
        "make it again, as in docs/draft.md, or leave it out with coordinator.draft=ngram";
    /// The draft model was made for another tokenizer.
    DraftTokenizerDiffers: Draft, Fail,
        "make it with `stagebus shard --tokenizer-from`, from a model of the same tokenizer";
    /// Others on this machine can read the key.
    KeyReadable: KeyFile, Warn,
        "make the file readable by its owner only: chmod 600";
    /// The file with the key cannot be read, or holds none.
    KeyUnusable: KeyFile, Fail,
        "copy the holder's folder of keys again (`stagebus keys`)";
    /// The broker's address is none.
    BrokerAddressWrong: Broker, Fail,
        "correct broker.url: nats://host:port or tls://host:port";
    /// The broker is on another machine, without TLS or without credentials.
    BrokerUnprotected: Broker, Fail,
        "make keys with `stagebus keys`, see docs/security.md";
    /// Nobody listens at the address.
    BrokerUnreachable: Broker, Fail,
        "start the broker (`nats-server -c nats.conf`), or correct broker.url; look at firewalls";
    /// Somebody listens, and does not answer as a broker.
    BrokerSilent: Broker, Fail,
        "see whether a nats-server listens at the address, and whether its machine is overloaded";
    /// The broker knows no such user, password, token or key.
    CredentialsRefused: Broker, Fail,
        "take the configuration of `stagebus keys`, and let the broker read users.conf again";
    /// The certificates do not fit.
    TlsFailed: Broker, Fail,
        "give the fleet's ca.pem as broker.tls.ca_file, and a host name that the certificate has";
    /// Each step takes this long at least once more per stage.
    RoundTripLong: RoundTrip, Warn,
        "place stages that follow each other close to a broker, see docs/wide-area.md";
    /// The clock of this machine differs from the broker's.
    ClockDiffers: Clock, Warn,
        "set the clock of one of the machines: certificates and logs depend on it";
    /// Not even a short piece of a prompt fits a message.
    PayloadTooSmall: Payload, Fail,
        "raise max_payload in the broker's configuration, as in nats.conf (8 MiB)";
    /// Prompts are cut into smaller pieces than they should be.
    PayloadSmall: Payload, Warn,
        "raise max_payload in the broker's configuration, as in nats.conf (8 MiB)";
    /// Durable jobs are wanted and the broker has no JetStream.
    JetstreamMissing: Jetstream, Fail,
        "add a jetstream block to the broker's configuration, as in nats.conf";
    /// The broker forbids to hear or to ask who is there.
    PermissionMissing: Permissions, Fail,
        "use a key for this model and role (`stagebus keys list`), and name the model with --model";
    /// Nobody announces itself.
    NobodyThere: Fleet, Fail,
        "start workers and a coordinator, or correct broker.url and --model";
    /// No coordinator takes requests.
    CoordinatorMissing: Fleet, Fail,
        "start one: stagebus coordinator --shards DIR";
    /// A stage has no worker that takes sessions.
    StageMissing: Fleet, Fail,
        "start a worker for it: stagebus worker --shards DIR --stage K";
    /// Parts of the fleet, or the shard set here, are of different content.
    FingerprintsDiffer: Fleet, Fail,
        "copy one shard set to all machines, and start again those with another one";
    /// Parts of the fleet speak different versions.
    VersionsDiffer: Fleet, Fail,
        "install the same version on all machines";
    /// Somebody announces itself in a way that nobody understands.
    AnnouncementInvalid: Fleet, Warn,
        "find out who publishes on that subject";
    /// A worker's inference does not come to an end.
    WorkerWedged: Workers, Fail,
        "end that worker and start it again; its log says what it ran";
    /// A worker said that it is there, and then no more.
    WorkerSilent: Workers, Warn,
        "see whether its process is stopped, and whether its machine or its link is overloaded";
}

/// What was found at one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where was looked.
    pub check: Check,
    /// How bad it is.
    pub level: Level,
    /// What is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
    /// What was found.
    pub found: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<&'static str>,
}

/// What was found in all places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings(Vec<Finding>);

impl Findings {
    /// Notes that a place is as it should be.
    pub fn ok(&mut self, check: Check, found: impl Into<String>) {
        self.push(check, Level::Ok, found.into());
    }

    /// Notes that a place was not looked at, and why.
    pub fn skip(&mut self, check: Check, why: impl Into<String>) {
        self.push(check, Level::Skipped, why.into());
    }

    /// Notes a fault.
    pub fn fault(&mut self, fault: Fault, found: impl Into<String>) {
        self.0.push(Finding {
            check: fault.check(),
            level: fault.level(),
            fault: Some(fault),
            found: found.into(),
            advice: Some(fault.advice()),
        });
    }

    /// Everything that was found, in order.
    #[must_use]
    pub fn all(&self) -> &[Finding] {
        &self.0
    }

    /// The worst of it.
    #[must_use]
    pub fn worst(&self) -> Level {
        self.0.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
    }

    fn push(&mut self, check: Check, level: Level, found: String) {
        self.0.push(Finding { check, level, fault: None, found, advice: None });
    }
}

/// The name of a value on the wire and in the table for people.
fn name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&name(self))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&name(self))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Skipped => "-",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        })
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.0 {
            let Finding { check, level, found, .. } = finding;
            let fault = finding.fault.map(|fault| format!(" [{fault}]")).unwrap_or_default();
            writeln!(f, "{level:<5}{check:<14}{found}{fault}")?;
            if let Some(advice) = finding.advice {
                writeln!(f, "{:<19}-> {advice}", "")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../../docs/doctor.md");

    #[test]
    fn the_page_has_every_fault_with_its_level() {
        for fault in Fault::ALL {
            let level = name(&fault.level());
            let row = format!("| `{fault}` | {level} |");
            assert!(PAGE.contains(&row), "docs/doctor.md has no row {row}");
        }
        let n_rows = PAGE.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(n_rows, Fault::ALL.len(), "a row of a fault that is none");
    }

    #[test]
    fn the_worst_finding_decides() {
        let mut findings = Findings::default();
        assert_eq!(findings.worst(), Level::Ok);
        findings.skip(Check::Clock, "it is not told");
        findings.ok(Check::Broker, "there");
        assert_eq!(findings.worst(), Level::Skipped);
        findings.fault(Fault::DiskLow, "12 MB left");
        assert_eq!(findings.worst(), Level::Warn);
        findings.fault(Fault::StageMissing, "stage 1 has nobody");
        assert_eq!(findings.worst(), Level::Fail);
        let text = findings.to_string();
        assert!(text.contains("WARN disk          12 MB left [disk_low]\n"), "{text}");
        assert!(text.contains("-> start a worker for it"), "{text}");
    }
}
