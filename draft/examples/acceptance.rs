//! Measures how many drafted tokens a target accepts, and what drafting one costs.
//!
//! Greedy speculation changes no token, so the target's output of every prompt is computed once
//! and drafting is played against it: draft K tokens, accept what agrees, go on after the target's
//! own token. All prompts of a K are drafted for together; the time per drafted token is measured
//! for one session and for 16.
//!
//! The prompts are a JSON object from category to a list of user messages, as in
//! `tools/draft/eval_prompts.json`.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use stagebus_draft::drafter::{DraftRequest, Drafter, HybridDrafter, ModelDrafter, NgramDrafter};
use stagebus_draft::sampling::SamplingParams;
use stagebus_engine::argmax::greedy;
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, SessionKey, StageOutput, StageRequest,
    StepRows, open_backend,
};
use stagebus_shards::ShardSet;
use stagebus_shards::text::TextModel;

/// Measures acceptance and cost of a draft model.
#[derive(Debug, Parser)]
struct Args {
    /// One-stage shard set of the target
    #[arg(long)]
    target: PathBuf,
    /// Shard set of the draft model
    #[arg(long)]
    draft: PathBuf,
    /// Prompts by category, JSON
    #[arg(long)]
    prompts: PathBuf,
    /// Text around `{prompt}`, instead of the target's chat template; `\n` is a new line
    #[arg(long)]
    format: Option<String>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Drafted tokens per verify
    #[arg(long, value_delimiter = ',', default_value = "3,5,10")]
    k: Vec<usize>,
    /// Most prompts of a category
    #[arg(long, default_value_t = usize::MAX)]
    limit: usize,
    /// Inference threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// File that keeps the target's answers between runs
    #[arg(long)]
    answers: Option<PathBuf>,
}

/// One prompt and the target's answer.
#[derive(Debug)]
struct Trajectory {
    category: String,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

/// Sums over the verifies of a category.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    drafted: usize,
    accepted: usize,
    verifies: usize,
    tokens: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let target = ShardSet::open(&args.target)?;
    let library = stagebus_settings::find_openvino()?;
    let options = EngineOptions { threads: Some(args.threads), ..EngineOptions::default() };
    let exact = EngineOptions { profile: Profile::Exact, ..options.clone() };
    let request = StageRequest { shards: &target, stage: 0, library: Some(library.path()) };
    let trajectories = trajectories(&args, &target, || {
        open_backend(EngineKind::Paged, &request, &exact).context("the target does not load")
    })?;
    let load = || {
        let library = Some(library.path());
        ModelDrafter::load(EngineKind::Paged, &args.draft, &target, library, &options)
            .context("the draft model does not load")
    };
    println!(
        "{:<24}{}",
        "",
        args.k.iter().map(|k| format!("{:>16}", format!("K={k}"))).collect::<String>()
    );
    let mut drafters: [(&str, Box<dyn Drafter>); 3] = [
        ("model", Box::new(load()?)),
        ("n-gram", Box::new(NgramDrafter::new(1))),
        ("hybrid", Box::new(HybridDrafter::new(load()?))),
    ];
    for (name, drafter) in &mut drafters {
        println!("{name}");
        let by_k: Vec<_> = args
            .k
            .iter()
            .map(|k| play(drafter.as_mut(), &trajectories, *k))
            .collect::<anyhow::Result<_>>()?;
        report(&by_k);
    }
    for n_sessions in [1, 16] {
        let (median, least) = cost(&mut load()?, &trajectories, n_sessions)?;
        println!(
            "{n_sessions:>2} sessions: {median:.3} ms for a token of each (least {least:.3}), {:.3} ms a token",
            median / n_sessions as f64
        );
    }
    Ok(())
}

fn trajectories(
    args: &Args,
    target: &ShardSet,
    backend: impl FnOnce() -> anyhow::Result<Box<dyn Backend>>,
) -> anyhow::Result<Vec<Trajectory>> {
    let json = std::fs::read(&args.prompts).context("cannot read the prompts")?;
    let prompts: BTreeMap<String, Vec<String>> = serde_json::from_slice(&json)?;
    let text = TextModel::load(&target.dir)?;
    let mut trajectories = Vec::new();
    for (category, prompts) in prompts {
        for prompt in prompts.iter().take(args.limit) {
            let prompt = match &args.format {
                Some(format) => {
                    let format = format.replace("\\n", "\n");
                    text.encode(&format.replace("{prompt}", prompt), true)?
                }
                None => {
                    text.encode_chat(&[serde_json::json!({"role": "user", "content": prompt})])?
                }
            };
            trajectories.push(Trajectory {
                category: category.clone(),
                prompt,
                answer: Vec::new(),
            });
        }
    }
    let kept = args.answers.as_ref().and_then(|path| std::fs::read(path).ok());
    if let Some(kept) = kept {
        let answers: Vec<Vec<u32>> = serde_json::from_slice(&kept)?;
        anyhow::ensure!(answers.len() == trajectories.len(), "the answers are of other prompts");
        for (trajectory, answer) in trajectories.iter_mut().zip(answers) {
            trajectory.answer = answer;
        }
        return Ok(trajectories);
    }
    let mut backend = backend()?;
    for trajectory in &mut trajectories {
        let ends = &target.manifest.eos_ids;
        trajectory.answer = answer(backend.as_mut(), &trajectory.prompt, args.tokens, ends)?;
    }
    if let Some(path) = &args.answers {
        let answers: Vec<_> = trajectories.iter().map(|t| &t.answer).collect();
        std::fs::write(path, serde_json::to_vec(&answers)?)?;
    }
    Ok(trajectories)
}

/// The target's greedy answer, with the end token if there is one.
fn answer(
    backend: &mut dyn Backend,
    prompt: &[u32],
    n_tokens: usize,
    ends: &[u32],
) -> anyhow::Result<Vec<u32>> {
    let session = SessionKey(1);
    let mut start_pos = backend.open(session, prompt, prompt.len() + n_tokens)?;
    let mut rows = prompt[start_pos..].to_vec();
    let mut path = RowPath::Prefill;
    let mut answer = Vec::new();
    while answer.len() < n_tokens {
        let wanted = [u32::try_from(rows.len() - 1).context("the prompt is too long")?];
        let step =
            StepRows { session, start_pos, path, tokens: &rows, hidden: None, wanted: &wanted };
        let mut token = Err(anyhow::anyhow!("the step was not answered"));
        backend.run(&[step], &mut |done| {
            token = match done.output {
                Ok(StageOutput::Logits(logits)) => greedy(logits).map_err(anyhow::Error::from),
                Ok(StageOutput::Hidden(_)) => Err(anyhow::anyhow!("the target has several stages")),
                Err(error) => Err(error.into()),
            };
        });
        let token = token?;
        answer.push(token);
        if ends.contains(&token) {
            break;
        }
        start_pos += rows.len();
        rows = vec![token];
        path = RowPath::Decode;
    }
    backend.close(session);
    Ok(answer)
}

/// Drafts `k` tokens every time, for all trajectories together.
fn play(
    drafter: &mut dyn Drafter,
    trajectories: &[Trajectory],
    k: usize,
) -> anyhow::Result<BTreeMap<String, Sums>> {
    let params = SamplingParams::default();
    let mut places = vec![0_usize; trajectories.len()];
    let mut sums: BTreeMap<String, Sums> = BTreeMap::new();
    for (key, trajectory) in trajectories.iter().enumerate() {
        drafter.open(SessionKey(key as u64), &trajectory.prompt);
    }
    loop {
        let left = |key: &usize| places[*key] < trajectories[*key].answer.len();
        let keys: Vec<usize> = (0..trajectories.len()).filter(left).collect();
        if keys.is_empty() {
            break;
        }
        let request = |key: &usize| DraftRequest {
            session: SessionKey(*key as u64),
            assumed: &[],
            n: k,
            params: &params,
        };
        let requests: Vec<_> = keys.iter().map(request).collect();
        let drafts = drafter.draft(&requests)?;
        for (key, draft) in keys.into_iter().zip(drafts) {
            let trajectory = &trajectories[key];
            let rest = &trajectory.answer[places[key]..];
            let n_accepted = draft.iter().zip(rest).take_while(|(a, b)| a == b).count();
            let n_tokens = (n_accepted + 1).min(rest.len());
            let sums = sums.entry(trajectory.category.clone()).or_default();
            sums.drafted += draft.len().min(rest.len());
            sums.accepted += n_accepted;
            sums.verifies += 1;
            sums.tokens += n_tokens;
            drafter.accept(SessionKey(key as u64), &rest[..n_tokens]);
            places[key] += n_tokens;
        }
    }
    for key in 0..trajectories.len() {
        drafter.close(SessionKey(key as u64));
    }
    Ok(sums)
}

/// Share of drafted tokens that stand, and tokens per verify, by category and their mean.
fn report(by_k: &[BTreeMap<String, Sums>]) {
    let figures = |sums: &Sums| {
        let drafted = sums.drafted.max(1) as f64;
        (sums.accepted as f64 / drafted, sums.tokens as f64 / sums.verifies as f64)
    };
    let Some(first) = by_k.first() else { return };
    let cell = |(share, tokens): (f64, f64)| format!("{share:>8.2} / {tokens:.2} ");
    for category in first.keys() {
        let cells: String = by_k.iter().map(|sums| cell(figures(&sums[category]))).collect();
        println!("  {category:<22}{cells}");
    }
    let means = by_k.iter().map(|sums| {
        let n = sums.len() as f64;
        let (share, tokens) = sums
            .values()
            .map(figures)
            .fold((0.0, 0.0), |sum, figure| (sum.0 + figure.0, sum.1 + figure.1));
        cell((share / n, tokens / n))
    });
    println!("  {:<22}{}", "mean", means.collect::<String>());
}

/// Median and least time of drafting one token for each of some sessions, in milliseconds.
fn cost(
    drafter: &mut ModelDrafter,
    trajectories: &[Trajectory],
    n_sessions: usize,
) -> anyhow::Result<(f64, f64)> {
    const K: usize = 5;
    let params = SamplingParams::default();
    let keys: Vec<usize> = (0..n_sessions.min(trajectories.len())).collect();
    for &key in &keys {
        drafter.open(SessionKey(key as u64), &trajectories[key].prompt);
        drafter.accept(SessionKey(key as u64), &trajectories[key].answer);
    }
    let request = |key: &usize| DraftRequest {
        session: SessionKey(*key as u64),
        assumed: &[],
        n: K,
        params: &params,
    };
    let requests: Vec<_> = keys.iter().map(request).collect();
    drafter.draft(&requests)?;
    let mut times = Vec::new();
    for _ in 0..40 {
        for key in &keys {
            drafter.accept(SessionKey(*key as u64), &[0]);
        }
        let started = Instant::now();
        drafter.draft(&requests)?;
        times.push(started.elapsed().as_secs_f64() * 1e3 / K as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[0]))
}
