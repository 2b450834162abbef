//! From the bytes of a request to a session with a checked prompt.

use std::sync::Arc;
use std::time::Instant;

use stagebus_schemas::cloud_events::{PublicHeaders, decode_request};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{RequestId, SessionId};
use stagebus_schemas::messages::public::{
    Limits, PromptInput, PromptRequest, RequestError, ValidRequest,
};
use stagebus_telemetry::Outcome;

use super::State;
use crate::action::{Effect, Encoded, Incoming};
use crate::client::Client;
use crate::jobs::JobStart;
use crate::session::{Order, Session, SessionState};
use crate::speculation::{Speculation, Wish};
use crate::timings::Stopwatch;
use crate::transcript::Transcript;

impl State {
    pub(super) fn on_request(&mut self, incoming: Incoming, now: Instant) {
        let Incoming { payload, headers, client } = incoming;
        let Some(mut client) = client else {
            self.counters.requests_ignored += 1;
            self.metrics.request_ended(Outcome::Unanswerable);
            return;
        };
        if let Err(error) = self.check_room(&client) {
            return self.refuse(client, error);
        }
        let mut request = match self.read_request(&headers, &payload) {
            Ok(request) => request,
            Err(error) => return self.refuse(client, error),
        };
        let name = request.request_id.get_or_insert_with(RequestId::random).clone();
        client.request = Some(Arc::new(name));
        match request.validate(&self.model.limits) {
            Ok(request) => self.begin(request, client, None, now),
            Err(error) => self.refuse(client, error.into()),
        }
    }

    /// Takes the token ids of a prompt, which may have come from the request itself, and its compiled
    /// constraint.
    pub(super) fn on_encoded(
        &mut self,
        id: SessionId,
        outcome: Result<Encoded, ErrorReply>,
        now: Instant,
    ) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Encoded { tokens, guide } = match outcome {
            Ok(encoded) => encoded,
            Err(error) => return self.fail(id, error, now),
        };
        if let Err(error) = check_prompt(&tokens, &self.model.limits) {
            return self.fail(id, error.into(), now);
        }
        let prompt_len = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let room = self.model.limits.context_len.saturating_sub(prompt_len);
        session.max_tokens = session.max_tokens.min(room);
        session.prompt = tokens;
        session.guide = guide;
        if let Some(reason) = session.known_end() {
            return self.finish(id, reason, now);
        }
        match session.enter(SessionState::Queued) {
            Ok(()) => self.queue.push_back(id),
            Err(error) => self.on_session_fault(id, error.into(), now),
        }
    }

    fn read_request(
        &self,
        headers: &PublicHeaders<'_>,
        payload: &[u8],
    ) -> Result<PromptRequest, ErrorReply> {
        let (found, limit) = (payload.len(), self.settings.max_request_bytes);
        if found > limit {
            return Err(invalid(format!("request has {found} bytes, at most {limit} are taken")));
        }
        decode_request(headers, payload)
            .map_err(|error| invalid(format!("request cannot be read: {error}")))
    }

    /// Makes the session of a valid request; `job` is what is known of a job.
    pub(super) fn begin(
        &mut self,
        request: ValidRequest,
        client: Client,
        job: Option<JobStart>,
        now: Instant,
    ) {
        let text = match request.input {
            PromptInput::Messages { .. } => self.model.text.detokenizer(),
            PromptInput::Text(_) | PromptInput::Tokens(_) => {
                self.model.text.continuing_detokenizer()
            }
        };
        let wish = Wish {
            tokens: request.draft_tokens,
            windows: request.draft_windows,
            alternatives: request.draft_alternatives,
        };
        let constraint = request.sampling.constraint.clone();
        let order = Order {
            request: request.request_id.unwrap_or_else(RequestId::random),
            client,
            stream: request.stream,
            max_tokens: request.max_tokens.unwrap_or(self.settings.default_max_tokens),
            priority: request.priority,
            speculation: Speculation::new(&self.settings, wish, &request.sampling, self.acceptance),
            sampling: request.sampling,
        };
        let transcript = Transcript::new(text, request.stop);
        let mut watch = Stopwatch::new(now, usize::from(self.model.identity.n_stages));
        watch.tells_steps = request.timings && request.stream;
        let mut session = Session::new(order, transcript, watch);
        if let Some(job) = job {
            session.resume(job, &self.model.eos_ids);
        }
        let id = session.id;
        self.sessions.insert(id, session);
        match request.input {
            PromptInput::Tokens(tokens) if constraint.is_none() => {
                self.on_encoded(id, Ok(Encoded { tokens, guide: None }), now);
            }
            input => self.effects.push(Effect::Encode { session: id, input, constraint }),
        }
    }
}

/// Checks what only the token ids show, wherever they come from.
fn check_prompt(tokens: &[u32], limits: &Limits) -> Result<(), RequestError> {
    let vocab_size = limits.vocab_size;
    if tokens.is_empty() {
        return Err(RequestError::Empty { field: "prompt" });
    }
    limits.check_prompt_len(tokens.len())?;
    match tokens.iter().enumerate().find(|(_, token)| **token >= vocab_size) {
        Some((index, found)) => Err(RequestError::TokenId { index, found: *found, vocab_size }),
        None => Ok(()),
    }
}

fn invalid(message: String) -> ErrorReply {
    ErrorReply::new(ErrorClass::InvalidRequest, message)
}
