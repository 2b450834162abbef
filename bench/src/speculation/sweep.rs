//! Draft lengths by drafters by prompts; drawn tokens; one long answer.

use std::time::Instant;

use serde::Serialize;

use super::{Context, Drafter, Drafting};
use crate::load::{self, Ask, Draw, Served};

/// Temperature of the drawn answers.
const TEMPERATURE: f32 = 0.8;

/// Seeds of the drawn answers.
const SEEDS: [u64; 3] = [1, 2, 3];

/// Draft length of the drawn answers.
const DRAWN_K: u32 = 5;

/// Users at the same time where tokens are compared and nothing is timed.
const USERS: usize = 16;

/// Tokens of an answer that warms up.
const WARM_UP_TOKENS: u32 = 24;

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// Who drafted.
    pub drafter: Drafter,
    /// Tokens drafted per step; absent where the coordinator chose.
    pub k: Option<u32>,
    /// Number of the prompt.
    pub prompt: usize,
    /// Its category.
    pub category: &'static str,
    /// Number of the round.
    pub round: usize,
    /// Tokens per second after the first.
    pub tok_s: f64,
    /// Tokens of the answer.
    pub n_tokens: usize,
    /// Tokens drafted.
    pub drafted_tokens: u32,
    /// Drafted tokens that were right.
    pub accepted_tokens: u32,
    /// Steps that generated tokens.
    pub steps: u32,
    /// KV positions that rewinds left behind per position of the text.
    pub bloat: f64,
    /// Whether the tokens are those that the prompt gives without drafts.
    pub identical: bool,
}

/// Answers whose tokens were drawn.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Drawn {
    /// Who drafted.
    pub drafter: Drafter,
    /// Answers compared.
    pub n_answers: usize,
    /// Those whose tokens differ from the ones without drafts.
    pub n_differing: usize,
    /// Tokens drafted.
    pub drafted_tokens: u32,
}

/// The long answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Long {
    /// Who drafted.
    pub drafter: Drafter,
    /// Tokens drafted per step; absent where the coordinator chose.
    pub k: Option<u32>,
    /// Tokens of the answer.
    pub n_tokens: usize,
    /// Tokens per second after the first, up to each length; absent where the answer is shorter.
    pub tok_s: Vec<(usize, Option<f64>)>,
    /// Tokens drafted.
    pub drafted_tokens: u32,
    /// Drafted tokens that were right.
    pub accepted_tokens: u32,
    /// Steps that generated tokens.
    pub steps: u32,
    /// KV positions that rewinds left behind per position of the text.
    pub bloat: f64,
    /// Whether the tokens are those without drafts.
    pub identical: bool,
}

/// Measures every prompt with every draft length and drafter in turn.
///
/// # Errors
/// A request that fails, an answer too short to time.
pub(super) async fn run(context: &Context, fleets: &[Drafting]) -> anyhow::Result<Vec<Point>> {
    let lengths: Vec<Option<u32>> =
        context.args.k.iter().copied().map(Some).chain([None]).collect();
    let mut points = Vec::new();
    let Some(first) = fleets.first() else { return Ok(points) };
    first.fleet.join_cores().await?;
    warm_up(context, fleets, &lengths).await?;
    let mut plain: Vec<Option<Vec<u32>>> = vec![None; context.prompts.len()];
    for round in 0..usize::from(context.args.rounds) {
        for (index, prompt) in context.prompts.iter().enumerate() {
            context.note(&format!("round {}, {}", round + 1, prompt.category));
            for &k in &lengths {
                for drafting in fleets {
                    let ask = context.ask(&prompt.tokens, k, None);
                    let served = load::one(&drafting.fleet, &ask, Instant::now()).await?;
                    let tokens = plain[index].get_or_insert_with(|| served.tokens.clone());
                    let identical = *tokens == served.tokens;
                    // An answer of one arrival has no time to divide by.
                    let Some(tok_s) = served.decode_tok_s() else { continue };
                    let usage = served.usage;
                    points.push(Point {
                        drafter: drafting.drafter,
                        k,
                        prompt: index,
                        category: prompt.category,
                        round,
                        tok_s,
                        n_tokens: served.tokens.len(),
                        drafted_tokens: usage.drafted_tokens,
                        accepted_tokens: usage.accepted_tokens,
                        steps: usage.steps,
                        bloat: usage.bloat,
                        identical,
                    });
                }
            }
        }
    }
    Ok(points)
}

/// Asks once with every draft length, so that no turn pays for what is done once.
async fn warm_up(
    context: &Context,
    fleets: &[Drafting],
    lengths: &[Option<u32>],
) -> anyhow::Result<()> {
    context.note("warming up");
    let Some(prompt) = context.prompts.last() else { return Ok(()) };
    for drafting in fleets {
        for &k in lengths {
            let ask = Ask { max_tokens: WARM_UP_TOKENS, ..context.ask(&prompt.tokens, k, None) };
            load::one(&drafting.fleet, &ask, Instant::now()).await?;
        }
    }
    Ok(())
}

/// Compares drawn answers with and without drafts, many at the same time.
///
/// # Errors
/// A request that fails.
pub(super) async fn drawn(context: &Context, fleets: &[Drafting]) -> anyhow::Result<Vec<Drawn>> {
    let mut all = Vec::new();
    let mut plain: Option<Vec<Served>> = None;
    let asks = |k: u32| -> Vec<Ask<'_>> {
        let prompts = context.all_prompts.iter().take(context.args.drawn_prompts);
        let ask = |tokens, seed| {
            context.ask(tokens, Some(k), Some(Draw { temperature: TEMPERATURE, seed }))
        };
        prompts.flat_map(|prompt| SEEDS.map(|seed| ask(&prompt.tokens[..], seed))).collect()
    };
    for drafting in fleets {
        if context.args.drawn_prompts == 0 {
            break;
        }
        context.note(&format!("drawn tokens, {}", drafting.drafter.name()));
        if plain.is_none() {
            plain = Some(load::users(&drafting.fleet, USERS, &asks(0)).await?);
        }
        let drafted = load::users(&drafting.fleet, USERS, &asks(DRAWN_K)).await?;
        let pairs = drafted.iter().zip(plain.iter().flatten());
        all.push(Drawn {
            drafter: drafting.drafter,
            n_answers: drafted.len(),
            n_differing: pairs.filter(|(a, b)| a.tokens != b.tokens).count(),
            drafted_tokens: drafted.iter().map(|served| served.usage.drafted_tokens).sum(),
        });
    }
    Ok(all)
}

/// One long answer without drafts on the first fleet, then with them on every fleet.
///
/// # Errors
/// A request that fails.
pub(super) async fn long(context: &Context, fleets: &[Drafting]) -> anyhow::Result<Vec<Long>> {
    let mut all = Vec::new();
    let Some(&max_tokens) = context.args.long.last() else { return Ok(all) };
    let mut plain: Option<Vec<u32>> = None;
    let without = fleets.iter().take(1).map(|drafting| (drafting, Some(0)));
    for (drafting, k) in without.chain(fleets.iter().map(|drafting| (drafting, None))) {
        context.note(&format!("{max_tokens} tokens, {}", drafting.drafter.name()));
        let ask = Ask {
            max_tokens: u32::try_from(max_tokens)?,
            ..context.ask(&context.long_prompt, k, None)
        };
        let served = load::one(&drafting.fleet, &ask, Instant::now()).await?;
        let identical = *plain.get_or_insert_with(|| served.tokens.clone()) == served.tokens;
        let lengths = context.args.long.iter();
        let usage = &served.usage;
        all.push(Long {
            drafter: drafting.drafter,
            k,
            n_tokens: served.tokens.len(),
            tok_s: lengths.map(|&n| (n, served.decode_tok_s_of_first(n))).collect(),
            drafted_tokens: usage.drafted_tokens,
            accepted_tokens: usage.accepted_tokens,
            steps: usage.steps,
            bloat: usage.bloat,
            identical,
        });
    }
    Ok(all)
}
