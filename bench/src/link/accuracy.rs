//! The scenario `link`: what the link emulator does, against what it is asked to do.
//!
//! Both ends of a connection through a link are in this process, so one clock measures a single
//! way: a byte is written at one end, and read at the other.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;

use super::{Conditions, Link, LinkPlan, mbit_s, named};
use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::harness::stats::Summary;
use crate::harness::table::{ms, number, table};

const DELAY_ERROR: Target = Target {
    name: "link_delay_error_ms",
    target: 0.5,
    bound: Bound::AtMost,
    what: "median of what the link emulator adds to the delay it is asked for, one way; the worst delay",
};
const RATE_ERROR: Target = Target {
    name: "link_rate_error",
    target: 0.02,
    bound: Bound::AtMost,
    what: "share by which the link emulator misses the rate it is asked for; the worst rate and direction",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[DELAY_ERROR, RATE_ERROR];

/// How long bytes flow to measure a rate.
const FLOW: Duration = Duration::from_secs(2);

/// Arguments of `stagebus bench link`.
#[derive(Debug, Clone, clap::Args)]
pub struct LinkArgs {
    /// Delays one way, in milliseconds
    #[arg(long, value_name = "MS,MS", value_delimiter = ',', default_value = "1,10,50,100")]
    delay: Vec<u32>,

    /// Rates, in Mbit/s
    #[arg(long, value_name = "MBIT,MBIT", value_delimiter = ',', default_value = "20,100")]
    rate: Vec<u32>,

    /// Bytes sent one after the other for each delay and direction
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u16).range(1..))]
    pings: u16,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// Times of single bytes, one way.
#[derive(Debug, Serialize)]
pub struct Way {
    /// What was asked for.
    pub asked: Conditions,
    /// From the client to the server, or back.
    pub up: bool,
    /// Milliseconds from writing to reading.
    pub ms: Summary,
    /// What stands above the delay that was asked for, in milliseconds.
    pub excess_ms: Summary,
    /// Bytes that were lost once or more.
    pub n_lost: u64,
}

/// Bytes that flow for a while.
#[derive(Debug, Serialize)]
pub struct Flow {
    /// The rate that was asked for.
    pub asked_mbit_s: f64,
    /// From the client to the server, or back.
    pub up: bool,
    /// The rate between the first piece that arrived and the last.
    pub mbit_s: f64,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct LinkReport {
    scenario: &'static str,
    machine: Machine,
    delays: Vec<Way>,
    uneven: Vec<Way>,
    rates: Vec<Flow>,
    claims: Vec<Claim>,
}

/// Both ends of a connection through a link.
struct Ends {
    client: TcpStream,
    server: TcpStream,
    link: Link,
}

impl Ends {
    fn connect(conditions: Conditions) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port is free")?;
        let link = Link::start(listener.local_addr()?, LinkPlan::both(conditions))?;
        let client = TcpStream::connect(link.address())?;
        let (server, _) = listener.accept()?;
        for end in [&client, &server] {
            end.set_nodelay(true)?;
        }
        Ok(Self { client, server, link })
    }

    fn direction(&mut self, up: bool) -> (&mut TcpStream, &mut TcpStream) {
        match up {
            true => (&mut self.client, &mut self.server),
            false => (&mut self.server, &mut self.client),
        }
    }

    /// Sends single bytes, each when the one before it has arrived.
    fn pings(&mut self, asked: Conditions, up: bool, n: u16) -> anyhow::Result<Way> {
        let (from, to) = self.direction(up);
        let mut times = Vec::with_capacity(n.into());
        for _ in 0..n {
            let sent = Instant::now();
            from.write_all(&[1])?;
            to.read_exact(&mut [0])?;
            times.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        let traffic = self.link.traffic();
        let n_lost = if up { traffic.up.n_lost } else { traffic.down.n_lost };
        let asked_ms = asked.delay.as_secs_f64() * 1e3;
        let summary = Summary::of(times.iter().copied()).context("no byte was sent")?;
        let excess = Summary::of(times.iter().map(|ms| ms - asked_ms));
        Ok(Way { asked, up, ms: summary, excess_ms: excess.context("as above")?, n_lost })
    }

    /// Lets bytes flow; returns the Mbit/s between the first piece that arrived and the last.
    fn flow(&mut self, up: bool, n_bytes: usize) -> anyhow::Result<f64> {
        let (from, to) = self.direction(up);
        let mut from = from.try_clone()?;
        let sender = named("bench-flow").spawn(move || from.write_all(&vec![7; n_bytes]))?;
        let mut buffer = vec![0; 64 * 1024];
        let (mut n_read, mut first, mut last) = (0, None, Instant::now());
        while n_read < n_bytes {
            let n = to.read(&mut buffer)?;
            anyhow::ensure!(n > 0, "the link closed after {n_read} bytes");
            n_read += n;
            last = Instant::now();
            first = first.or(Some((last, n)));
        }
        let (began, n_first) = first.context("nothing flowed")?;
        sender.join().ok().context("the sender panicked")??;
        Ok((n_bytes - n_first) as f64 * 8.0 / 1e6 / (last - began).as_secs_f64())
    }
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// A system without ports or threads.
pub fn run(args: &LinkArgs, quiet: bool) -> anyhow::Result<()> {
    let mut machine = Machine::look();
    let mut delays = Vec::new();
    for &delay in &args.delay {
        output::note(quiet, &format!("a delay of {delay} ms"));
        delays.extend(ways(Conditions::delay(millis(delay)), args.pings)?);
    }
    output::note(quiet, "jitter and loss");
    let jitter = Conditions { jitter: millis(10), ..Conditions::delay(millis(10)) };
    let loss = Conditions { loss: 0.05, retransmit: millis(30), ..Conditions::delay(millis(5)) };
    let mut uneven = ways(jitter, args.pings)?;
    uneven.extend(ways(loss, args.pings)?);
    let mut rates = Vec::new();
    for &rate in &args.rate {
        output::note(quiet, &format!("a rate of {rate} Mbit/s"));
        let bytes_per_s = mbit_s(rate.into());
        let n_bytes = (bytes_per_s as f64 * FLOW.as_secs_f64()) as usize;
        for up in [true, false] {
            let mut ends = Ends::connect(Conditions::queued(millis(10), bytes_per_s))?;
            let mbit_s = ends.flow(up, n_bytes)?;
            rates.push(Flow { asked_mbit_s: rate.into(), up, mbit_s });
        }
    }
    machine.finish();
    let claims = vec![delay_claim(&delays), rate_claim(&rates)];
    let report = LinkReport { scenario: "link", machine, delays, uneven, rates, claims };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, None, args.json)?)
}

fn millis(ms: u32) -> Duration {
    Duration::from_millis(ms.into())
}

fn ways(asked: Conditions, n: u16) -> anyhow::Result<Vec<Way>> {
    let mut ends = Ends::connect(asked)?;
    [true, false].into_iter().map(|up| ends.pings(asked, up, n)).collect()
}

fn delay_claim(delays: &[Way]) -> Claim {
    let worst = delays.iter().max_by(|a, b| a.excess_ms.median.total_cmp(&b.excess_ms.median));
    match worst {
        None => DELAY_ERROR.missing("give --delay"),
        Some(way) => {
            let how = format!(
                "single bytes, {} for each delay and direction; worst at {:?} {}",
                way.ms.n,
                way.asked.delay,
                direction(way.up)
            );
            DELAY_ERROR.measured(way.excess_ms.median, how)
        }
    }
}

fn rate_claim(rates: &[Flow]) -> Claim {
    let error = |flow: &Flow| (flow.mbit_s / flow.asked_mbit_s - 1.0).abs();
    match rates.iter().max_by(|a, b| error(a).total_cmp(&error(b))) {
        None => RATE_ERROR.missing("give --rate"),
        Some(flow) => {
            let (asked, found) = (flow.asked_mbit_s, flow.mbit_s);
            let how = format!(
                "{FLOW:?} of bytes; worst: {found:.2} for {asked} Mbit/s {}",
                direction(flow.up)
            );
            RATE_ERROR.measured(error(flow), how)
        }
    }
}

fn direction(up: bool) -> &'static str {
    if up { "up" } else { "down" }
}

impl LinkReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |way: &Way| {
            let asked = &way.asked;
            vec![
                format!("{:?}", asked.delay),
                format!("{:?}", asked.jitter),
                number(Some(asked.loss * 100.0), 0),
                direction(way.up).to_owned(),
                ms(Some(way.ms.min)),
                ms(Some(way.ms.median)),
                ms(Some(way.ms.p99)),
                ms(Some(way.excess_ms.median)),
                ms(Some(way.excess_ms.p99)),
                way.n_lost.to_string(),
            ]
        };
        let header = [
            "delay", "jitter", "loss %", "way", "ms min", "median", "p99", "beyond", "p99", "lost",
        ];
        let rows: Vec<_> = self.delays.iter().chain(&self.uneven).map(row).collect();
        let flow = |flow: &Flow| {
            vec![
                number(Some(flow.asked_mbit_s), 1),
                direction(flow.up).to_owned(),
                number(Some(flow.mbit_s), 3),
            ]
        };
        let flows: Vec<_> = self.rates.iter().map(flow).collect();
        format!(
            "one way through a link\n{}\nrates\n{}\n",
            table(&header, &rows),
            table(&["asked Mbit/s", "way", "measured"], &flows)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_delay_and_rate_count() {
        let way = |excess| {
            let one = Summary::of([excess]).expect("a sample");
            Way { asked: Conditions::CLEAR, up: true, ms: one, excess_ms: one, n_lost: 0 }
        };
        assert_eq!(delay_claim(&[way(0.25), way(0.75), way(0.5)]).value, Some(0.75));
        let flow = |mbit_s| Flow { asked_mbit_s: 20.0, up: false, mbit_s };
        let claim = rate_claim(&[flow(20.1), flow(19.0)]);
        assert_eq!(claim.holds, Some(false));
        assert!(claim.how.contains("19.00 for 20"), "{}", claim.how);
        assert_eq!(rate_claim(&[]).holds, None);
    }

    #[test]
    fn both_directions_are_measured() {
        let found = ways(Conditions::delay(millis(2)), 3).expect("a link");
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|way| way.ms.min >= 2.0), "{found:?}");
        let mut ends = Ends::connect(Conditions::queued(millis(1), 4_000_000)).expect("a link");
        // Never more than asked for, however slow this machine is.
        assert!(ends.flow(false, 400_000).expect("bytes flow") <= 32.0 * 1.2);
    }
}
