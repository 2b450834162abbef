//! The scenario `gateway`: what the HTTP gateway adds to a request and to a token, and what open
//! streams cost it.
//!
//! The coordinator is a part of this program: it says the same for every request, so that no
//! inference hides the microseconds. The same prompt goes over the bus and over HTTP, in turn, and
//! both ways must bring the same text:
//!
//! ```text
//! bus    this program ──────────── broker ── coordinator (this program)
//! HTTP   this program ── gateway ── broker ── coordinator (this program)
//! ```
//! Times are taken by one clock: when the coordinator hands an event to its connection, and when
//! the client has read it.

mod process;
mod scripted;
mod ways;

use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_fleet::{BrokerOptions, LocalBroker};

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::{self, Machine};
use crate::harness::stats::{Summary, median};
use crate::harness::table::{number, table};
use crate::harness::{interleave, output};
use process::GatewayProcess;
use scripted::Scripted;
use ways::{Bus, Heard, Http, Way};

const REQUEST: Target = Target {
    name: "gateway_request_ms",
    target: 1.0,
    bound: Bound::AtMost,
    what: "an answer of one token, from sending to its end, over HTTP less over the bus, medians",
};
const TOKEN: Target = Target {
    name: "gateway_token_us",
    target: 50.0,
    bound: Bound::AtMost,
    what: "a token on its way from the coordinator to the client, over HTTP less over the bus, medians",
};
const STREAMS: Target = Target {
    name: "gateway_idle_streams_mb",
    target: 50.0,
    bound: Bound::AtMost,
    what: "growth of the gateway's resident memory by 200 open streams that wait for tokens",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[REQUEST, TOKEN, STREAMS];

/// Streams that the claim is about.
const CLAIMED_STREAMS: u16 = 200;

/// Arguments of `stagebus bench gateway`.
#[derive(Debug, Clone, clap::Args)]
pub struct GatewayArgs {
    /// Answers of one token, each way
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(3..))]
    requests: u16,

    /// Tokens of the long answers
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(3..))]
    tokens: u16,

    /// Pause between two tokens of a paced answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2)]
    pace: u16,

    /// Long answers of each kind, each way
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Open streams; the claim needs 200
    #[arg(long, value_name = "N", default_value_t = CLAIMED_STREAMS)]
    streams: u16,

    /// A first look: few and short answers
    #[arg(long)]
    quick: bool,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// What was measured of one way.
#[derive(Debug, Serialize)]
pub struct WayReport {
    /// `bus` or `http`.
    pub way: &'static str,
    /// Answers of one token, from sending the request to the end, in milliseconds.
    pub request_ms: Option<Summary>,
    /// Tokens of paced answers, from the coordinator to the client, in microseconds.
    pub token_us: Option<Summary>,
    /// Answers whose tokens come as fast as the coordinator can send them: time of the whole
    /// answer by its tokens, in microseconds.
    pub burst_token_us: Option<Summary>,
}

/// Memory of the gateway's process, in MB.
#[derive(Debug, Serialize)]
pub struct Memory {
    /// Open streams.
    pub n_streams: u16,
    /// Resident after one answer.
    pub before_mb: f64,
    /// Resident while the streams wait for tokens.
    pub open_mb: f64,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct GatewayReport {
    scenario: &'static str,
    machine: Machine,
    n_tokens: u16,
    pace_ms: u16,
    ways: Vec<WayReport>,
    /// Processor time of the gateway for one token of the unpaced answers, in microseconds.
    gateway_cpu_token_us: Option<f64>,
    memory: Option<Memory>,
    claims: Vec<Claim>,
}

/// What one way has given so far.
struct Contender {
    way: Way,
    requests_ms: Vec<f64>,
    tokens_us: Vec<f64>,
    bursts_us: Vec<f64>,
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Texts that differ; anything that does not run.
pub async fn run(args: GatewayArgs, quiet: bool) -> anyhow::Result<()> {
    let args =
        if args.quick { GatewayArgs { requests: 50, tokens: 50, rounds: 2, ..args } } else { args };
    let mut machine = Machine::look();
    let mut broker = LocalBroker::start(BrokerOptions::default()).await?;
    let mut coordinator = Scripted::start(&broker.url()).await?;
    let gateway = GatewayProcess::start(&broker.url(), args.streams).await?;
    coordinator.until_listed(gateway.address()).await?;
    let mut contenders = vec![
        Contender::new(Way::Bus(Bus::connect(&broker.url()).await?)),
        Contender::new(Way::Http(Http::connect(gateway.address()).await?)),
    ];
    output::note(quiet, "texts");
    for contender in &mut contenders {
        drop(answer(&mut coordinator, &mut contender.way, 64, Duration::ZERO).await?);
    }
    output::note(quiet, "streams");
    let memory = Box::pin(streams(&mut coordinator, &gateway, args.streams)).await?;
    output::note(quiet, "times");
    let cpu = Box::pin(times(&args, &mut coordinator, &mut contenders, gateway.pid())).await?;
    let ways: Vec<WayReport> = contenders.into_iter().map(Contender::report).collect();
    gateway.end().await?;
    broker.stop().await?;
    machine.finish();
    let claims = vec![
        request_claim(&ways),
        token_claim(&ways, cpu, args.pace),
        streams_claim(memory.as_ref()),
    ];
    let report = GatewayReport {
        scenario: "gateway",
        machine,
        n_tokens: args.tokens,
        pace_ms: args.pace,
        ways,
        gateway_cpu_token_us: cpu,
        memory,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, None, args.json)?)
}

/// Lets the coordinator answer one request that goes one way; returns when each event left, when
/// the request was sent, and what was heard.
async fn answer(
    coordinator: &mut Scripted,
    way: &mut Way,
    n_tokens: u16,
    pace: Duration,
) -> anyhow::Result<(Vec<Instant>, Instant, Heard)> {
    let began = Instant::now();
    let (left, heard) = tokio::try_join!(coordinator.answer(n_tokens, pace), way.ask())?;
    anyhow::ensure!(
        heard.text == scripted::text(n_tokens) && heard.arrivals.len() == usize::from(n_tokens),
        "{} brought another text than the coordinator sent, or in other pieces",
        way.name()
    );
    Ok((left, began, heard))
}

/// Measures times, both ways in turn; returns the gateway's processor time for a token.
async fn times(
    args: &GatewayArgs,
    coordinator: &mut Scripted,
    contenders: &mut [Contender],
    gateway: u32,
) -> anyhow::Result<Option<f64>> {
    interleave(args.requests.into(), contenders, async |contender, _| {
        let (_, began, heard) = answer(coordinator, &mut contender.way, 1, Duration::ZERO).await?;
        contender.requests_ms.push(heard.ended.duration_since(began).as_secs_f64() * 1e3);
        Ok(())
    })
    .await?;
    let pace = Duration::from_millis(args.pace.into());
    let n_tokens = f64::from(args.tokens);
    let mut cpu_us = Vec::new();
    interleave(args.rounds.into(), contenders, async |contender, _| {
        let (left, _, heard) = answer(coordinator, &mut contender.way, args.tokens, pace).await?;
        let ways = left.iter().zip(&heard.arrivals);
        let us = ways.map(|(left, heard)| heard.duration_since(*left).as_secs_f64() * 1e6);
        contender.tokens_us.extend(us);
        let cpu = machine::cpu_ms(gateway);
        let (_, began, heard) =
            answer(coordinator, &mut contender.way, args.tokens, Duration::ZERO).await?;
        let whole = heard.ended.duration_since(began).as_secs_f64();
        contender.bursts_us.push(whole * 1e6 / n_tokens);
        if let (Way::Http(_), Some(before), Some(after)) =
            (&contender.way, cpu, machine::cpu_ms(gateway))
        {
            cpu_us.push((after - before) * 1e3 / n_tokens);
        }
        Ok(())
    })
    .await?;
    Ok(median(cpu_us))
}

/// Opens streams that have had a token and wait for the next one, and looks at the gateway's
/// memory; nothing where the system does not tell it.
async fn streams(
    coordinator: &mut Scripted,
    gateway: &GatewayProcess,
    n_streams: u16,
) -> anyhow::Result<Option<Memory>> {
    let before = gateway.resident_mb();
    let mut open = Vec::new();
    for _ in 0..n_streams {
        let mut client = Http::connect(gateway.address()).await?;
        let (asked, ()) = tokio::try_join!(coordinator.begin(), client.begin())?;
        open.push((asked, client));
    }
    for (asked, client) in &mut open {
        // The sign of life that a request hears every second.
        tokio::try_join!(coordinator.live(asked), client.hear_life())?;
    }
    let while_open = gateway.resident_mb();
    for (mut asked, mut client) in open {
        tokio::try_join!(coordinator.finish(&mut asked), client.rest())?;
    }
    let memory = |(before_mb, open_mb)| Memory { n_streams, before_mb, open_mb };
    Ok(before.zip(while_open).map(memory))
}

impl Contender {
    fn new(way: Way) -> Self {
        let (requests_ms, tokens_us, bursts_us) = (Vec::new(), Vec::new(), Vec::new());
        Self { way, requests_ms, tokens_us, bursts_us }
    }

    fn report(self) -> WayReport {
        WayReport {
            way: self.way.name(),
            request_ms: Summary::of(self.requests_ms),
            token_us: Summary::of(self.tokens_us),
            burst_token_us: Summary::of(self.bursts_us),
        }
    }
}

/// The medians of a figure over the bus and over HTTP.
fn medians(ways: &[WayReport], of: impl Fn(&WayReport) -> Option<Summary>) -> Option<(f64, f64)> {
    let find = |name: &str| ways.iter().find(|way| way.way == name).and_then(&of);
    Some((find("bus")?.median, find("http")?.median))
}

fn request_claim(ways: &[WayReport]) -> Claim {
    match medians(ways, |way| way.request_ms) {
        None => REQUEST.missing("no answer was timed"),
        Some((bus, http)) => REQUEST
            .measured(http - bus, format!("{http:.3} ms over HTTP, {bus:.3} ms over the bus")),
    }
}

fn token_claim(ways: &[WayReport], cpu_us: Option<f64>, pace_ms: u16) -> Claim {
    let Some((bus, http)) = medians(ways, |way| way.token_us) else {
        return TOKEN.missing("no token was timed");
    };
    let burst = medians(ways, |way| way.burst_token_us).map(|(bus, http)| http - bus);
    let how = format!(
        "one token every {pace_ms} ms: {http:.0} us over HTTP, {bus:.0} us over the bus; tokens as \
         fast as they can be sent: {} us more a token, {} us of the gateway's processor time",
        number(burst, 1),
        number(cpu_us, 1)
    );
    TOKEN.measured(http - bus, how)
}

fn streams_claim(memory: Option<&Memory>) -> Claim {
    match memory {
        None => STREAMS.missing("the system does not tell the memory of a process"),
        Some(memory) if memory.n_streams != CLAIMED_STREAMS => {
            STREAMS.missing("needs --streams 200")
        }
        Some(Memory { before_mb, open_mb, .. }) => {
            let how = format!("{open_mb:.1} MB with them, {before_mb:.1} MB before");
            STREAMS.measured(open_mb - before_mb, how)
        }
    }
}

impl GatewayReport {
    /// The table for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |way: &WayReport| {
            let at = |of: Option<Summary>, at: fn(&Summary) -> f64, digits| {
                number(of.as_ref().map(at), digits)
            };
            vec![
                way.way.to_owned(),
                at(way.request_ms, |ms| ms.median, 3),
                at(way.request_ms, |ms| ms.p99, 3),
                at(way.token_us, |us| us.median, 0),
                at(way.token_us, |us| us.p99, 0),
                at(way.burst_token_us, |us| us.median, 1),
            ]
        };
        let header = ["way", "request ms", "p99", "token us", "p99", "unpaced us"];
        let rows: Vec<_> = self.ways.iter().map(row).collect();
        table(&header, &rows) + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(name: &'static str, request_ms: f64, token_us: f64) -> WayReport {
        let (request_ms, token_us) = (Summary::of([request_ms]), Summary::of([token_us]));
        WayReport { way: name, request_ms, token_us, burst_token_us: token_us }
    }

    #[test]
    fn what_http_adds_to_the_bus_counts() {
        let ways = [way("bus", 0.25, 100.0), way("http", 1.0, 125.0)];
        assert_eq!(request_claim(&ways).value, Some(0.75));
        assert_eq!(token_claim(&ways, None, 2).value, Some(25.0));
        assert_eq!(request_claim(&ways[..1]).holds, None);
        let memory = |n_streams| Memory { n_streams, before_mb: 20.0, open_mb: 80.0 };
        assert_eq!(streams_claim(Some(&memory(200))).holds, Some(false));
        assert_eq!(streams_claim(Some(&memory(10))).holds, None);
        assert_eq!(streams_claim(None).holds, None);
    }
}
