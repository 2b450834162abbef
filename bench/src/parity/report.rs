//! What the scenario prints.

use serde::{Serialize, Serializer};

use super::decode::{Decode, Decoded};
use super::hops::Hops;
use super::memory::Memory;
use super::sharding::{BigSharded, Sharded};
use super::startup::Startup;
use super::{Context, ParityArgs};
use crate::harness::claims::Claim;
use crate::harness::machine::Machine;
use crate::harness::table::{ms, table};

/// How the scenario was run.
#[derive(Debug, Serialize)]
pub struct SetUp {
    /// File name of the model.
    pub model: String,
    /// Version of Stagebus.
    pub stagebus: &'static str,
    /// The core that everything was tied to; absent if processes were not tied.
    pub cpu: Option<usize>,
    /// Starts of the decoding processes.
    pub starts: u16,
    /// Rounds, for decoding of every start.
    pub rounds: u16,
    /// Tokens of a turn.
    pub tokens: u16,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Whether this program was built without optimisation of its own code.
    pub debug_build: bool,
}

impl SetUp {
    pub(super) fn new(context: &Context, args: &ParityArgs) -> Self {
        Self {
            model: context.model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            stagebus: env!("CARGO_PKG_VERSION"),
            cpu: context.cpu,
            starts: args.starts,
            rounds: args.rounds,
            tokens: args.tokens,
            prompt_tokens: context.prompt.len(),
            debug_build: cfg!(debug_assertions),
        }
    }
}

/// Everything that was measured.
#[derive(Debug)]
pub struct ParityReport {
    /// The machine.
    pub machine: Machine,
    /// How it was run.
    pub set_up: SetUp,
    /// Decoding of the unsplit model.
    pub decode: Decode,
    /// What reading the weights once takes.
    pub memory: Vec<Memory>,
    /// Steps of fleets.
    pub hops: Vec<Hops>,
    /// Starts.
    pub startup: Option<Startup>,
    /// Shard sets of the model.
    pub sharding: Vec<Sharded>,
    /// Shard sets of generated models.
    pub big: Option<Vec<BigSharded>>,
    /// The claims.
    pub claims: Vec<Claim>,
}

impl Serialize for ParityReport {
    /// The claims come last, where people look first.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap as _;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("scenario", "parity")?;
        map.serialize_entry("machine", &self.machine)?;
        map.serialize_entry("set_up", &self.set_up)?;
        map.serialize_entry("decode", &self.decode)?;
        map.serialize_entry("memory", &self.memory)?;
        map.serialize_entry("hops", &self.hops)?;
        map.serialize_entry("startup", &self.startup)?;
        map.serialize_entry("sharding", &self.sharding)?;
        map.serialize_entry("big_sharding", &self.big)?;
        map.serialize_entry("claims", &self.claims)?;
        map.end()
    }
}

impl ParityReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = self.head();
        text.push_str(&decode_table(&self.decode));
        for Memory { weights, weight_bytes, read_gb_s, token_ms } in &self.memory {
            text.push_str(&format!(
                "{weights} weights: {:.1} MB, read once at {read_gb_s:.1} GB/s in {token_ms:.2} ms\n",
                *weight_bytes as f64 / 1e6
            ));
        }
        text.push_str("\nsteps of a fleet, ms (a hop is one message; a step has stages + 1)\n");
        text.push_str(&hop_table(&self.hops));
        text.push_str("\nwhere the time of a token goes, ms\n");
        text.push_str(&part_table(&self.hops));
        text.push('\n');
        if let Some(Startup { ready_s, first_token_s }) = &self.startup {
            let list = |seconds: &[f64]| {
                seconds.iter().map(|s| format!("{s:.2}")).collect::<Vec<_>>().join(" ")
            };
            text.push_str(&format!(
                "stagebus up: ready after {} s, first token after {} s\n\n",
                list(ready_s),
                list(first_token_s)
            ));
        }
        text.push_str(&shard_table(&self.sharding, self.big.as_deref().unwrap_or_default()));
        text
    }

    fn head(&self) -> String {
        let Machine { processor, n_cpus, load_at_start, load_at_end, os, arch } = &self.machine;
        let load = |load: &Option<f64>| load.map_or_else(|| "?".to_owned(), |x| format!("{x:.1}"));
        let tied = match self.set_up.cpu {
            Some(cpu) => format!("everything tied to core {cpu}"),
            None => "not tied to a core: this platform has no taskset".to_owned(),
        };
        let build = if self.set_up.debug_build { ", DEVELOPMENT BUILD" } else { "" };
        format!(
            "{} on {} ({n_cpus} cores, {os} {arch}), load {} to {}{build}\n{tied}, one inference \
             thread, fast profile, {} prompt tokens, {} rounds of {} tokens in turn, \
             decoding over {} starts\n\n",
            self.set_up.model,
            processor.as_deref().unwrap_or("an unnamed processor"),
            load(load_at_start),
            load(load_at_end),
            self.set_up.prompt_tokens,
            self.set_up.rounds,
            self.set_up.tokens,
            self.set_up.starts,
        )
    }
}

fn decode_table(decode: &Decode) -> String {
    let row = |decoded: &Decoded| {
        let Decoded { name, version, token_ms, cpu_ms, first_token_ms, peak_rss_bytes, .. } =
            decoded;
        let median = token_ms.map(|summary| summary.median);
        vec![
            name.clone(),
            ms(median),
            ms(token_ms.map(|summary| summary.min)),
            ms(token_ms.map(|summary| summary.p90)),
            ms(*cpu_ms),
            median.map_or_else(|| "-".to_owned(), |ms| format!("{:.1}", 1e3 / ms)),
            ms(*first_token_ms),
            peak_rss_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}", bytes / 1_000_000)),
            version.clone(),
        ]
    };
    let header =
        ["decode", "median", "min", "p90", "cpu", "tok/s", "first token", "peak MB", "version"];
    let rows: Vec<_> = decode.contenders.iter().map(row).collect();
    let mut text = format!("one stage, ms a token\n{}", table(&header, &rows));
    if let Some(n_equal) = decode.compact_equals_genai {
        let n_tokens = decode.n_tokens;
        text.push_str(&format!(
            "compact weights and openvino_genai: the first {n_equal} of {n_tokens} tokens are equal\n"
        ));
    }
    for unsteady in decode.contenders.iter().filter(|contender| !contender.steady) {
        let name = &unsteady.name;
        text.push_str(&format!("{name} does not give the same tokens in every turn\n"));
    }
    for absent in &decode.absent {
        text.push_str(&format!("absent: {absent}\n"));
    }
    text
}

fn hop_table(all: &[Hops]) -> String {
    let list = |values: &[f64]| {
        values.iter().map(|value| format!("{value:.2}")).collect::<Vec<_>>().join(" ")
    };
    let row = |hops: &Hops| {
        vec![
            hops.placement.describe().to_owned(),
            hops.n_stages.to_string(),
            ms(hops.period_ms.map(|summary| summary.median)),
            list(&hops.infer_ms),
            ms(hops.overhead_ms.map(|summary| summary.median)),
            ms(hops.overhead_ms.map(|summary| summary.p99)),
            ms(hops.hop_ms.map(|summary| summary.median)),
            list(&hops.worker_ms),
            ms(hops.coordinator_ms),
            ms(hops.unobserved_overhead_ms),
            hops.tok_s.map_or_else(|| "-".to_owned(), |tok_s| format!("{tok_s:.1}")),
        ]
    };
    let header = [
        "placement",
        "stages",
        "step",
        "inference",
        "overhead",
        "p99",
        "a hop",
        "workers",
        "coordinator",
        "mean, unobserved",
        "tok/s",
    ];
    table(&header, &all.iter().map(row).collect::<Vec<_>>())
}

fn part_table(all: &[Hops]) -> String {
    let names: Vec<&str> =
        all.first().map_or_else(Vec::new, |hops| hops.parts.iter().map(|part| part.name).collect());
    let header: Vec<&str> = ["placement", "stages"].into_iter().chain(names).collect();
    let row = |hops: &Hops| {
        let parts = hops.parts.iter().map(|part| format!("{:.3}", part.ms));
        [hops.placement.describe().to_owned(), hops.n_stages.to_string()]
            .into_iter()
            .chain(parts)
            .collect()
    };
    table(&header, &all.iter().map(row).collect::<Vec<_>>())
}

fn shard_table(all: &[Sharded], big: &[BigSharded]) -> String {
    let megabytes = |bytes: u64| format!("{}", bytes / 1_000_000);
    let peak = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), megabytes);
    let row = |source: String,
               n_stages: usize,
               weights: String,
               sharding: &crate::shard_once::Sharding| {
        vec![
            source,
            n_stages.to_string(),
            weights,
            format!("{:.2}", sharding.seconds),
            peak(sharding.peak_rss_bytes),
            megabytes(sharding.weight_bytes),
        ]
    };
    let of_model = all.iter().map(|sharded| {
        row("model".to_owned(), sharded.n_stages, sharded.weights.to_string(), &sharded.sharding)
    });
    let of_big = big.iter().map(|big| {
        let source = format!("generated, {} MB", megabytes(big.file_bytes));
        row(source, 2, "exact".to_owned(), &big.sharding)
    });
    let rows: Vec<_> = of_model.chain(of_big).collect();
    table(&["sharding", "stages", "weights", "s", "peak MB", "weights MB"], &rows)
}
