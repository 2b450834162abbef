//! The broker: whether it lets us in, how far away it is, what it can carry.

use std::time::{Duration, Instant, SystemTime};

use stagebus_bus::{Bus, BusError, BusOptions, RequestError, Role, SeedError};
use stagebus_coordinator::{MIN_CHUNK_ROWS, rows_per_message};
use stagebus_settings::BrokerSettings;

use super::finding::{Check, Fault, Findings};
use super::machine::line;

/// Name in the broker's lists.
const NAME: &str = "stagebus-doctor";

/// How long the broker may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Questions of which the quickest answer counts as the way there and back.
const N_QUESTIONS: usize = 5;

/// A round trip above which every step of a fleet is slow.
const LONG_ROUND_TRIP: Duration = Duration::from_millis(20);

/// A difference of clocks above which logs of two machines cannot be read side by side.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(1);

/// Connects as a client.
pub async fn connect(settings: &BrokerSettings, findings: &mut Findings) -> Option<Bus> {
    let options = match BusOptions::from_settings(settings, Role::Client, NAME) {
        Ok(options) => options,
        // The look at the key's file has told that.
        Err(SeedError::Unreadable { .. }) => {
            findings.skip(Check::Broker, "the key cannot be read");
            return None;
        }
        Err(error @ SeedError::NotASeed { .. }) => {
            findings.fault(Fault::KeyUnusable, line(&error.into()));
            return None;
        }
    };
    match Bus::connect(options).await {
        Ok(bus) => {
            let found = format!("{}, nats-server {}", bus.url(), bus.broker_version());
            findings.ok(Check::Broker, found);
            Some(bus)
        }
        Err(error) => {
            findings.fault(fault(&error), line(&error.into()));
            None
        }
    }
}

fn fault(error: &BusError) -> Fault {
    match error {
        BusError::NoUrl | BusError::Url { .. } | BusError::Scheme { .. } => {
            Fault::BrokerAddressWrong
        }
        BusError::Insecure { .. } => Fault::BrokerUnprotected,
        BusError::Unreachable { .. } => Fault::BrokerUnreachable,
        BusError::TimedOut { .. } => Fault::BrokerSilent,
        BusError::AuthRefused { .. } => Fault::CredentialsRefused,
        BusError::NkeySeed { .. } => Fault::KeyUnusable,
        BusError::TlsFile { .. } | BusError::Tls { .. } => Fault::TlsFailed,
    }
}

/// How far away the broker is, and by how much its clock differs, positive if it is ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sounding {
    pub(crate) round_trip: Duration,
    clock: Option<ClockDifference>,
}

/// A difference between two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClockDifference {
    BrokerAhead(Duration),
    BrokerBehind(Duration),
}

impl ClockDifference {
    fn between(here: SystemTime, broker: SystemTime) -> Self {
        match broker.duration_since(here) {
            Ok(ahead) => Self::BrokerAhead(ahead),
            Err(behind) => Self::BrokerBehind(behind.duration()),
        }
    }

    fn size(self) -> Duration {
        match self {
            Self::BrokerAhead(size) | Self::BrokerBehind(size) => size,
        }
    }
}

/// Measures the way to the broker and back, and compares the clocks.
pub async fn distance(bus: &Bus, findings: &mut Findings) {
    let mut nearest: Option<Sounding> = None;
    for _ in 0..N_QUESTIONS {
        let sounding = match sound(bus).await {
            Ok(sounding) => sounding,
            Err(error) => {
                let why = line(&error.into());
                findings.skip(Check::RoundTrip, why.clone());
                return findings.skip(Check::Clock, why);
            }
        };
        if nearest.is_none_or(|nearest| sounding.round_trip < nearest.round_trip) {
            nearest = Some(sounding);
        }
    }
    if let Some(nearest) = nearest {
        judge_distance(nearest, findings);
    }
}

/// One question to the broker itself. A refusal travels as far as an answer.
async fn sound(bus: &Bus) -> Result<Sounding, RequestError> {
    let (asked, clock) = (Instant::now(), SystemTime::now());
    let told = bus.broker_time(ANSWER).await;
    let round_trip = asked.elapsed();
    match told {
        Ok(broker) => {
            // The broker looked at its clock somewhere on the way: half of it is the best guess.
            let clock = Some(ClockDifference::between(clock + round_trip / 2, broker));
            Ok(Sounding { round_trip, clock })
        }
        Err(RequestError::Forbidden { .. } | RequestError::NoResponders { .. }) => {
            Ok(Sounding { round_trip, clock: None })
        }
        Err(error) => Err(error),
    }
}

fn judge_distance(sounding: Sounding, findings: &mut Findings) {
    let Sounding { round_trip, clock } = sounding;
    let found = format!("{:.2} ms", round_trip.as_secs_f64() * 1e3);
    if round_trip > LONG_ROUND_TRIP {
        findings.fault(Fault::RoundTripLong, found);
    } else {
        findings.ok(Check::RoundTrip, found);
    }
    let Some(clock) = clock else {
        return findings.skip(Check::Clock, "the broker does not tell these credentials its time");
    };
    let found = match clock {
        ClockDifference::BrokerAhead(by) => format!("the broker's is {by:.1?} ahead"),
        ClockDifference::BrokerBehind(by) => format!("the broker's is {by:.1?} behind"),
    };
    // What may be the way there and back is no difference.
    if clock.size() > CLOCK_DIFFERENCE + round_trip / 2 {
        findings.fault(Fault::ClockDiffers, found);
    } else {
        findings.ok(Check::Clock, found);
    }
}

/// Looks whether prompts fit the broker's messages. Without a shard set the width of the rows is
/// not known, and without a second stage none travel.
pub fn payload(
    max_payload: usize,
    hidden_dim: Option<usize>,
    chunk_rows: usize,
    findings: &mut Findings,
) {
    let Some(hidden_dim) = hidden_dim else {
        let found = format!("{} KiB; --shards tells what is needed", max_payload >> 10);
        return findings.ok(Check::Payload, found);
    };
    let rows = rows_per_message(max_payload, hidden_dim);
    let found = format!("{} KiB: {rows} rows of a prompt fit", max_payload >> 10);
    if rows < MIN_CHUNK_ROWS {
        findings.fault(Fault::PayloadTooSmall, format!("{found}, {MIN_CHUNK_ROWS} are needed"));
    } else if rows < chunk_rows {
        findings.fault(Fault::PayloadSmall, format!("{found}, {chunk_rows} are wanted"));
    } else {
        findings.ok(Check::Payload, found);
    }
}

/// Looks for JetStream.
pub async fn jetstream(bus: &Bus, is_wanted: bool, findings: &mut Findings) {
    match bus.has_jetstream(ANSWER).await {
        Ok(true) => findings.ok(Check::Jetstream, "durable jobs can be kept"),
        Ok(false) if is_wanted => {
            findings.fault(Fault::JetstreamMissing, "the broker has none, and jobs are wanted");
        }
        Ok(false) => findings.skip(Check::Jetstream, "the broker has none; jobs would need it"),
        Err(error) => findings.skip(Check::Jetstream, line(&error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(findings: &Findings) -> Vec<Fault> {
        findings.all().iter().filter_map(|finding| finding.fault).collect()
    }

    #[test]
    fn clocks_may_differ_by_what_the_way_takes() {
        let check = |ahead: f64, round_trip_ms, expected: &[Fault]| {
            let here = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
            let broker = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(1000.0 + ahead);
            let clock = Some(ClockDifference::between(here, broker));
            let round_trip = Duration::from_millis(round_trip_ms);
            let mut findings = Findings::default();
            judge_distance(Sounding { round_trip, clock }, &mut findings);
            assert_eq!(faults(&findings), expected, "{ahead} s, {round_trip_ms} ms");
        };
        check(0.9, 1, &[]);
        check(-0.9, 1, &[]);
        check(-1.2, 1, &[Fault::ClockDiffers]);
        check(1.2, 500, &[Fault::RoundTripLong]);
        check(1.3, 500, &[Fault::RoundTripLong, Fault::ClockDiffers]);
    }

    #[test]
    fn a_prompt_needs_room_in_a_message() {
        let check = |max_payload, expected: &[Fault]| {
            let mut findings = Findings::default();
            payload(max_payload, Some(4096), 128, &mut findings);
            assert_eq!(faults(&findings), expected, "{max_payload}");
        };
        check(8 << 20, &[]);
        check(1 << 20, &[Fault::PayloadSmall]);
        check(32 << 10, &[Fault::PayloadTooSmall]);
    }
}
