//! From the bytes of a request to a session with a checked prompt.

use std::sync::Arc;
use std::time::Instant;

use stagebus_schemas::cloud_events::{PublicHeaders, decode_request};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{RequestId, SessionId};
use stagebus_schemas::messages::public::{Limits, PromptInput, RequestError, ValidRequest};
use stagebus_telemetry::Outcome;

use super::State;
use crate::action::{Effect, Encoded, Incoming};
use crate::client::Client;
use crate::jobs::JobStart;
use crate::session::{Order, Session, SessionState};
use crate::speculation::{Speculation, Wish};
use crate::timings::Stopwatch;
use crate::trace::RequestTrace;
use crate::transcript::Transcript;

impl State {
    pub(super) fn on_request(&mut self, incoming: Incoming, now: Instant) {
        let Incoming { payload, headers, client, trace } = incoming;
        let Some(mut client) = client else {
            self.counters.requests_ignored += 1;
            self.metrics.request_ended(Outcome::Unanswerable);
            return;
        };
        let trace = RequestTrace::begin(&self.tracer, trace, &self.model.identity.model, now);
        let room = self.check_room(&client);
        match room.and_then(|()| self.read_request(&headers, &payload, &mut client)) {
            Ok(request) => self.begin(request, client, (None, trace), now),
            Err(error) => self.refuse((client, trace), error, now),
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

    /// Reads and checks a request, whose name the client gets.
    fn read_request(
        &self,
        headers: &PublicHeaders<'_>,
        payload: &[u8],
        client: &mut Client,
    ) -> Result<ValidRequest, ErrorReply> {
        let (found, limit) = (payload.len(), self.settings.max_request_bytes);
        if found > limit {
            return Err(invalid(format!("request has {found} bytes, at most {limit} are taken")));
        }
        let mut request = decode_request(headers, payload)
            .map_err(|error| invalid(format!("request cannot be read: {error}")))?;
        let name = request.request_id.get_or_insert_with(RequestId::random).clone();
        client.request = Some(Arc::new(name));
        Ok(request.validate(&self.model.limits)?)
    }

    /// Makes the session of a valid request; `job` is what is known of a job, and `trace` holds the
    /// spans of a request that is traced.
    pub(super) fn begin(
        &mut self,
        request: ValidRequest,
        client: Client,
        (job, trace): (Option<JobStart>, Option<Box<RequestTrace>>),
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
        session.trace = trace;
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
