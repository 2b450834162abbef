//! Log-probabilities as the client sees them: with the text of their tokens.

use stagebus_schemas::messages::head::HeadRow;
use stagebus_schemas::messages::public::{Logprob, TokenLogprobs};
use stagebus_shards::text::TextModel;

/// What the client hears of a row's token, if the request asked for it.
pub(crate) fn of_row(text: &TextModel, row: &HeadRow) -> Option<TokenLogprobs> {
    let chosen = entry(text, row.token, row.logprob?);
    let top = row.top.iter().map(|top| entry(text, top.token, top.logprob)).collect();
    Some(TokenLogprobs { chosen, top })
}

fn entry(text: &TextModel, token: u32, logprob: f32) -> Logprob {
    let (text, bytes) = match String::from_utf8(text.token_bytes(token)) {
        Ok(text) => (text, None),
        Err(part) => {
            let bytes = part.into_bytes();
            (String::from_utf8_lossy(&bytes).into_owned(), Some(bytes))
        }
    };
    Logprob { token, text, bytes, logprob }
}
