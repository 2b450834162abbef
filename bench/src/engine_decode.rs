//! The hidden subcommand `engine-decode`: a one-stage shard set through the engine, without broker,
//! worker or coordinator. A [contender](crate::contender).

use std::io::BufRead as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use stagebus_engine::argmax::greedy;
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, Runtime, SessionKey, StageOutput,
    StageRequest, StepRows, open_backend,
};
use stagebus_shards::ShardSet;

use crate::contender::{Ready, Turn};
use crate::harness::output;

/// The one session.
const SESSION: SessionKey = SessionKey(1);

/// Arguments of `engine-decode`.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineDecodeArgs {
    /// A shard set with one stage
    #[arg(long, value_name = "DIR")]
    shards: PathBuf,

    /// Token ids of the prompt
    #[arg(long, value_name = "ID,ID", value_delimiter = ',', required = true)]
    prompt_tokens: Vec<u32>,

    /// Inference threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,

    /// auto, paged or stateful
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    engine: EngineKind,

    /// exact or fast
    #[arg(long, value_name = "PROFILE", default_value = "fast")]
    profile: Profile,
}

/// Loads the stage and takes turns until standard input ends.
///
/// # Errors
/// A shard set or runtime that cannot be used, an order that is no number, a step that fails.
pub async fn run(args: EngineDecodeArgs) -> anyhow::Result<()> {
    // Inference and the wait for orders block; the runtime's thread stays free for signals.
    tokio::task::spawn_blocking(move || take_turns(&args)).await.context("the engine failed")?
}

fn take_turns(args: &EngineDecodeArgs) -> anyhow::Result<()> {
    let shards = ShardSet::open(&args.shards)?;
    let n_stages = shards.manifest.n_stages();
    anyhow::ensure!(n_stages == 1, "the shard set has {n_stages} stages, expected 1");
    let library = stagebus_settings::find_openvino()?;
    let options = EngineOptions {
        profile: args.profile,
        threads: Some(args.threads),
        ..EngineOptions::default()
    };
    let started = Instant::now();
    let request = StageRequest { shards: &shards, stage: 0, library: Some(library.path()) };
    let backend = open_backend(args.engine, &request, &options)?;
    let version = format!("OpenVINO {}", Runtime::load(library.path())?.build());
    let load_ms = started.elapsed().as_secs_f64() * 1e3;
    output::print_json(&Ready { ready: true, version, load_ms, error: None })?;
    let mut decoder = Decoder { backend, prompt: &args.prompt_tokens };
    for order in std::io::stdin().lock().lines() {
        let order = order.context("cannot read the next order")?;
        let n_tokens =
            order.trim().parse().with_context(|| format!("{order:?} is no number of tokens"))?;
        output::print_json(&decoder.generate(n_tokens)?)?;
    }
    Ok(())
}

struct Decoder<'a> {
    backend: Box<dyn Backend>,
    prompt: &'a [u32],
}

impl Decoder<'_> {
    /// Generates from an empty cache, end tokens included in the count like any other.
    fn generate(&mut self, n_tokens: usize) -> anyhow::Result<Turn> {
        let prompt = self.prompt;
        self.backend.open(SESSION, prompt, prompt.len() + n_tokens)?;
        let mut turn = Turn { tokens: Vec::new(), first_token_ms: 0.0, token_ms: Vec::new() };
        let mut last = Instant::now();
        while turn.tokens.len() < n_tokens {
            let (start_pos, path, rows) = match turn.tokens.last() {
                None => (0, RowPath::Prefill, prompt),
                Some(token) => {
                    let start_pos = prompt.len() + turn.tokens.len() - 1;
                    (start_pos, RowPath::Decode, std::slice::from_ref(token))
                }
            };
            let token = self.step(start_pos, path, rows)?;
            let now = Instant::now();
            let elapsed_ms = (now - last).as_secs_f64() * 1e3;
            last = now;
            match turn.tokens.is_empty() {
                true => turn.first_token_ms = elapsed_ms,
                false => turn.token_ms.push(elapsed_ms),
            }
            turn.tokens.push(token);
        }
        self.backend.close(SESSION);
        Ok(turn)
    }

    fn step(&mut self, start_pos: usize, path: RowPath, tokens: &[u32]) -> anyhow::Result<u32> {
        let wanted = [u32::try_from(tokens.len() - 1).context("too many rows")?];
        let step =
            StepRows { session: SESSION, start_pos, path, tokens, hidden: None, wanted: &wanted };
        let mut token = Err(anyhow::anyhow!("the step was not answered"));
        self.backend.run(&[step], &mut |done| {
            token = match done.output {
                Ok(StageOutput::Logits(logits)) => greedy(logits).map_err(anyhow::Error::from),
                Ok(StageOutput::Hidden(_)) => Err(anyhow::anyhow!("the stage gave no logits")),
                Err(error) => Err(error.into()),
            };
        });
        token
    }
}

#[cfg(test)]
mod tests {
    use stagebus_engine::StageSpec;
    use stagebus_engine::testing::{TestBackend, TestModel, TestOptions};

    use super::*;

    #[test]
    fn a_turn_has_one_time_fewer_than_tokens_and_can_be_repeated() {
        let model = TestModel::default();
        let spec = StageSpec {
            layers: 0..1,
            n_layers: 1,
            hidden_dim: model.hidden_dim,
            n_kv_heads: 1,
            head_dim: 1,
            vocab_size: model.vocab_size,
            n_head_rows: model.vocab_size,
            context_length: model.context_length,
        };
        let backend = Box::new(TestBackend::new(model, spec, TestOptions::default()));
        let mut decoder = Decoder { backend, prompt: &[1, 2, 3] };
        let first = decoder.generate(5).expect("a turn");
        assert_eq!((first.tokens.len(), first.token_ms.len()), (5, 4));
        assert_eq!(decoder.generate(5).expect("a turn").tokens, first.tokens);
        assert_eq!(decoder.generate(1).expect("a turn").tokens, first.tokens[..1]);
    }
}
