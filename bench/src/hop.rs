//! The scenario `hop`: one message between two processes, by NATS and by raw TCP.
//!
//! The messages are the ones that go from stage to stage, hidden states of one row, a few rows and
//! a whole chunk. One side sends, the other one sends back what it got, and half of the time is one
//! way. What comes back must be what was sent. Both go over loopback, then over links:
//!
//! ```text
//! NATS   this side ── broker ── link ── other side
//! TCP    this side ──────────── link ── other side
//! ```

mod peers;

use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::codec;
use stagebus_schemas::ids::{Epoch, SessionId, StepNumber};
use stagebus_schemas::messages::forward::{Forward, Phase, Step};
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_schemas::version::MessageVersion;

use crate::faults::Dice;
use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::harness::stats::Summary;
use crate::harness::table::{number, table};
use crate::link::{Conditions, Link, LinkPlan, mbit_s};
use peers::{NatsPeer, TcpPeer};

const EXTRA: Target = Target {
    name: "hop_nats_extra_ms",
    target: 0.2,
    bound: Bound::AtMost,
    what: "one row of a 576-wide model one way by NATS less by raw TCP, loopback, medians",
};
const OVER_LINK: Target = Target {
    name: "hop_nats_vs_tcp_10ms",
    target: 1.1,
    bound: Bound::AtMost,
    what: "one row of a 576-wide model one way by NATS over raw TCP, a link of 10 ms, medians",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[EXTRA, OVER_LINK];

/// Rows and width of the hidden states; 576 is SmolLM2-135M, 4096 an 8B model.
const SIZES: [(u32, u32); 6] = [(1, 576), (8, 576), (256, 576), (1, 4096), (8, 4096), (256, 4096)];

/// Longest time for the messages of one size, way and round.
const PATIENCE: Duration = Duration::from_secs(4);

/// Arguments of `stagebus bench hop`.
#[derive(Debug, Clone, clap::Args)]
pub struct HopArgs {
    /// Delay of the emulated links one way, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 10)]
    delay: u32,

    /// Rate of the narrow link, in Mbit/s
    #[arg(long, value_name = "MBIT", default_value_t = 20.0)]
    rate: f64,

    /// Messages of each size, way and round
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u16).range(3..))]
    messages: u16,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// Where the two sides are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Both on this machine.
    Loopback,
    /// A delay between them.
    Delay,
    /// A delay and a rate.
    Narrow,
}

/// Times of one size at one place.
#[derive(Debug, Serialize)]
pub struct HopPoint {
    /// Where.
    pub place: Place,
    /// Rows of the hidden state.
    pub n_rows: u32,
    /// Numbers of a row.
    pub width: u32,
    /// Bytes of the message.
    pub n_bytes: usize,
    /// One way by NATS, in milliseconds.
    pub nats_ms: Option<Summary>,
    /// One way by raw TCP, in milliseconds.
    pub tcp_ms: Option<Summary>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct HopReport {
    scenario: &'static str,
    machine: Machine,
    delay_ms: u32,
    rate_mbit_s: f64,
    points: Vec<HopPoint>,
    claims: Vec<Claim>,
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Bytes that come back differently; anything that does not run.
pub async fn run(args: HopArgs, quiet: bool) -> anyhow::Result<()> {
    let mut machine = Machine::look();
    let delay = Duration::from_millis(args.delay.into());
    let places = [
        (Place::Loopback, None),
        (Place::Delay, Some(Conditions::delay(delay))),
        (Place::Narrow, Some(Conditions::queued(delay, mbit_s(args.rate)))),
    ];
    let mut broker = LocalBroker::start(BrokerOptions::default()).await?;
    let mut points = Vec::new();
    for (place, conditions) in places {
        output::note(quiet, &format!("{place:?}"));
        points.extend(measure(&args, broker.url(), place, conditions).await?);
    }
    broker.stop().await?;
    machine.finish();
    let claims = vec![extra_claim(&points), link_claim(&points, args.delay)];
    let report = HopReport {
        scenario: "hop",
        machine,
        delay_ms: args.delay,
        rate_mbit_s: args.rate,
        points,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, None, args.json)?)
}

/// Measures all sizes at one place: NATS and TCP in turn.
async fn measure(
    args: &HopArgs,
    broker: String,
    place: Place,
    conditions: Option<Conditions>,
) -> anyhow::Result<Vec<HopPoint>> {
    let plan = conditions.map(LinkPlan::both);
    let to_broker = plan.map(|plan| Link::to_broker(&broker, plan)).transpose()?;
    let far_url = to_broker.as_ref().map_or_else(|| broker.clone(), Link::url);
    let mut nats = NatsPeer::start(&broker, &far_url).await?;
    let mut tcp = TcpPeer::start(plan)?;
    let mut points = Vec::new();
    for (n_rows, width) in SIZES {
        let message = message(n_rows, width)?;
        let (mut nats_ms, mut tcp_ms) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            nats_ms.extend(nats.ways_ms(&message, args.messages, PATIENCE).await?);
            let (bytes, n) = (message.clone(), args.messages);
            let work = tokio::task::spawn_blocking(move || {
                let times = tcp.ways_ms(&bytes, n, PATIENCE);
                (tcp, times)
            });
            let (back, times) = work.await?;
            tcp = back;
            tcp_ms.extend(times?);
        }
        let (nats_ms, tcp_ms) = (Summary::of(nats_ms), Summary::of(tcp_ms));
        points.push(HopPoint { place, n_rows, width, n_bytes: message.len(), nats_ms, tcp_ms });
    }
    nats.end().await?;
    Ok(points)
}

/// The message from one stage to the next with so many rows.
fn message(n_rows: u32, width: u32) -> anyhow::Result<Bytes> {
    let mut dice = Dice::new(u64::from(n_rows) * u64::from(width));
    let n_bytes = n_rows as usize * Dtype::F32.row_bytes(width as usize);
    let data: Vec<u8> = (0..n_bytes).map(|_| dice.below(256) as u8).collect();
    let step = Step {
        session: SessionId::from_u64(7),
        epoch: Epoch::FIRST,
        step: StepNumber::new(1),
        start_pos: 0,
        phase: Phase::Prefill,
        tokens: (0..n_rows).collect(),
        wanted: Vec::new(),
        held_from: None,
        trace: Vec::new(),
    };
    let hidden = Tensor { dtype: Dtype::F32, n_rows, hidden_dim: width, data: data.into() };
    let version = MessageVersion::CURRENT;
    let forward = Forward { version, from: None, steps: vec![step], hidden: Some(hidden) };
    Ok(codec::encode(&forward)?.into())
}

fn find(points: &[HopPoint], place: Place) -> Option<(f64, f64)> {
    let mut found = points.iter().filter(|point| point.place == place);
    let point = found.find(|point| (point.n_rows, point.width) == SIZES[0])?;
    Some((point.nats_ms?.median, point.tcp_ms?.median))
}

fn extra_claim(points: &[HopPoint]) -> Claim {
    match find(points, Place::Loopback) {
        None => EXTRA.missing("no message was timed"),
        Some((nats, tcp)) => {
            let how = format!("{nats:.3} ms by NATS, {tcp:.3} ms by TCP, one after the other");
            EXTRA.measured(nats - tcp, how)
        }
    }
}

fn link_claim(points: &[HopPoint], delay_ms: u32) -> Claim {
    match find(points, Place::Delay).filter(|_| delay_ms == 10) {
        None => OVER_LINK.missing("needs --delay 10"),
        Some((nats, tcp)) => {
            OVER_LINK.measured(nats / tcp, format!("{nats:.2} ms by NATS, {tcp:.2} ms by TCP"))
        }
    }
}

impl HopReport {
    /// The table for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |point: &HopPoint| {
            let ms = |of: Option<Summary>, at: fn(&Summary) -> f64| number(of.as_ref().map(at), 3);
            let place = match point.place {
                Place::Loopback => "loopback".to_owned(),
                Place::Delay => format!("{} ms", self.delay_ms),
                Place::Narrow => format!("{} ms, {} Mbit/s", self.delay_ms, self.rate_mbit_s),
            };
            let ratio = point.nats_ms.zip(point.tcp_ms).map(|(a, b)| a.median / b.median);
            vec![
                place,
                format!("{} x {}", point.n_rows, point.width),
                point.n_bytes.to_string(),
                ms(point.nats_ms, |summary| summary.median),
                ms(point.nats_ms, |summary| summary.p99),
                ms(point.tcp_ms, |summary| summary.median),
                ms(point.tcp_ms, |summary| summary.p99),
                number(ratio, 2),
            ]
        };
        let header = ["place", "hidden state", "bytes", "NATS ms", "p99", "TCP ms", "p99", "ratio"];
        let rows: Vec<_> = self.points.iter().map(row).collect();
        format!("one way, ms\n{}\n", table(&header, &rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(place: Place, nats: f64, tcp: f64) -> HopPoint {
        let (nats_ms, tcp_ms) = (Summary::of([nats]), Summary::of([tcp]));
        HopPoint { place, n_rows: 1, width: 576, n_bytes: 2400, nats_ms, tcp_ms }
    }

    #[test]
    fn one_row_of_the_small_model_counts() {
        let points = [point(Place::Loopback, 0.25, 0.125), point(Place::Delay, 12.0, 10.0)];
        assert_eq!(extra_claim(&points).value, Some(0.125));
        assert_eq!(link_claim(&points, 10).holds, Some(false));
        assert_eq!(link_claim(&points, 50).holds, None);
    }

    #[test]
    fn messages_have_the_real_sizes() {
        for (n_rows, width) in SIZES {
            let n_bytes = message(n_rows, width).expect("a valid message").len();
            let payload = n_rows as usize * width as usize * 4;
            assert!((payload..payload + 2000).contains(&n_bytes), "{n_bytes} for {payload}");
        }
    }

    #[tokio::test]
    async fn both_ways_bring_back_what_was_sent() {
        let broker = LocalBroker::start(BrokerOptions::default()).await.expect("a broker");
        let conditions = Conditions::delay(Duration::from_millis(1));
        let args = HopArgs { delay: 1, rate: 20.0, messages: 3, rounds: 1, json: false };
        let points = measure(&args, broker.url(), Place::Delay, Some(conditions)).await;
        let points = points.expect("both answer");
        assert_eq!(points.len(), SIZES.len());
        for point in points {
            assert!(point.nats_ms.is_some_and(|ms| ms.min >= 1.0));
            assert!(point.tcp_ms.is_some_and(|ms| ms.min >= 1.0));
        }
    }
}
