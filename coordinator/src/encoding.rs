//! From what a request says to what a session works with: token ids and a compiled constraint.
//!
//! Takes milliseconds and more, so it runs off the owner's task.

use std::panic::{AssertUnwindSafe, catch_unwind};

use stagebus_draft::constraint::{Constraint, Grammars, Guide};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::messages::public::PromptInput;
use stagebus_shards::text::TextModel;

use crate::action::Encoded;

/// Encodes a prompt and compiles the constraint beside it.
///
/// # Errors
/// [`ErrorClass::InvalidRequest`] for what cannot be encoded or compiled; [`ErrorClass::Internal`]
/// if the tokenizer fails or does not do for constraints.
pub(crate) fn encode(
    text: &TextModel,
    grammars: &Grammars,
    input: PromptInput,
    constraint: Option<&Constraint>,
) -> Result<Encoded, ErrorReply> {
    let tokens = catch_unwind(AssertUnwindSafe(|| match input {
        PromptInput::Messages { messages, tools } => text.encode_tool_chat(&messages, &tools),
        PromptInput::Text(prompt) => text.encode(&prompt, true),
        PromptInput::Tokens(tokens) => Ok(tokens),
    }));
    let tokens = match tokens {
        Ok(Ok(tokens)) => tokens,
        Ok(Err(error)) => {
            let message = format!("prompt cannot be encoded: {error}");
            return Err(ErrorReply::new(ErrorClass::InvalidRequest, message));
        }
        Err(_panic) => {
            return Err(ErrorReply::new(ErrorClass::Internal, "the tokenizer failed"));
        }
    };
    let guide = constraint.map(|constraint| compile(grammars, constraint)).transpose()?;
    Ok(Encoded { tokens, guide })
}

/// What the client is told may quote the constraint, so it is in no log.
fn compile(grammars: &Grammars, constraint: &Constraint) -> Result<Guide, ErrorReply> {
    grammars.compile(constraint).map_err(|error| {
        let class = match error.is_of_constraint() {
            true => ErrorClass::InvalidRequest,
            false => ErrorClass::Internal,
        };
        ErrorReply::new(class, error.to_string())
    })
}
