//! The scenario `wire`: what number formats of the hidden states cost in quality, and spare in bytes.
//!
//! Two stages run in this process, and what goes from the first to the second goes through the
//! wire's format and back, exactly as between two workers. Nothing is generated freely: every format
//! reads the same tokens, so that one other token is counted once and does not change all that
//! follow.
//!
//! - **Perplexity** on a fixed text, read as a prompt is.
//! - **Agreement** with `f32` on answers: the share of positions at which the same token is the
//!   likeliest.
//! - **Time** to write a row and to read it back.
//!
//! Both profiles read everything: in the fast one the device may round a stage's input itself.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use serde::{Serialize, Serializer};
use stagebus_engine::argmax::greedy;
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, SessionKey, StageOutput, StageRequest,
    StepRows, open_backend,
};
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_shards::{ShardSet, WeightMode};

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::harness::table::{markdown, number};
use crate::measured_model::{self, ShardSets};
use crate::prompts;

/// Stages of the pipeline.
const N_STAGES: usize = 2;

/// The text whose perplexity is taken.
const TEXT: &str = include_str!("../prompts/fixed_text.txt");

/// Rows of a step of the text: their logits stay in memory together.
const CHUNK_ROWS: usize = 64;

/// Rows that are written and read for the time of one.
const TIMED_ROWS: usize = 2000;

/// The one session.
const SESSION: SessionKey = SessionKey(1);

const F16_AGREEMENT: Target = Target {
    name: "wire_f16_agreement",
    target: 0.999,
    bound: Bound::AtLeast,
    what: "share of positions of answers with the same likeliest token as with f32, for f16",
};
const F16_PERPLEXITY: Target = Target {
    name: "wire_f16_perplexity_change",
    target: 0.001,
    bound: Bound::AtMost,
    what: "relative change of the perplexity of a fixed text, either way, for f16",
};
const INT8_AGREEMENT: Target = Target {
    name: "wire_int8_agreement",
    target: 0.97,
    bound: Bound::AtLeast,
    what: "share of positions of answers with the same likeliest token as with f32, for int8",
};
const INT8_PERPLEXITY: Target = Target {
    name: "wire_int8_perplexity_change",
    target: 0.01,
    bound: Bound::AtMost,
    what: "relative change of the perplexity of a fixed text, either way, for int8",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[F16_AGREEMENT, F16_PERPLEXITY, INT8_AGREEMENT, INT8_PERPLEXITY];

/// Arguments of `stagebus bench wire`.
#[derive(Debug, Clone, clap::Args)]
pub struct WireArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Answers that are compared
    #[arg(long, value_name = "N", default_value_t = 40)]
    answers: usize,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(2..))]
    tokens: u16,

    /// A first look: few answers
    #[arg(long)]
    quick: bool,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// How rows travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// As one of the wire's formats.
    Wire(Dtype),
    /// 8 bits with one scale for a whole row and nothing kept apart, for comparison: no worker
    /// sends that.
    OneScale,
}

/// What a format costs and spares.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Quality {
    #[serde(serialize_with = "as_text")]
    profile: Profile,
    format: &'static str,
    /// Bytes of a row of the model.
    row_bytes: usize,
    /// To write a row and to read it back, in microseconds.
    row_us: f64,
    /// Of the fixed text.
    perplexity: f64,
    /// Share of positions with the same likeliest token as with `f32`.
    agreement: f64,
}

fn as_text<S: Serializer>(profile: &Profile, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(profile)
}

#[derive(Debug, Serialize)]
struct Report {
    scenario: &'static str,
    machine: Machine,
    stagebus: &'static str,
    text_tokens: usize,
    answers: usize,
    positions: usize,
    formats: Vec<Quality>,
    claims: Vec<Claim>,
}

/// The first one is that of the claims.
const PROFILES: [Profile; 2] = [Profile::Fast, Profile::Exact];

const FORMATS: [Format; 5] = [
    Format::Wire(Dtype::F32),
    Format::Wire(Dtype::F16),
    Format::Wire(Dtype::Bf16),
    Format::Wire(Dtype::Int8),
    Format::OneScale,
];

impl Format {
    const fn name(self) -> &'static str {
        match self {
            Self::Wire(Dtype::F32) => "f32",
            Self::Wire(Dtype::F16) => "f16",
            Self::Wire(Dtype::Bf16) => "bf16",
            Self::Wire(Dtype::Int8) => "int8",
            Self::OneScale => "8 bits, one scale",
        }
    }

    const fn row_bytes(self, hidden_dim: usize) -> usize {
        match self {
            Self::Wire(dtype) => dtype.row_bytes(hidden_dim),
            Self::OneScale => hidden_dim + 4,
        }
    }

    /// Rows as they arrive.
    fn carry(self, hidden: &[f32], hidden_dim: usize) -> anyhow::Result<Vec<f32>> {
        match self {
            Self::Wire(dtype) => {
                let n_rows = hidden.len() / hidden_dim;
                let tensor = Tensor {
                    dtype,
                    n_rows: u32::try_from(n_rows)?,
                    hidden_dim: u32::try_from(hidden_dim)?,
                    data: dtype.encode(hidden, hidden_dim).into(),
                };
                Ok(tensor.rows(0, n_rows))
            }
            Self::OneScale => Ok(hidden.chunks(hidden_dim).flat_map(one_scale).collect()),
        }
    }
}

fn one_scale(row: &[f32]) -> Vec<f32> {
    let step = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs())) / 127.0;
    row.iter().map(|x| if step > 0.0 { (x / step).round() * step } else { 0.0 }).collect()
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Anything that does not run.
pub async fn run(args: WireArgs, quiet: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let kind = (N_STAGES, WeightMode::Exact);
    let sets = ShardSets::make(&model, folder.path(), [kind]).await?;
    let set = sets.get(N_STAGES, WeightMode::Exact)?.to_owned();
    let json = args.json;
    let measured = tokio::task::spawn_blocking(move || measure(&args, &set, machine, quiet));
    let report = measured.await.context("the engine failed")??;
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &describe(&report), &claims, Some(&model), json)?)
}

/// What all formats read.
struct Texts {
    fixed: Vec<u32>,
    prompts: Vec<Vec<u32>>,
}

/// Prompts with their answers in `f32`.
type Answers = [(Vec<u32>, Vec<u32>)];

fn measure(
    args: &WireArgs,
    set: &Path,
    mut machine: Machine,
    quiet: bool,
) -> anyhow::Result<Report> {
    let shards = ShardSet::open(set)?;
    let text = prompts::text_model(set)?;
    let n_answers = if args.quick { args.answers.min(4) } else { args.answers };
    let prompts = prompts::encoded(&text)?.into_iter().take(n_answers);
    let prompts = prompts.map(|prompt| prompt.tokens).collect();
    let texts = Texts { fixed: text.encode(TEXT, true)?, prompts };
    let mut formats = Vec::new();
    for profile in PROFILES {
        let mut pipeline = Pipeline::load(&shards, profile)?;
        let mut answers = Vec::new();
        for prompt in &texts.prompts {
            let n = answers.len() + 1;
            output::note(quiet, &format!("{profile}: answer {n} of {}", texts.prompts.len()));
            answers.push((prompt.clone(), pipeline.answer(prompt, usize::from(args.tokens))?));
        }
        for format in FORMATS {
            output::note(quiet, &format!("{profile}: reading everything as {}", format.name()));
            formats.push(pipeline.quality(format, &texts.fixed, &answers)?);
        }
    }
    machine.finish();
    Ok(Report {
        scenario: "wire",
        machine,
        stagebus: env!("CARGO_PKG_VERSION"),
        text_tokens: texts.fixed.len(),
        answers: texts.prompts.len(),
        positions: texts.prompts.len() * usize::from(args.tokens),
        claims: claims_of(&formats),
        formats,
    })
}

/// The two stages, in this process.
struct Pipeline {
    first: Box<dyn Backend>,
    last: Box<dyn Backend>,
    hidden_dim: usize,
    profile: Profile,
}

impl Pipeline {
    fn load(shards: &ShardSet, profile: Profile) -> anyhow::Result<Self> {
        let library = stagebus_settings::find_openvino()?;
        let load = |stage: usize| {
            let request = StageRequest { shards, stage, library: Some(library.path()) };
            let options = EngineOptions { profile, ..EngineOptions::default() };
            open_backend(EngineKind::Auto, &request, &options)
        };
        let (first, last) = (load(0)?, load(1)?);
        Ok(Self { first, last, hidden_dim: shards.manifest.dims.hidden_dim, profile })
    }

    fn open(&mut self, prompt: &[u32], len: usize) -> anyhow::Result<()> {
        for backend in [&mut self.first, &mut self.last] {
            backend.open(SESSION, prompt, len)?;
        }
        Ok(())
    }

    fn close(&mut self) {
        self.first.close(SESSION);
        self.last.close(SESSION);
    }

    /// Runs rows through both stages; `take` gets the logits of each row from `first_wanted` on.
    fn step(
        &mut self,
        format: Format,
        (start_pos, path, tokens): (usize, RowPath, &[u32]),
        first_wanted: usize,
        mut take: impl FnMut(usize, &[f32]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let rows =
            StepRows { session: SESSION, start_pos, path, tokens, hidden: None, wanted: &[] };
        let mut passed = None;
        self.first.run(&[rows], &mut |done| {
            passed = Some(match done.output {
                Ok(StageOutput::Hidden(hidden)) => format.carry(hidden, self.hidden_dim),
                Ok(StageOutput::Logits(_)) => Err(anyhow::anyhow!("the first stage gave logits")),
                Err(error) => Err(error.into()),
            });
        });
        let hidden = passed.context("the first stage did not answer")??;
        let wanted: Vec<u32> =
            (first_wanted..tokens.len()).map(u32::try_from).collect::<Result<_, _>>()?;
        let rows = StepRows { hidden: Some(&hidden), wanted: &wanted, ..rows };
        let mut taken = Err(anyhow::anyhow!("the last stage did not answer"));
        self.last.run(&[rows], &mut |done| {
            taken = match done.output {
                Ok(StageOutput::Logits(logits)) => {
                    let width = logits.len() / wanted.len().max(1);
                    let mut rows = logits.chunks_exact(width.max(1)).enumerate();
                    rows.try_for_each(|(row, logits)| take(first_wanted + row, logits))
                }
                Ok(StageOutput::Hidden(_)) => Err(anyhow::anyhow!("the last stage gave no logits")),
                Err(error) => Err(error.into()),
            };
        });
        taken
    }

    /// The likeliest tokens after a prompt, in `f32`.
    fn answer(&mut self, prompt: &[u32], n_tokens: usize) -> anyhow::Result<Vec<u32>> {
        self.open(prompt, prompt.len() + n_tokens)?;
        let mut answer: Vec<u32> = Vec::with_capacity(n_tokens);
        while answer.len() < n_tokens {
            let last = answer.last().copied();
            let rows = match &last {
                None => (0, RowPath::Prefill, prompt),
                Some(token) => {
                    let pos = prompt.len() + answer.len() - 1;
                    (pos, RowPath::Decode, std::slice::from_ref(token))
                }
            };
            let last_row = rows.2.len() - 1;
            self.step(Format::Wire(Dtype::F32), rows, last_row, |_, logits| {
                answer.push(greedy(logits)?);
                Ok(())
            })?;
        }
        self.close();
        Ok(answer)
    }

    fn quality(
        &mut self,
        format: Format,
        fixed: &[u32],
        answers: &Answers,
    ) -> anyhow::Result<Quality> {
        let (mut n_same, mut n) = (0, 0);
        for (prompt, answer) in answers {
            n += answer.len();
            n_same += self.same(format, prompt, answer)?;
        }
        Ok(Quality {
            profile: self.profile,
            format: format.name(),
            row_bytes: format.row_bytes(self.hidden_dim),
            row_us: row_us(format, self.hidden_dim)?,
            perplexity: self.perplexity(format, fixed)?,
            agreement: n_same as f64 / n as f64,
        })
    }

    /// Positions of an answer at which its token is the likeliest after all before it.
    fn same(&mut self, format: Format, prompt: &[u32], answer: &[u32]) -> anyhow::Result<usize> {
        self.open(prompt, prompt.len() + answer.len())?;
        let mut likeliest = Vec::with_capacity(answer.len());
        let mut take = |_, logits: &[f32]| {
            likeliest.push(greedy(logits)?);
            Ok(())
        };
        self.step(format, (0, RowPath::Prefill, prompt), prompt.len() - 1, &mut take)?;
        let rows = &answer[..answer.len() - 1];
        self.step(format, (prompt.len(), RowPath::Decode, rows), 0, &mut take)?;
        self.close();
        Ok(likeliest.iter().zip(answer).filter(|(a, b)| a == b).count())
    }

    /// Of a text after its first token, read in chunks.
    fn perplexity(&mut self, format: Format, text: &[u32]) -> anyhow::Result<f64> {
        self.open(text, text.len())?;
        let mut surprise = 0.0;
        let read = &text[..text.len() - 1];
        for (index, chunk) in read.chunks(CHUNK_ROWS).enumerate() {
            let start_pos = index * CHUNK_ROWS;
            self.step(format, (start_pos, RowPath::Prefill, chunk), 0, |row, logits| {
                surprise -= log_probability(logits, text[start_pos + row + 1] as usize)?;
                Ok(())
            })?;
        }
        self.close();
        Ok((surprise / read.len() as f64).exp())
    }
}

/// Natural logarithm of the probability of a token.
fn log_probability(logits: &[f32], token: usize) -> anyhow::Result<f64> {
    let chosen = logits.get(token).context("a token that the model does not have")?;
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    Ok(f64::from(chosen - largest) - sum.ln())
}

/// Time to write and read a row, in microseconds.
fn row_us(format: Format, hidden_dim: usize) -> anyhow::Result<f64> {
    let row: Vec<f32> = (0..hidden_dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let started = Instant::now();
    for _ in 0..TIMED_ROWS {
        black_box(format.carry(black_box(&row), hidden_dim)?);
    }
    Ok(started.elapsed().as_secs_f64() * 1e6 / TIMED_ROWS as f64)
}

fn claims_of(formats: &[Quality]) -> Vec<Claim> {
    let find = |profile, name: &str| {
        formats.iter().find(|quality| (quality.profile, quality.format) == (profile, name))
    };
    // Against `f32` of the same profile.
    let change = |found: &Quality| {
        let whole = find(found.profile, "f32")?;
        let how = format!(
            "{:.4} against {:.4} with f32 in the {} profile",
            found.perplexity, whole.perplexity, found.profile
        );
        Some(((found.perplexity / whole.perplexity - 1.0).abs(), how))
    };
    let mut claims = Vec::new();
    let pairs =
        [("f16", &F16_AGREEMENT, &F16_PERPLEXITY), ("int8", &INT8_AGREEMENT, &INT8_PERPLEXITY)];
    for (name, agreement, perplexity) in pairs {
        let (Some(fast), Some(exact)) = (find(Profile::Fast, name), find(Profile::Exact, name))
        else {
            continue;
        };
        let how = format!(
            "all positions of all answers, fast profile; {:.4} in the exact one",
            exact.agreement
        );
        claims.push(agreement.measured(fast.agreement, how));
        if let (Some((value, how)), Some((_, other))) = (change(fast), change(exact)) {
            claims.push(perplexity.measured(value, format!("{how}, {other}")));
        }
    }
    claims
}

fn describe(report: &Report) -> String {
    let header = ["profile", "format", "bytes a row", "us a row", "perplexity", "same token, %"];
    let row = |quality: &Quality| {
        vec![
            quality.profile.to_string(),
            quality.format.to_owned(),
            quality.row_bytes.to_string(),
            number(Some(quality.row_us), 2),
            number(Some(quality.perplexity), 4),
            number(Some(quality.agreement * 100.0), 2),
        ]
    };
    let rows: Vec<Vec<String>> = report.formats.iter().map(row).collect();
    format!(
        "{}\n{} answers with {} positions; a text of {} tokens\n",
        markdown(&header, &rows),
        report.answers,
        report.positions,
        report.text_tokens
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certain_token_has_probability_one_and_equal_ones_share_it() {
        let found = log_probability(&[0.0, 100.0], 1).expect("a token");
        assert!(found.abs() < 1e-9, "{found}");
        let found = log_probability(&[3.0; 8], 5).expect("a token");
        assert!((found + 8_f64.ln()).abs() < 1e-9, "{found}");
        assert!(log_probability(&[1.0], 1).is_err());
    }

    #[test]
    fn one_scale_for_a_row_destroys_what_is_small_beside_what_is_large() {
        let mut row = vec![0.5; 256];
        row[9] = 1000.0;
        let plain = Format::OneScale.carry(&row, 256).expect("carried");
        assert!(plain[0].abs() < 1e-6, "{}", plain[0]);
        let kept = Format::Wire(Dtype::Int8).carry(&row, 256).expect("carried");
        assert!((kept[0] - 0.5).abs() < 0.01 && (kept[9] - 1000.0).abs() < 1e-3, "{kept:?}");
    }
}
