//! What is asked: the prompt in its forms, and how the answer is made.

use std::io::Read as _;

use anyhow::Context as _;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{ChatMessage, PromptRequest};

use super::sampling::SamplingArgs;

/// Argument that stands for standard input.
const STDIN: &str = "-";

/// What is asked.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PromptArgs {
    /// The prompt, put into the model's chat template; `-` reads it from standard input
    #[arg(value_name = "PROMPT", required_unless_present = "tokens", conflicts_with = "tokens")]
    prompt: Option<String>,

    /// Send the prompt as it is, without the chat template
    #[arg(long, conflicts_with_all = ["tokens", "system"])]
    raw: bool,

    /// Send token ids instead of a prompt
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "system")]
    tokens: Option<Vec<u32>>,
}

/// How an answer is made.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct AnswerArgs {
    /// A system message before the prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Most tokens to generate
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,

    /// A text that ends the answer (repeatable)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    #[command(flatten)]
    sampling: SamplingArgs,
}

impl AnswerArgs {
    /// A request with these options and a name of its own, and nothing asked yet.
    #[must_use]
    pub fn request(&self) -> PromptRequest {
        self.sampling.with(PromptRequest {
            request_id: Some(RequestId::random()),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ..PromptRequest::default()
        })
    }
}

impl PromptArgs {
    /// Makes the request; reads standard input if the prompt is `-`.
    ///
    /// # Errors
    /// Standard input that cannot be read or is no UTF-8 text.
    pub fn request(&self, answer: &AnswerArgs) -> anyhow::Result<PromptRequest> {
        let request = PromptRequest { tokens: self.tokens.clone(), ..answer.request() };
        let prompt = match self.prompt.as_deref() {
            Some(STDIN) => read_stdin()?,
            Some(prompt) => prompt.to_owned(),
            None => return Ok(request),
        };
        if self.raw {
            return Ok(PromptRequest { prompt: Some(prompt), ..request });
        }
        let system = answer.system.clone().map(|text| message("system", text));
        let messages = system.into_iter().chain([message("user", prompt)]).collect();
        Ok(PromptRequest { messages: Some(messages), ..request })
    }
}

/// A message of a chat.
pub(crate) fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage::new(role, content)
}

fn read_stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("cannot read the prompt from standard input")?;
    // The line end that a shell adds is not part of the prompt.
    let trimmed = text.strip_suffix('\n').unwrap_or(&text);
    Ok(trimmed.strip_suffix('\r').unwrap_or(trimmed).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(prompt: PromptArgs, answer: AnswerArgs, want: PromptRequest) {
        let mut request = prompt.request(&answer).expect("a valid request");
        assert!(request.request_id.take().is_some(), "a request has a name to cancel it by");
        assert_eq!(request, want);
    }

    fn user(content: &str) -> ChatMessage {
        message("user", content.to_owned())
    }

    #[test]
    fn each_form_of_prompt_becomes_its_request() {
        let prompt = || Some("hi".to_owned());
        check(
            PromptArgs { prompt: prompt(), ..PromptArgs::default() },
            AnswerArgs::default(),
            PromptRequest { messages: Some(vec![user("hi")]), ..PromptRequest::default() },
        );
        let system = message("system", "be brief".to_owned());
        check(
            PromptArgs { prompt: prompt(), ..PromptArgs::default() },
            AnswerArgs {
                system: Some("be brief".to_owned()),
                max_tokens: Some(3),
                ..AnswerArgs::default()
            },
            PromptRequest {
                messages: Some(vec![system, user("hi")]),
                max_tokens: Some(3),
                ..PromptRequest::default()
            },
        );
        check(
            PromptArgs { prompt: prompt(), raw: true, ..PromptArgs::default() },
            AnswerArgs::default(),
            PromptRequest { prompt: prompt(), ..PromptRequest::default() },
        );
        check(
            PromptArgs { tokens: Some(vec![1, 2]), ..PromptArgs::default() },
            AnswerArgs { stop: vec!["x".to_owned()], ..AnswerArgs::default() },
            PromptRequest {
                tokens: Some(vec![1, 2]),
                stop: vec!["x".to_owned()],
                ..PromptRequest::default()
            },
        );
    }
}
