//! Requests that several tests send.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::setup;

/// A prompt with a certain answer of a few words.
pub(crate) fn short() -> Value {
    json!({ "messages": [{ "role": "user", "content": "What is the capital of Japan?" }] })
}

/// A prompt whose answer goes on for at least some hundred tokens.
pub(crate) fn endless() -> Value {
    json!({ "prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "max_tokens": 4000 })
}

/// A request for `n_tokens` tokens after the token prompt of a case of the reference.
pub(crate) fn of_case(case: &Case, n_tokens: usize) -> Value {
    json!({ "tokens": case.input_ids, "max_tokens": n_tokens })
}

/// A case of the reference.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Tokens of the prompt.
    pub input_ids: Vec<u32>,
    /// Tokens that follow.
    pub output_ids: Vec<u32>,
}

/// The cases of the reference.
pub(crate) fn cases() -> Result<Vec<Case>> {
    let text = std::fs::read(setup::reference())?;
    let cases: Vec<Value> = serde_json::from_slice(&text)?;
    ensure!(cases.len() == 8, "the reference has {} cases", cases.len());
    cases
        .iter()
        .map(|case| {
            Ok(Case { input_ids: ids(&case["input_ids"])?, output_ids: ids(&case["output_ids"])? })
        })
        .collect()
}

fn ids(value: &Value) -> Result<Vec<u32>> {
    serde_json::from_value(value.clone()).context("a list of token ids")
}
