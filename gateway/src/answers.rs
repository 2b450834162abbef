//! From an order to an HTTP response: all of its requests are sent at once, and their answers come
//! whole or as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use axum::http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use axum::response::IntoResponse;
use axum::response::sse::{Event, Sse};
use futures::StreamExt as _;
use futures::future::try_join_all;
use futures::stream::{self, BoxStream, SelectAll};
use serde::Serialize;
use stagebus_schemas::messages::public::StepTimes;
use stagebus_schemas::trace::TraceContext;
use tokio::time::Instant;
use tracing::debug;

use crate::api_error::ApiError;
use crate::fleet;
use crate::gateway::{Place, Shared};
use crate::generation::{Generation, Piece};
use crate::openai::format::{Format, Head, Used, shown_fingerprint};
use crate::openai::order::Order;

/// What ends a stream.
const DONE: &str = "[DONE]";

/// Names an answer, for questions about it.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Asks nginx and others to pass events on at once.
pub(crate) const UNBUFFERED: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Carries out an order, as a part of the client's trace if that has one.
///
/// # Errors
/// There is no room, the fleet refuses or fails, or the time is over. In a stream only what happens
/// before every request was accepted is an error of the response; the rest is an event.
pub(crate) async fn give<F: Format>(
    gateway: &Shared,
    order: Order,
    trace: Option<TraceContext>,
    format: F,
) -> Result<Response<Body>, ApiError> {
    let began = Instant::now();
    let Order { model, requests, n, stream, include_usage } = order;
    let n_answers = u32::try_from(requests.len()).unwrap_or(u32::MAX);
    let place = gateway.take_place(n_answers)?;
    let id = requests.first().and_then(|request| request.request_id.clone());
    let id = id.map_or_else(String::new, |id| format!("{}{id}", F::ID_PREFIX));
    let known = gateway.model(&model);
    let head = Head {
        created: fleet::unix_seconds(),
        model: model.to_string(),
        fingerprint: known.map(|model| shown_fingerprint(&model.fingerprint)),
        include_usage,
        id,
    };
    let request_id = HeaderValue::from_str(&head.id);
    let deadline = began + gateway.settings.request_timeout();
    let begin = |request| Generation::begin(gateway, &model, request, trace, deadline);
    let generations = try_join_all(requests.into_iter().map(begin)).await?;
    let progress =
        Progress { gateway: Arc::clone(gateway), began, has_token: false, _place: place };
    let mut response = if stream {
        let answer = Streamed::new(head, format, generations, n, progress);
        let mut response = Sse::new(stream::unfold(answer, Streamed::next)).into_response();
        response.headers_mut().insert(UNBUFFERED, HeaderValue::from_static("no"));
        response
    } else {
        whole(head, format, generations, n, progress).await?
    };
    if let Ok(request_id) = request_id {
        response.headers_mut().insert(REQUEST_ID, request_id);
    }
    Ok(response)
}

async fn whole<F: Format>(
    head: Head,
    format: F,
    generations: Vec<Generation>,
    n: u32,
    progress: Progress,
) -> Result<Response<Body>, ApiError> {
    let ends = try_join_all(generations.into_iter().map(Generation::finish)).await?;
    let mut used = Used::default();
    for (index, end) in (0..).zip(&ends) {
        used.add(&end.usage, counts_prompt(index, n));
        if end.usage.completion_tokens > 0 {
            let first = std::time::Duration::try_from_secs_f64(end.timings.ttft_ms / 1000.0);
            progress.gateway.metrics.first_token(first.unwrap_or_default());
        }
    }
    let body = format.whole(&head, &ends, used).map_err(|error| unrepresentable(&error))?;
    progress.complete();
    let content = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((content, body).into_response())
}

/// The choices of a prompt share its tokens: they count with the first.
const fn counts_prompt(index: u32, n: u32) -> bool {
    index.is_multiple_of(n)
}

fn unrepresentable(error: &serde_json::Error) -> ApiError {
    ApiError::internal(format!("the answer cannot be represented: {error}"))
}

/// The time that an order takes, and its room.
#[derive(Debug)]
struct Progress {
    gateway: Shared,
    began: Instant,
    has_token: bool,
    _place: Place,
}

impl Progress {
    fn token_came(&mut self) {
        if !std::mem::replace(&mut self.has_token, true) {
            self.gateway.metrics.first_token(self.began.elapsed());
        }
    }

    fn complete(&self) {
        self.gateway.metrics.answered(self.began.elapsed());
    }
}

/// What steps took, before the text that they bring. Like the chunk that tells what was used it has
/// no choices; OpenAI's API has no such chunk, and nobody gets it unasked.
#[derive(Serialize)]
struct StepsChunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [(); 0],
    index: u32,
    steps: &'a [StepTimes],
}

impl<'a> StepsChunk<'a> {
    fn new(head: &'a Head, index: u32, steps: &'a [StepTimes]) -> Self {
        let Head { id, created, model, .. } = head;
        let (object, created) = ("stagebus.steps", *created);
        Self { id, object, created, model, choices: [], index, steps }
    }
}

type Pieces = BoxStream<'static, (u32, Result<Piece, ApiError>)>;

/// Several answers as one stream of events. Dropped before its end, all of them are cancelled.
struct Streamed<F> {
    head: Head,
    format: F,
    n: u32,
    choices: SelectAll<Pieces>,
    /// Events that are due.
    ready: VecDeque<Event>,
    used: Used,
    progress: Progress,
    has_ended: bool,
}

impl<F: Format> Streamed<F> {
    fn new(
        head: Head,
        format: F,
        generations: Vec<Generation>,
        n: u32,
        progress: Progress,
    ) -> Self {
        let choices = (0..).zip(generations).map(|(index, generation)| pieces(index, generation));
        let choices = choices.collect::<SelectAll<_>>();
        let mut answer = Self {
            head,
            format,
            n,
            ready: VecDeque::new(),
            used: Used::default(),
            progress,
            has_ended: false,
            choices,
        };
        for index in 0..u32::try_from(answer.choices.len()).unwrap_or(u32::MAX) {
            match answer.format.begin(&answer.head, index).transpose() {
                Some(chunk) => answer.push(chunk),
                None => break,
            }
        }
        answer
    }

    /// The next event, and the rest.
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some((Ok(event), self));
            }
            if self.has_ended {
                return None;
            }
            match self.choices.next().await {
                Some((index, Ok(piece))) => self.take(index, piece),
                Some((_, Err(error))) => self.fail(&error),
                None => self.finish(),
            }
        }
    }

    fn take(&mut self, index: u32, piece: Piece) {
        match piece {
            Piece::Waiting => self.ready.push_back(Event::default().comment("waiting")),
            Piece::Delta { text, logprobs, steps } => {
                self.progress.token_came();
                if !steps.is_empty() {
                    let chunk = StepsChunk::new(&self.head, index, &steps);
                    self.push(serde_json::to_string(&chunk));
                }
                if text.is_empty() && logprobs.is_empty() {
                    return;
                }
                let chunk = self.format.delta(&self.head, index, &text, &logprobs);
                if let Some(chunk) = chunk.transpose() {
                    self.push(chunk);
                }
            }
            Piece::End(end) => {
                self.used.add(&end.usage, counts_prompt(index, self.n));
                let chunk = self.format.end(&self.head, index, end.reason);
                self.push(chunk);
            }
        }
    }

    fn finish(&mut self) {
        if self.head.include_usage {
            let chunk = self.format.usage(&self.head, self.used);
            self.push(chunk);
        }
        if !self.has_ended {
            self.ready.push_back(Event::default().data(DONE));
            self.has_ended = true;
            self.progress.complete();
        }
    }

    fn push(&mut self, chunk: serde_json::Result<String>) {
        match chunk {
            Ok(chunk) => self.ready.push_back(Event::default().data(chunk)),
            Err(error) => self.fail(&unrepresentable(&error)),
        }
    }

    /// Ends the stream with an error, and all answers with it.
    fn fail(&mut self, error: &ApiError) {
        debug!(code = error.code(), "stream ends with an error");
        self.ready.push_back(Event::default().data(error.to_json()));
        self.has_ended = true;
        self.choices.clear();
    }
}

/// The parts of one answer, up to its end or the first error.
fn pieces(index: u32, generation: Generation) -> Pieces {
    let next = move |generation: Option<Generation>| async move {
        let mut generation = generation?;
        match generation.next().await {
            Ok(Some(piece)) => Some(((index, Ok(piece)), Some(generation))),
            Ok(None) => None,
            Err(error) => Some(((index, Err(error)), None)),
        }
    };
    stream::unfold(Some(generation), next).boxed()
}
