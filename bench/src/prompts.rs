//! The prompts of the scenarios with many answers: eight categories, five prompts each.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use stagebus_shards::text::TextModel;

/// The texts, by category.
const FILE: &str = include_str!("../prompts/eight_categories.json");

/// Number of categories.
pub const N_CATEGORIES: usize = 8;

/// A prompt whose answer is long, so that no variant ends early.
pub const ESSAY: &str = "Write a long and detailed essay about the history of navigation at sea.";

/// The kinds of prompts, as in the paper's evaluation of speculation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    short_factual: Vec<String>,
    reasoning: Vec<String>,
    code: Vec<String>,
    list: Vec<String>,
    creative: Vec<String>,
    technical: Vec<String>,
    chat: Vec<String>,
    translation: Vec<String>,
}

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Its category.
    pub category: &'static str,
    /// Its text, as a user would write it.
    pub text: String,
}

/// A prompt as the model gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// Its category.
    pub category: &'static str,
    /// Token ids, the chat template around the text.
    pub tokens: Vec<u32>,
}

/// All prompts, one of each category in turn, so that the first N are as mixed as all of them.
///
/// # Errors
/// None in practice: the file is part of the program.
pub fn all() -> anyhow::Result<Vec<Prompt>> {
    let file: File = serde_json::from_str(FILE).context("the prompts cannot be read")?;
    let categories: [_; N_CATEGORIES] = [
        ("short-factual", file.short_factual),
        ("reasoning", file.reasoning),
        ("code", file.code),
        ("list", file.list),
        ("creative", file.creative),
        ("technical", file.technical),
        ("chat", file.chat),
        ("translation", file.translation),
    ];
    let longest = categories.iter().map(|(_, texts)| texts.len()).max().unwrap_or(0);
    let in_turn = (0..longest).flat_map(|index| {
        categories.iter().filter_map(move |(category, texts)| {
            Some(Prompt { category, text: texts.get(index)?.clone() })
        })
    });
    Ok(in_turn.collect())
}

/// All prompts as a model gets them.
///
/// # Errors
/// A shard set without tokenizer, a text that it refuses.
pub fn encoded(text: &TextModel) -> anyhow::Result<Vec<EncodedPrompt>> {
    let encode = |prompt: Prompt| {
        Ok(EncodedPrompt { category: prompt.category, tokens: encode(text, &prompt.text)? })
    };
    all()?.into_iter().map(encode).collect()
}

/// The tokenizer and chat template of a shard set.
///
/// # Errors
/// A folder that holds none.
pub fn text_model(shards: &Path) -> anyhow::Result<TextModel> {
    Ok(TextModel::load(shards)?)
}

/// A text as a chat if the model has a template, else as it is.
///
/// # Errors
/// A text that the tokenizer refuses.
pub fn encode(model: &TextModel, text: &str) -> anyhow::Result<Vec<u32>> {
    if model.has_chat_template() {
        let message = BTreeMap::from([("role", "user"), ("content", text)]);
        return Ok(model.encode_chat(&[message])?);
    }
    Ok(model.encode(text, true)?)
}

/// Exactly `n_tokens` tokens of text that no other `seed` begins with: the prompts, in an order and
/// with a beginning of their own.
///
/// # Errors
/// A text that the tokenizer refuses.
pub fn long(model: &TextModel, n_tokens: usize, seed: u64) -> anyhow::Result<Vec<u32>> {
    let prompts = all()?;
    anyhow::ensure!(!prompts.is_empty(), "there are no prompts");
    let mut text = format!("Notes, number {seed}.\n");
    let mut tokens = Vec::new();
    let mut state = seed;
    while tokens.len() < n_tokens {
        for _ in 0..prompts.len() {
            // Knuth's MMIX generator; its upper bits are good enough to shuffle texts.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let index = (state >> 33) as usize % prompts.len();
            text.push_str(&prompts[index].text);
            text.push('\n');
        }
        tokens = model.encode(&text, true)?;
    }
    tokens.truncate(n_tokens);
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn there_are_forty_prompts_and_any_eight_in_a_row_are_mixed() {
        let prompts = all().expect("the file is valid");
        assert!(prompts.len() >= 40, "{} prompts", prompts.len());
        let texts: BTreeSet<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        assert_eq!(texts.len(), prompts.len(), "no prompt is there twice");
        for eight in prompts.chunks_exact(8) {
            let categories: BTreeSet<&str> = eight.iter().map(|prompt| prompt.category).collect();
            assert_eq!(categories.len(), 8);
        }
    }
}
