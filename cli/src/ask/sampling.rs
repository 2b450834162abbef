//! Options that say how tokens are chosen.

use std::collections::BTreeMap;
use std::fs;

use stagebus_schemas::messages::public::{Constraint, PromptRequest};

/// How tokens are chosen; the fleet checks the ranges.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct SamplingArgs {
    /// Draws tokens instead of taking the most likely ones: 0 to 10, higher is more varied
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,

    /// Keep the smallest set of likely tokens with this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,

    /// Keep tokens at least this likely relative to the most likely one
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,

    /// Seed of the draws: the same request with the same seed gives the same answer
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Make tokens of prompt and answer less likely; 1 is off
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f32>,

    /// Lower the logits of tokens that the answer has
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,

    /// Lower the logits of tokens for each time that the answer has them
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,

    /// Add BIAS (-100 to 100) to the logit of a token id; -100 rules it out (repeatable)
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,

    /// Answer in JSON that fits the JSON schema in FILE
    #[arg(long, value_name = "FILE", value_parser = json_schema, conflicts_with = "constraint")]
    json_schema: Option<Constraint>,

    /// What the answer must be, as in the request's field: {"type":"json_object"}, or of type regex,
    /// choice, lark or json_schema
    #[arg(long, value_name = "JSON", value_parser = constraint)]
    constraint: Option<Constraint>,

    /// Report the log-probability of every token, and the N most likely ones beside it (with
    /// --json)
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
}

impl SamplingArgs {
    /// Puts the options into a request.
    #[must_use]
    pub fn with(&self, request: PromptRequest) -> PromptRequest {
        PromptRequest {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.iter().copied().collect::<BTreeMap<_, _>>(),
            constraint: self.json_schema.clone().or_else(|| self.constraint.clone()),
            logprobs: self.logprobs.map(|_| true),
            top_logprobs: self.logprobs,
            ..request
        }
    }
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let expected = || format!("{text:?} is not TOKEN=BIAS, such as 2=-100");
    let (token, bias) = text.split_once('=').ok_or_else(expected)?;
    match (token.trim().parse(), bias.trim().parse()) {
        (Ok(token), Ok(bias)) => Ok((token, bias)),
        _ => Err(expected()),
    }
}

fn constraint(text: &str) -> Result<Constraint, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("{error}; expected such as {{\"type\":\"json_object\"}}"))
}

fn json_schema(path: &str) -> Result<Constraint, String> {
    let text = fs::read(path).map_err(|error| format!("{path} cannot be read: {error}"))?;
    let schema =
        serde_json::from_slice(&text).map_err(|error| format!("{path} is no JSON: {error}"))?;
    Ok(Constraint::JsonSchema { schema })
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches as _};

    use super::*;

    fn parse(args: &[&str]) -> Result<PromptRequest, clap::Error> {
        let command = SamplingArgs::augment_args(Command::new("ask").no_binary_name(true))
            .arg(clap::arg!(--json));
        let args = SamplingArgs::from_arg_matches(&command.try_get_matches_from(args)?)?;
        Ok(args.with(PromptRequest::default()))
    }

    #[test]
    fn options_become_fields_of_the_request() {
        assert_eq!(parse(&[]).expect("valid"), PromptRequest::default());
        let text = "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed \
                    18446744073709551615 --repetition-penalty 1.1 --presence-penalty -1 \
                    --frequency-penalty 0.25 --logit-bias 2=-100 --logit-bias 7=1.5 --logprobs 3 \
                    --json";
        let request = parse(&text.split_whitespace().collect::<Vec<_>>()).expect("valid");
        let expected = PromptRequest {
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.1),
            seed: Some(u64::MAX),
            repetition_penalty: Some(1.1),
            presence_penalty: Some(-1.0),
            frequency_penalty: Some(0.25),
            logit_bias: [(2, -100.0), (7, 1.5)].into(),
            logprobs: Some(true),
            top_logprobs: Some(3),
            ..PromptRequest::default()
        };
        assert_eq!(request, expected);
    }

    #[test]
    fn a_constraint_comes_from_the_line_or_from_the_file_of_a_schema() {
        let object = parse(&["--constraint", r#"{"type":"json_object"}"#]).expect("valid");
        assert_eq!(object.constraint, Some(Constraint::JsonObject {}));
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("schema.json");
        fs::write(&path, r#"{"z":1,"a":2}"#).expect("written");
        let path = path.to_str().expect("text");
        let schema = parse(&["--json-schema", path]).expect("valid").constraint;
        let Some(Constraint::JsonSchema { schema }) = schema else { panic!("{schema:?}") };
        assert_eq!(schema.to_string(), r#"{"z":1,"a":2}"#, "in its own order");
        for wrong in [
            &["--constraint", "json_object"][..],
            &["--constraint", r#"{"type":"yaml"}"#],
            &["--json-schema", "/none.json"],
            &["--json-schema", path, "--constraint", r#"{"type":"json_object"}"#],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_bias_of_another_form_is_refused() {
        for wrong in ["2", "2:1", "a=1", "2=b", "-1=2", "="] {
            assert!(parse(&["--logit-bias", wrong]).is_err(), "{wrong}");
        }
        assert!(parse(&["--logprobs", "2"]).is_err(), "there is no place for them without --json");
    }
}
