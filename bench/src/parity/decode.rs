//! Decode time per token of the unsplit model: through our engine and through others.

use serde::Serialize;
use stagebus_engine::EngineKind;
use stagebus_shards::WeightMode;

use super::{Context, ParityArgs, SHARD_VS_GENAI};
use crate::contender::{Contender, Launch, Timed};
use crate::genai::{self, GenaiBackend, find_python, id_list};
use crate::harness::claims::Claim;
use crate::harness::stats::{Summary, median};
use crate::harness::{interleave, machine, output};
use crate::llama_cpp::{self, LlamaDecode};

/// Our contenders: weights and engine.
const OURS: [(WeightMode, EngineKind); 4] = [
    (WeightMode::Compact, EngineKind::Auto),
    (WeightMode::Compact, EngineKind::Stateful),
    (WeightMode::Exact, EngineKind::Auto),
    (WeightMode::NearLossless, EngineKind::Auto),
];

/// Name of one of our contenders.
fn our_name(weights: WeightMode, engine: EngineKind) -> String {
    match engine {
        EngineKind::Auto => format!("stage-{weights}"),
        named => format!("stage-{weights}-{named}"),
    }
}

/// Everything that was measured of decoding.
#[derive(Debug, Serialize)]
pub struct Decode {
    /// One entry per contender.
    pub contenders: Vec<Decoded>,
    /// Why contenders are missing, if any are.
    pub absent: Vec<String>,
    /// Tokens of compact weights that equal those of `openvino_genai` from the start on.
    pub compact_equals_genai: Option<usize>,
    /// Tokens of a turn.
    pub n_tokens: usize,
    /// How often every contender was started.
    pub n_starts: usize,
}

/// What one contender did.
#[derive(Debug, Serialize)]
pub struct Decoded {
    /// Its name.
    pub name: String,
    /// Versions of what it runs on.
    pub version: String,
    /// Time per token after the first, over all rounds, in milliseconds.
    pub token_ms: Option<Summary>,
    /// Median time per token of each round, in milliseconds.
    pub round_ms: Vec<f64>,
    /// Processor time per token, in milliseconds: a turn less a turn of one token. Other processes
    /// on the core do not count.
    pub cpu_ms: Option<f64>,
    /// Median time from the start to the first token, in milliseconds.
    pub first_token_ms: Option<f64>,
    /// Time to load the model, in milliseconds.
    pub load_ms: f64,
    /// Most memory, in bytes, if the platform tells.
    pub peak_rss_bytes: Option<u64>,
    /// Whether every turn gave the tokens of the first one.
    pub steady: bool,
    /// The tokens of its first turn.
    #[serde(skip)]
    tokens: Vec<u32>,
}

/// A contender with its results so far.
#[derive(Debug)]
struct Running {
    launch: Launch,
    contender: Contender,
    /// Tokens must be the same in every turn; for others than ours that is only reported.
    is_ours: bool,
    steady: bool,
    tokens: Vec<u32>,
    turns: Vec<Timed>,
    cpu_ms: Vec<f64>,
}

/// Starts all contenders, checks their tokens, and lets them decode in turn.
///
/// # Errors
/// One of ours that does not run, and tokens that differ: between the engine and `reference` (the
/// tokens of a one-stage fleet), or between two turns of one of ours.
pub(super) async fn run(
    context: &Context,
    args: &ParityArgs,
    reference: &[u32],
) -> anyhow::Result<Decode> {
    let mut absent = Vec::new();
    let mut running = Vec::new();
    for launch in ours(context)? {
        running.push(Running::start(&launch, true, context.n_tokens).await?);
    }
    check_reference(&running, reference)?;
    match find_python(args.genai_python.as_deref()) {
        None => absent.push(
            "openvino_genai: no Python has it; run `cargo xtask bench-setup` or give \
             --genai-python"
                .to_owned(),
        ),
        Some(python) => {
            for backend in GenaiBackend::ALL {
                let (model, cpu) = (&context.model, context.cpu);
                let launch = genai::launch(&python, backend, model, &context.prompt, cpu);
                match Running::start(&launch, false, context.n_tokens).await {
                    Ok(started) => running.push(started),
                    Err(error) => absent.push(format!("{}: {error:#}", backend.name())),
                }
            }
        }
    }
    output::note(context.quiet, "decoding in turn");
    let llama_bench = llama_bench(args, &mut absent);
    let mut llama = Vec::new();
    for turn in 0..context.n_starts * context.n_rounds {
        if turn > 0 && turn % context.n_rounds == 0 {
            output::note(context.quiet, "starting the decoding processes anew");
            restart(&mut running, context.n_tokens).await?;
        }
        interleave(1, &mut running, async |running, _| running.round(context.n_tokens).await)
            .await?;
        if let Some(program) = &llama_bench {
            llama.push(
                llama_cpp::decode(program, &context.model, context.n_tokens, context.cpu).await?,
            );
        }
    }
    let mut contenders: Vec<Decoded> = running.into_iter().map(Running::finish).collect();
    contenders.sort_by(|a, b| a.name.cmp(&b.name));
    contenders.extend(llama_row(&llama));
    let compact_equals_genai = agreement(&contenders);
    let (n_tokens, n_starts) = (context.n_tokens, context.n_starts);
    Ok(Decode { contenders, absent, compact_equals_genai, n_tokens, n_starts })
}

/// Starts every contender anew, in the opposite order.
async fn restart(running: &mut [Running], n_tokens: usize) -> anyhow::Result<()> {
    running.reverse();
    for contender in running {
        contender.contender = Contender::start(&contender.launch).await?;
        let timed = contender.contender.turn(n_tokens).await?;
        contender.check(&timed)?;
    }
    Ok(())
}

fn ours(context: &Context) -> anyhow::Result<Vec<Launch>> {
    OURS.into_iter()
        .map(|(weights, engine)| {
            let args = vec![
                "bench".into(),
                "engine-decode".into(),
                "--shards".into(),
                context.set(1, weights)?.into(),
                "--prompt-tokens".into(),
                id_list(&context.prompt).into(),
                "--engine".into(),
                engine.as_str().into(),
            ];
            let program = machine::this_program()?;
            Ok(Launch { name: our_name(weights, engine), program, args, cpu: context.cpu })
        })
        .collect()
}

/// The engine must give the tokens of the fleet. A fleet stops at an end token, the engine goes on.
fn check_reference(running: &[Running], reference: &[u32]) -> anyhow::Result<()> {
    let name = our_name(WeightMode::Exact, EngineKind::Auto);
    for exact in running.iter().filter(|running| running.contender.name() == name) {
        anyhow::ensure!(
            exact.tokens.starts_with(reference),
            "one stage through the engine gives other tokens than through a fleet: {:?}, {:?}",
            exact.tokens,
            reference
        );
    }
    Ok(())
}

fn llama_bench(args: &ParityArgs, absent: &mut Vec<String>) -> Option<std::path::PathBuf> {
    let found = llama_cpp::find(args.llama_bench.as_deref());
    if found.is_none() {
        absent.push(
            "llama.cpp: no llama-bench; run `cargo xtask peers` or give --llama-bench".to_owned(),
        );
    }
    found
}

fn llama_row(runs: &[LlamaDecode]) -> Option<Decoded> {
    let first = runs.first()?;
    let round_ms: Vec<f64> = runs.iter().map(|run| run.token_ms).collect();
    Some(Decoded {
        name: "llama.cpp".to_owned(),
        version: format!("llama.cpp {}", first.build),
        token_ms: Summary::of(round_ms.iter().copied()),
        round_ms,
        cpu_ms: None,
        first_token_ms: None,
        load_ms: 0.0,
        peak_rss_bytes: None,
        steady: true,
        tokens: Vec::new(),
    })
}

/// How many tokens of our compact mode equal `openvino_genai`'s, from the start on.
fn agreement(contenders: &[Decoded]) -> Option<usize> {
    let tokens = |name: &str| {
        contenders.iter().find(|contender| contender.name == name).map(|found| &found.tokens)
    };
    let ours = tokens(&our_name(WeightMode::Compact, EngineKind::Auto))?;
    let theirs = tokens(GenaiBackend::Default.name())?;
    Some(ours.iter().zip(theirs).take_while(|(a, b)| a == b).count())
}

impl Running {
    /// Starts a contender and takes a first turn, which is not timed: it gives the tokens.
    async fn start(launch: &Launch, is_ours: bool, n_tokens: usize) -> anyhow::Result<Self> {
        let mut contender = Contender::start(launch).await?;
        let tokens = contender.turn(n_tokens).await?.turn.tokens;
        let (turns, cpu_ms) = (Vec::new(), Vec::new());
        let launch = launch.clone();
        Ok(Self { launch, contender, is_ours, steady: true, tokens, turns, cpu_ms })
    }

    /// Compares the tokens of a turn with those of the first one.
    fn check(&mut self, timed: &Timed) -> anyhow::Result<()> {
        self.steady &= timed.turn.tokens == self.tokens;
        anyhow::ensure!(
            self.steady || !self.is_ours,
            "{} gives other tokens than in its first turn: {:?}, {:?}",
            self.contender.name(),
            timed.turn.tokens,
            self.tokens
        );
        Ok(())
    }

    async fn round(&mut self, n_tokens: usize) -> anyhow::Result<()> {
        let prefill = self.contender.turn(1).await?;
        let timed = self.contender.turn(n_tokens).await?;
        self.check(&timed)?;
        let cpu = timed.cpu_ms.zip(prefill.cpu_ms);
        self.cpu_ms.extend(cpu.map(|(whole, first)| (whole - first) / (n_tokens - 1) as f64));
        self.turns.push(timed);
        Ok(())
    }

    fn finish(self) -> Decoded {
        let ready = self.contender.ready();
        let turns = || self.turns.iter().map(|timed| &timed.turn);
        Decoded {
            name: self.contender.name().to_owned(),
            version: ready.version.clone(),
            token_ms: Summary::of(turns().flat_map(|turn| turn.token_ms.iter().copied())),
            round_ms: turns().filter_map(|turn| median(turn.token_ms.iter().copied())).collect(),
            cpu_ms: median(self.cpu_ms.iter().copied()),
            first_token_ms: median(turns().map(|turn| turn.first_token_ms)),
            load_ms: ready.load_ms,
            peak_rss_bytes: self.contender.peak_rss_bytes(),
            steady: self.steady,
            tokens: self.tokens.clone(),
        }
    }
}

impl Decode {
    /// The contender of this name.
    fn of(&self, name: &str) -> Option<&Decoded> {
        self.contenders.iter().find(|contender| contender.name == name)
    }

    /// `openvino_genai` over our compact mode: against the faster one of genai's two backends, the
    /// median over rounds of the ratio within a round.
    pub(super) fn claim(&self) -> Claim {
        let Some(ours) = self.of(&our_name(WeightMode::Compact, EngineKind::Auto)) else {
            return SHARD_VS_GENAI.missing("compact weights were not measured");
        };
        let ratio = |backend: GenaiBackend| {
            let theirs = self.of(backend.name())?;
            let ratios = theirs.round_ms.iter().zip(&ours.round_ms).map(|(a, b)| a / b);
            Some((median(ratios)?, theirs))
        };
        let fastest =
            GenaiBackend::ALL.into_iter().filter_map(ratio).min_by(|(a, _), (b, _)| a.total_cmp(b));
        match fastest {
            None => SHARD_VS_GENAI.missing(self.absent.join("; ")),
            Some((ratio, theirs)) => {
                let (version, name, n_rounds) =
                    (&theirs.version, &theirs.name, ours.round_ms.len());
                let by_cpu = theirs
                    .cpu_ms
                    .zip(ours.cpu_ms)
                    .map_or_else(String::new, |(a, b)| format!("; by processor time {:.3}", a / b));
                let how = format!(
                    "{version}, {name} over {}, median of {n_rounds} rounds in turn over {} starts{by_cpu}",
                    ours.name, self.n_starts
                );
                SHARD_VS_GENAI.measured(ratio, how)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(name: &str, round_ms: &[f64], tokens: &[u32]) -> Decoded {
        Decoded {
            name: name.to_owned(),
            version: "v".to_owned(),
            token_ms: Summary::of(round_ms.iter().copied()),
            round_ms: round_ms.to_vec(),
            cpu_ms: None,
            first_token_ms: None,
            load_ms: 0.0,
            peak_rss_bytes: None,
            steady: true,
            tokens: tokens.to_vec(),
        }
    }

    fn decode(contenders: Vec<Decoded>, absent: Vec<String>) -> Decode {
        let compact_equals_genai = agreement(&contenders);
        Decode { contenders, absent, compact_equals_genai, n_tokens: 3, n_starts: 1 }
    }

    #[test]
    fn the_claim_is_against_the_faster_backend_round_by_round() {
        let all = decode(
            vec![
                decoded("stage-compact", &[10.0, 20.0, 10.0], &[1, 2, 3]),
                decoded("genai", &[11.0, 22.0, 12.0], &[1, 2, 9]),
                decoded("genai-sdpa", &[10.0, 19.0, 9.0], &[1, 9, 3]),
            ],
            vec![],
        );
        let claim = all.claim();
        assert_eq!(claim.value, Some(0.95));
        assert_eq!(claim.holds, Some(false));
        assert!(claim.how.contains("genai-sdpa"), "{}", claim.how);
        assert_eq!(all.compact_equals_genai, Some(2));
    }

    #[test]
    fn without_genai_the_claim_says_what_is_missing() {
        let ours = vec![decoded("stage-compact", &[10.0], &[1])];
        let claim = decode(ours, vec!["openvino_genai: no Python has it".to_owned()]).claim();
        assert_eq!((claim.value, claim.holds), (None, None));
        assert!(claim.how.contains("no Python"));
    }
}
