//! Sources of figures: values of result files, and what follows from several of them.
//!
//! A source is a list of words with spaces between: values, joined by `*`, `/`, `+` and `-`, which
//! are applied from left to right, and last, if the figure has decimals, their number as `.2`.
//! A value is a number or a path into a result, with dots between its parts:
//!
//! | part | meaning |
//! |---|---|
//! | `wan` (the first one) | the file `wan.json` |
//! | `origin` | a field |
//! | `3` | the entry of a list, counted from 0 |
//! | `speed` in a list | the entry whose `name` is that |
//! | `[n_stages=2,placement=one_core]` | the first entry of a list with these fields |
//!
//! A dot in brackets belongs to a name. In names and fields `_` stands for a space as well; a slash leads into a field's own fields.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::results::Results;

/// What a figure without a value says.
pub(super) const NOT_MEASURED: &str = "not measured";

/// The text of the figure that a source gives.
///
/// # Errors
/// A source that cannot be read, a result or value that is not there.
pub(super) fn figure(source: &str, results: &Results) -> Result<String> {
    let mut words: Vec<&str> = source.split_whitespace().collect();
    let decimals = match words.last().and_then(|word| word.strip_prefix('.')) {
        Some(decimals) => {
            words.pop();
            decimals.parse().with_context(|| format!("`.{decimals}` is no number of decimals"))?
        }
        None => 0,
    };
    let (first, rest) = words.split_first().context("a source is empty")?;
    if let ([], Some(value)) = (rest, path(first, results)?) {
        match value {
            Value::Bool(holds) => return Ok(if *holds { "yes" } else { "no" }.to_owned()),
            Value::Null => return Ok(NOT_MEASURED.to_owned()),
            _ => {}
        }
    }
    let Some(mut result) = number(first, results)? else { return Ok(NOT_MEASURED.to_owned()) };
    for pair in rest.chunks(2) {
        let [operator, operand] = pair else { bail!("`{source}` ends with an operator") };
        let Some(operand) = number(operand, results)? else { return Ok(NOT_MEASURED.to_owned()) };
        match *operator {
            "*" => result *= operand,
            "/" => result /= operand,
            "+" => result += operand,
            "-" => result -= operand,
            other => bail!("`{other}` is no operator"),
        }
    }
    if !result.is_finite() {
        bail!("`{source}` gives no number");
    }
    Ok(written(result, decimals))
}

/// The value of a word; `None` if it was not measured.
fn number(word: &str, results: &Results) -> Result<Option<f64>> {
    if let Ok(number) = word.parse() {
        return Ok(Some(number));
    }
    match path(word, results)?.with_context(|| format!("`{word}` is no path"))? {
        Value::Null => Ok(None),
        value => value.as_f64().map(Some).with_context(|| format!("`{word}` is no number")),
    }
}

/// The value at a path; `None` for a word that is a number.
fn path<'a>(word: &str, results: &'a Results) -> Result<Option<&'a Value>> {
    if word.parse::<f64>().is_ok() {
        return Ok(None);
    }
    let (name, rest) = word.split_once('.').with_context(|| format!("`{word}` is no path"))?;
    let mut value = results.get(name).with_context(|| format!("there is no result {name}"))?;
    for part in parts(rest) {
        value = step(value, part).with_context(|| format!("`{word}`: there is no `{part}`"))?;
    }
    Ok(Some(value))
}

/// The parts of a path; a dot in brackets belongs to a name.
fn parts(path: &str) -> Vec<&str> {
    let mut in_brackets = false;
    let is_border = |c: char| {
        in_brackets = c == '[' || (in_brackets && c != ']');
        c == '.' && !in_brackets
    };
    path.split(is_border).collect()
}

/// One step into a value.
fn step<'a>(value: &'a Value, part: &str) -> Option<&'a Value> {
    let Value::Array(list) = value else { return value.get(part) };
    if let Ok(index) = part.parse::<usize>() {
        return list.get(index);
    }
    match part.strip_prefix('[').and_then(|part| part.strip_suffix(']')) {
        Some(fields) => list.iter().find(|entry| has(entry, fields)),
        None => list.iter().find(|entry| is(&entry["name"], part)),
    }
}

/// Whether an entry has fields such as `n_stages=2,placement=one_core`.
fn has(entry: &Value, fields: &str) -> bool {
    fields.split(',').all(|field| {
        let Some((key, wanted)) = field.split_once('=') else { return false };
        match key.split('/').try_fold(entry, |value, key| value.get(key)) {
            Some(text @ Value::String(_)) => is(text, wanted),
            Some(value) => {
                serde_json::from_str::<Value>(wanted).is_ok_and(|wanted| wanted == *value)
            }
            None => false,
        }
    })
}

/// Whether a text is the wanted one, in which `_` stands for spaces.
fn is(text: &Value, wanted: &str) -> bool {
    text.as_str().is_some_and(|text| text.replace(' ', "_") == wanted.replace(' ', "_"))
}

/// A number with so many decimals, and commas between thousands.
fn written(value: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", value.abs());
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if !fraction.is_empty() {
        grouped.push('.');
        grouped.push_str(fraction);
    }
    let is_zero = grouped.bytes().all(|byte| matches!(byte, b'0' | b'.'));
    if value < 0.0 && !is_zero { format!("-{grouped}") } else { grouped }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn results() -> Results {
        let result = json!({
            "claims": [{"name": "speed", "value": 5.04, "holds": true},
                {"name": "cost", "value": null, "holds": null}],
            "hops": [{"n": 1, "at": {"place": "a"}, "ms": 0.25}, {"n": 2, "at": {"place": "a b.c"}, "ms": 0.5}],
            "bytes": 1_234_567.8,
        });
        Results::of("wan", result)
    }

    #[test]
    fn values_are_found_and_rounded() {
        for (source, expected) in [
            ("wan.claims.speed.value .1", "5.0"),
            ("wan.claims.speed.value", "5"),
            ("wan.claims.0.value .2", "5.04"),
            ("wan.claims.speed.holds", "yes"),
            ("wan.claims.cost.value .2", NOT_MEASURED),
            ("wan.claims.cost.holds", NOT_MEASURED),
            ("wan.hops.[n=2].ms .2", "0.50"),
            ("wan.hops.[n=2,at/place=a_b.c].ms .2", "0.50"),
            ("wan.hops.[n=2].ms / wan.hops.[n=1].ms * 100", "200"),
            ("wan.hops.[n=1].ms - wan.hops.[n=2].ms .2", "-0.25"),
            ("100 * wan.claims.cost.value", NOT_MEASURED),
            ("wan.bytes", "1,234,568"),
            ("wan.bytes / 1e6 .2", "1.23"),
            ("0.001 - 0.002 .1", "0.0"),
        ] {
            assert_eq!(figure(source, &results()).expect(source), expected, "{source}");
        }
    }

    #[test]
    fn what_is_not_there_is_named() {
        for (source, word) in [
            ("users.claims.speed.value", "no result users"),
            ("wan.claims.spede.value", "`spede`"),
            ("wan.hops.[n=3].ms", "`[n=3]`"),
            ("wan.hops.2.ms", "`2`"),
            ("wan.claims.speed", "no number"),
            ("wan.claims.speed.value *", "ends with an operator"),
            ("wan.claims.speed.value x 2", "`x` is no operator"),
            ("wan.claims.speed.value .x", "`.x`"),
            ("1 / 0", "gives no number"),
            ("wan", "no path"),
            ("", "empty"),
        ] {
            let error = format!("{:#}", figure(source, &results()).expect_err(source));
            assert!(error.contains(word), "{source}: {error}");
        }
    }
}
