//! Actions fed by hand, effects looked at: no broker, no task, no clock but the one given.

mod admission;
mod checks;
mod jobs;
mod recovery;
mod speculation;

use std::sync::Arc;
use std::time::{Duration, Instant};

use stagebus_schemas::cloud_events::PublicHeaders;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, ModelName, RequestId, SessionId, StageIndex, StepNumber, WorkerId,
};
use stagebus_schemas::messages::control::{Open, Priority};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerLoad, WorkerState};
use stagebus_schemas::messages::forward::{Phase, StageTime, Step};
use stagebus_schemas::messages::head::{Head, HeadRow, HeadStep, StepFault};
use stagebus_schemas::messages::public::{
    Event, FinishReason, Limits, Logprob, PromptInput, RequestState, StepTimes, Timings,
    TokenLogprobs, Usage,
};
use stagebus_schemas::messages::sampling::{Sampling, TokenLogprob};
use stagebus_schemas::subjects::LostStep;
use stagebus_schemas::version::MessageVersion;
use stagebus_shards::text::TextModel;
use stagebus_telemetry::CoordinatorTelemetry;

use super::checks::CHECK_PATIENCE;
use super::{Model, Name, State, StepLimits};
use crate::action::{Action, CheckAnswer, Effect, Encoded, Incoming, OpenAnswer, OpenFailure};
use crate::client::Client;
use crate::config::CoordinatorSettings;
use crate::fleet_view::ShardSetIdentity;
use crate::shard_set::{self, END};

const N_STAGES: u16 = 2;

/// A request from a reply subject.
fn ask(reply: &str, json: &str) -> Action {
    let headers = PublicHeaders::default();
    let client = Some(Client::new(reply.into(), &headers, json.as_bytes()));
    Action::Request(Incoming { payload: json.to_owned().into(), headers, client, trace: None })
}

/// A state with its clock and the effects so far.
struct Bench {
    state: State,
    now: Instant,
    effects: Vec<Effect>,
    /// What clients were told of the state of their requests.
    told: Vec<(RequestState, Option<StageIndex>)>,
}

impl Bench {
    fn new() -> Self {
        Self::with(CoordinatorSettings { prefill_chunk: 4, ..without_drafts() })
    }

    fn with(settings: CoordinatorSettings) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let manifest = shard_set::write(dir.path(), usize::from(N_STAGES));
        let model = Model {
            identity: ShardSetIdentity {
                model: ModelName::new("tiny").unwrap(),
                fingerprint: manifest.fingerprint,
                n_stages: N_STAGES,
            },
            text: Arc::new(TextModel::load(dir.path()).unwrap()),
            limits: Limits::new(
                u32::try_from(manifest.dims.context_length).unwrap(),
                u32::try_from(manifest.dims.vocab_size).unwrap(),
            ),
            eos_ids: manifest.eos_ids,
        };
        let name =
            Name { id: CoordinatorId::new("c").unwrap(), host: "h".to_owned(), hosted: None };
        let limits = StepLimits { chunk_rows: settings.prefill_chunk, wanted_rows: 64 };
        let state = State::new(name, settings, model, limits, CoordinatorTelemetry::default());
        Self { state, now: Instant::now(), effects: Vec::new(), told: Vec::new() }
    }

    /// Applies and settles, as the owner does, and keeps the effects.
    fn act(&mut self, action: Action) {
        self.state.apply(action, self.now);
        self.effects.extend(self.state.take_effects());
        self.state.settle(self.now);
        self.effects.extend(self.state.take_effects());
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.act(Action::Tick);
    }

    fn worker(&mut self, name: &str, stage: u16) {
        self.announce(name, stage, WorkerState::Ready);
    }

    fn announce(&mut self, name: &str, stage: u16, state: WorkerState) {
        let announcement = self.announcement(name, stage, state);
        self.act(Action::Worker(announcement));
    }

    fn announcement(&self, name: &str, stage: u16, state: WorkerState) -> WorkerAnnouncement {
        let identity = self.state.model.identity.clone();
        WorkerAnnouncement {
            version: MessageVersion::CURRENT,
            worker: id(name),
            model: identity.model,
            fingerprint: identity.fingerprint,
            stage: StageIndex::new(stage),
            n_stages: N_STAGES,
            first_layer: 0,
            end_layer: 1,
            device: "CPU".to_owned(),
            profile: "fast".to_owned(),
            host: "h".to_owned(),
            state,
            interval_ms: 60_000,
            load: WorkerLoad {
                n_sessions: 0,
                max_sessions: 8,
                queue_depth: 0,
                kv_tokens: 0,
                kv_bytes: 0,
                kv_max_bytes: 0,
                steps_completed: 0,
                decode_us: 0,
                prefill_row_us: 0,
                ..WorkerLoad::default()
            },
        }
    }

    fn request(&mut self, json: &str) {
        self.act(ask("inbox", json));
    }

    /// The opens that were asked for since the last call.
    fn opens(&mut self) -> Vec<(StageIndex, WorkerId, Open)> {
        let mut opens = Vec::new();
        self.effects = std::mem::take(&mut self.effects)
            .into_iter()
            .filter_map(|effect| match effect {
                Effect::Open { stage, worker, open, trace: None } => {
                    opens.push((stage, worker, open));
                    None
                }
                other => Some(other),
            })
            .collect();
        opens
    }

    fn answer_open(
        &mut self,
        (stage, worker, open): &(StageIndex, WorkerId, Open),
        outcome: Result<u32, OpenFailure>,
    ) {
        self.act(Action::Opened(OpenAnswer {
            session: open.session,
            epoch: open.epoch,
            stage: *stage,
            worker: worker.clone(),
            outcome,
        }));
    }

    fn open_all(&mut self) -> SessionId {
        let opens = self.opens();
        assert_eq!(opens.len(), usize::from(N_STAGES));
        for open in &opens {
            self.answer_open(open, Ok(0));
        }
        opens[0].2.session
    }

    /// The steps that were sent since the last call.
    fn steps(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        self.effects = std::mem::take(&mut self.effects)
            .into_iter()
            .filter_map(|effect| match effect {
                Effect::Step { step, .. } => {
                    steps.push(step);
                    None
                }
                other => Some(other),
            })
            .collect();
        steps
    }

    fn step(&mut self) -> Step {
        let mut steps = self.steps();
        assert_eq!(steps.len(), 1, "{steps:?}");
        steps.remove(0)
    }

    /// Answers a step with `token` for every wanted row.
    fn answer(&mut self, step: &Step, token: u32) {
        self.act(Action::Head(head(step, token)));
    }

    /// The events that were sent since the last call, and the ends of events as `None`. Those that
    /// tell a request's state are in `told`.
    fn events(&mut self) -> Vec<Option<Event>> {
        let mut events = Vec::new();
        self.effects = std::mem::take(&mut self.effects)
            .into_iter()
            .filter_map(|effect| match effect {
                Effect::Event { event: Event::Status { state, stage, .. }, .. } => {
                    self.told.push((state, stage));
                    None
                }
                Effect::Event { event, .. } => {
                    events.push(Some(event));
                    None
                }
                Effect::EndOfEvents { .. } => {
                    events.push(None);
                    None
                }
                other => Some(other),
            })
            .collect();
        events
    }

    /// The class of the error that ended the stream.
    fn error(&mut self) -> (ErrorClass, String, Option<u64>) {
        let events = self.events();
        match events.as_slice() {
            [.., Some(Event::Error { class, message, retry_after_ms }), None] => {
                (*class, message.clone(), *retry_after_ms)
            }
            other => panic!("no error at the end of {other:?}"),
        }
    }

    /// The workers told to close since the last call.
    fn closed(&mut self) -> Vec<WorkerId> {
        let mut closed = Vec::new();
        self.effects.retain(|effect| {
            let Effect::Close { worker, .. } = effect else { return true };
            closed.push(worker.clone());
            false
        });
        closed
    }

    /// Nobody hears a worker.
    fn gone(&mut self, worker: &str) {
        let (worker, asked, answer) = (id(worker), self.now, CheckAnswer::Gone);
        self.act(Action::Checked { worker, asked, answer });
    }

    /// Two workers and one session whose prompt "abc" has been sent.
    fn started(&mut self, extra: &str) -> Step {
        self.worker("w0", 0);
        self.worker("w1", 1);
        self.request(&format!(r#"{{"request_id":"r","tokens":[97,98,99]{extra}}}"#));
        self.open_all();
        self.step()
    }
}

fn without_drafts() -> CoordinatorSettings {
    CoordinatorSettings { max_draft_tokens: 0, ..CoordinatorSettings::default() }
}

fn id(name: &str) -> WorkerId {
    WorkerId::new(name).unwrap()
}

fn head(step: &Step, token: u32) -> Head {
    let rows = step.wanted.iter().map(|row| HeadRow::new(step.start_pos + row, token)).collect();
    let trace = (0..N_STAGES)
        .map(|stage| StageTime {
            stage: StageIndex::new(stage),
            queue_us: 0,
            infer_us: 1000,
            rows: 1,
            masked: 0,
            total_us: 1100,
        })
        .collect();
    let (session, epoch, step) = (step.session, step.epoch, step.step);
    Head {
        version: MessageVersion::CURRENT,
        stage: StageIndex::new(1),
        worker: id("w1"),
        steps: vec![HeadStep { session, epoch, step, rows, logits: None, trace }],
        faults: Vec::new(),
    }
}

/// A fault of stage 0 for a step.
fn fault(step: &Step, class: ErrorClass) -> Head {
    let mut head = head(step, 0);
    head.steps.clear();
    (head.stage, head.worker) = (StageIndex::FIRST, id("w0"));
    head.faults.push(StepFault {
        session: step.session,
        epoch: step.epoch,
        step: step.step,
        error: ErrorReply::new(class, "broken"),
    });
    head
}

fn token_event(i: u64, text: &str, tokens: &[u32]) -> Option<Event> {
    let (text, tokens) = (text.to_owned(), tokens.to_vec());
    Some(Event::Token { i, text, tokens, logprobs: Vec::new(), steps: Vec::new() })
}

fn finish_reason(event: &Option<Event>) -> (FinishReason, u32) {
    match event {
        Some(Event::Done { finish_reason, usage, .. }) => (*finish_reason, usage.completion_tokens),
        other => panic!("{other:?} is not the end"),
    }
}

#[test]
fn a_request_becomes_opens_steps_and_events() {
    let mut bench = Bench::new();
    let prefill = bench.started(r#","max_tokens":8"#);
    assert_eq!(
        (prefill.start_pos, prefill.phase, &prefill.tokens[..], &prefill.wanted[..]),
        (0, Phase::Prefill, &[97, 98, 99][..], &[2][..])
    );
    assert_eq!(
        bench.events(),
        [Some(Event::Accepted {
            request_id: RequestId::new("r").unwrap(),
            prompt_tokens: 3,
            seed: None
        })]
    );
    bench.answer(&prefill, u32::from(b'd'));
    let decode = bench.step();
    assert_eq!(
        (decode.step, decode.start_pos, decode.phase, &decode.tokens[..], &decode.wanted[..]),
        (StepNumber::new(1), 3, Phase::Decode, &[100][..], &[0][..])
    );
    assert_eq!(bench.events(), [token_event(0, "d", &[100])]);
    bench.now += Duration::from_millis(10);
    bench.answer(&decode, END);
    assert!(bench.steps().is_empty());
    let events = bench.events();
    assert_eq!(events[0], token_event(1, "", &[END]));
    assert_eq!(finish_reason(&events[1]), (FinishReason::Stop, 2));
    let Some(Event::Done { timings, text, .. }) = &events[1] else { unreachable!() };
    assert_eq!((timings.stage_infer_ms.len(), text), (2, &None));
    assert!((timings.overhead_ms - 8.0).abs() < 1e-9, "{timings:?}");
    assert_eq!(events[2..], [None]);
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    assert!(bench.state.is_idle());
    assert_eq!((bench.state.counters.requests_done, bench.state.counters.tokens_out), (1, 2));
}

#[test]
fn token_events_tell_what_their_steps_took_if_asked() {
    let mut bench = Bench::new();
    let prefill = bench.started(r#","max_tokens":8,"timings":true"#);
    bench.events();
    let times = |bench: &mut Bench, step: &Step, token| {
        bench.now += Duration::from_millis(10);
        bench.answer(step, token);
        match bench.events().swap_remove(0) {
            Some(Event::Token { tokens, steps, .. }) => (tokens.len(), steps),
            other => panic!("{other:?} is no token"),
        }
    };
    let expected = StepTimes {
        tokens: 1,
        round_trip_ms: 10.0,
        hops_ms: 7.8,
        stage_queue_ms: vec![0.0, 0.0],
        stage_infer_ms: vec![1.0, 1.0],
    };
    assert_eq!(times(&mut bench, &prefill, u32::from(b'd')), (1, vec![expected.clone()]));
    let decode = bench.step();
    assert_eq!(times(&mut bench, &decode, u32::from(b'e')), (1, vec![expected]));
}

#[test]
fn text_is_encoded_outside_and_a_chat_goes_through_the_template() {
    let mut bench = Bench::new();
    bench.request(r#"{"prompt":"hi"}"#);
    bench.request(r#"{"messages":[{"role":"user","content":"hi"}]}"#);
    let inputs: Vec<_> = bench
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Encode { input, .. } => input,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(*inputs[0], PromptInput::Text("hi".to_owned()));
    assert!(
        matches!(inputs[1], PromptInput::Messages { messages, .. } if messages[0].content == "hi")
    );
}

#[test]
fn a_long_prompt_goes_in_chunks_within_the_window() {
    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    let tokens: Vec<u32> = (0..18).collect();
    bench.request(&format!(r#"{{"tokens":{tokens:?}}}"#));
    bench.open_all();
    // 18 rows in chunks of at most 4, even: 4, 4, 4, 3, 3; three under way with two stages.
    let first = bench.steps();
    assert_eq!(first.iter().map(|step| step.tokens.len()).collect::<Vec<_>>(), [4, 4, 4]);
    assert!(first.iter().all(|step| step.wanted.is_empty()));
    bench.answer(&first[0], 0);
    let fourth = bench.step();
    assert_eq!((fourth.start_pos, fourth.tokens.len()), (12, 3));
    bench.answer(&first[1], 0);
    let last = bench.step();
    assert_eq!((last.start_pos, &last.wanted[..]), (15, &[2][..]));
    for step in [&first[2], &fourth] {
        bench.answer(step, 0);
        assert!(bench.steps().is_empty());
    }
    bench.answer(&last, 1);
    assert_eq!((bench.step().start_pos, bench.events().len()), (18, 2));
}

#[test]
fn a_stage_runs_what_it_or_a_later_one_has_not_cached() {
    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    bench.request(r#"{"tokens":[1,2,3,4,5,6,7,8]}"#);
    let opens = bench.opens();
    bench.answer_open(&opens[0], Ok(6));
    bench.answer_open(&opens[1], Ok(4));
    let step = bench.step();
    assert_eq!((step.start_pos, &step.tokens[..]), (4, &[5, 6, 7, 8][..]));
    assert_eq!(step.held_from, None);
    bench.request(r#"{"tokens":[1,2,3,4,5,6,7,8]}"#);
    let opens = bench.opens();
    bench.answer_open(&opens[0], Ok(2));
    bench.answer_open(&opens[1], Ok(4));
    let steps = bench.steps();
    let of = |step: &Step| (step.start_pos, step.tokens.clone(), step.held_from);
    assert_eq!(of(&steps[0]), (2, vec![3, 4], Some(StageIndex::new(1))));
    assert_eq!(of(&steps[1]), (4, vec![5, 6, 7, 8], None));
}

#[test]
fn max_tokens_and_the_context_end_the_output() {
    let mut bench = Bench::new();
    let prefill = bench.started(r#","max_tokens":1"#);
    bench.answer(&prefill, 100);
    assert!(bench.steps().is_empty());
    let events = bench.events();
    assert_eq!(events[1], token_event(0, "d", &[100]));
    assert_eq!(finish_reason(&events[2]), (FinishReason::Length, 1));

    // One place is left behind a prompt of the context less one token.
    let tokens = vec![1; shard_set::CONTEXT - 1];
    bench.request(&format!(r#"{{"tokens":{tokens:?},"max_tokens":100}}"#));
    assert_eq!(bench.opens()[0].2.max_len as usize, shard_set::CONTEXT);
}

#[test]
fn a_stop_string_across_tokens_ends_the_output_before_it() {
    let mut bench = Bench::new();
    let mut step = bench.started(r#","stop":["END"]"#);
    bench.events();
    for (byte, text) in [(b'a', "a"), (b'E', ""), (b'x', "Ex"), (b'E', ""), (b'N', "")] {
        bench.answer(&step, u32::from(byte));
        step = bench.step();
        let texts: String = bench
            .events()
            .into_iter()
            .map(|event| match event {
                Some(Event::Token { text, .. }) => text,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(texts, text, "after {:?}", char::from(byte));
    }
    bench.answer(&step, u32::from(b'D'));
    let events = bench.events();
    assert_eq!(events[0], token_event(2, "", &[69, 78, 68]));
    assert_eq!(finish_reason(&events[1]), (FinishReason::Stop, 6));
    // The step that was on its way is answered for nobody.
    let in_flight = bench.step();
    bench.answer(&in_flight, 1);
    assert_eq!((bench.events().len(), bench.state.counters.late_answers), (0, 1));
}

#[test]
fn half_a_character_waits_for_its_other_half() {
    let mut bench = Bench::new();
    let prefill = bench.started(r#","max_tokens":3"#);
    bench.events();
    bench.answer(&prefill, 0xc3);
    assert_eq!(bench.events(), []);
    let step = bench.step();
    bench.answer(&step, 0xa9);
    assert_eq!(bench.events(), [token_event(0, "é", &[0xc3, 0xa9])]);
    let step = bench.step();
    bench.answer(&step, 0xc3);
    assert_eq!(bench.events()[0], token_event(1, "\u{fffd}", &[0xc3]));
}

#[test]
fn sampling_goes_to_the_stages_and_log_probabilities_come_back_with_their_tokens() {
    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    bench.request(
        r#"{"tokens":[97],"temperature":0.5,"top_k":9,"logprobs":true,"top_logprobs":1,
            "logit_bias":{"98":-100},"stop":["d"]}"#,
    );
    let opens = bench.opens();
    let sampling = opens[1].2.sampling.clone();
    let expected = Sampling {
        temperature: 0.5,
        top_k: 9,
        logit_bias: vec![(98, -100.0)],
        seed: sampling.seed,
        top_logprobs: Some(1),
        ..Sampling::default()
    };
    assert_eq!(sampling, expected);
    opens.iter().for_each(|open| bench.answer_open(open, Ok(0)));
    let prefill = bench.step();
    let [Some(Event::Accepted { seed, .. })] = bench.events()[..] else { panic!("not accepted") };
    assert_eq!(seed, Some(sampling.seed), "the client can repeat the request");

    let row = |token, top| HeadRow {
        logprob: Some(-0.5),
        top: vec![TokenLogprob { token: top, logprob: -0.25 }],
        ..HeadRow::new(prefill.start_pos, token)
    };
    let entry = |token, text: &str, bytes| Logprob {
        token,
        text: text.to_owned(),
        bytes,
        logprob: if token == 0xc3 { -0.25 } else { -0.5 },
    };
    let mut answer = head(&prefill, 0);
    answer.steps[0].rows = vec![row(99, 0xc3)];
    bench.act(Action::Head(answer));
    let events = bench.events();
    let Some(Event::Token { tokens, logprobs, .. }) = &events[0] else { panic!("{events:?}") };
    let byte = entry(0xc3, "\u{fffd}", Some(vec![0xc3]));
    let expected = TokenLogprobs { chosen: entry(99, "c", None), top: vec![byte.clone()] };
    assert_eq!((&tokens[..], &logprobs[..]), (&[99][..], &[expected][..]));

    // The token that completes a stop string has an entry, though it has no text.
    let step = bench.step();
    let mut answer = head(&step, 0);
    answer.steps[0].rows = vec![HeadRow { pos: step.start_pos, ..row(100, 0xc3) }];
    bench.act(Action::Head(answer));
    let events = bench.events();
    let Some(Event::Token { text, tokens, logprobs, .. }) = &events[0] else {
        panic!("{events:?}")
    };
    let expected = TokenLogprobs { chosen: entry(100, "d", None), top: vec![byte] };
    assert_eq!((text.as_str(), &tokens[..]), ("", &[100][..]));
    assert_eq!(logprobs[..], [expected]);
}

#[test]
fn a_stage_that_has_no_token_to_choose_makes_the_request_invalid() {
    let mut bench = Bench::new();
    let step = bench.started(r#","logit_bias":{"1":-100}"#);
    let error = ErrorReply::new(ErrorClass::InvalidRequest, "logit_bias leaves no token to choose");
    let mut answer = head(&step, 0);
    answer.faults =
        vec![StepFault { session: step.session, epoch: step.epoch, step: step.step, error }];
    answer.steps.clear();
    bench.act(Action::Head(answer));
    let (class, message, retry) = bench.error();
    assert_eq!((class, retry), (ErrorClass::InvalidRequest, None));
    assert!(message.contains("logit_bias"), "{message}");
}

#[test]
fn without_streaming_everything_comes_with_the_end() {
    let mut bench = Bench::new();
    let prefill = bench.started(r#","stream":false,"max_tokens":2"#);
    bench.answer(&prefill, 104);
    let step = bench.step();
    bench.answer(&step, 105);
    let events = bench.events();
    assert_eq!(events.len(), 3);
    let Some(Event::Done { text, tokens, .. }) = &events[1] else { panic!("{events:?}") };
    assert_eq!((text.as_deref(), tokens.as_deref()), (Some("hi"), Some(&[104, 105][..])));
}

#[test]
fn bad_requests_are_refused_with_the_reason() {
    let long = format!(r#"{{"tokens":{:?}}}"#, vec![1; shard_set::CONTEXT]);
    for (json, part) in [
        ("{", "cannot be read"),
        (r#"{"prompt":"a","tokens":[1]}"#, "prompt"),
        (r#"{"unknown":1,"prompt":"a"}"#, "unknown"),
        (r#"{"tokens":[1],"temperature":-0.7}"#, "temperature"),
        (r#"{"tokens":[1],"top_logprobs":3}"#, "logprobs"),
        (r#"{"tokens":[258]}"#, "258"),
        (&long, "512 tokens, the context of 512"),
    ] {
        let mut bench = Bench::new();
        bench.request(json);
        let (class, message, _) = bench.error();
        assert_eq!(class, ErrorClass::InvalidRequest, "{json}");
        assert!(message.contains(part), "{message}");
        assert!(bench.state.is_idle());
    }
}

#[test]
fn text_without_tokens_and_tokenizer_failures_are_refused() {
    let mut bench = Bench::new();
    let empty = Encoded { tokens: Vec::new(), guide: None };
    for outcome in [Ok(empty), Err(ErrorReply::new(ErrorClass::InvalidRequest, "no"))] {
        bench.request(r#"{"prompt":"a"}"#);
        let Some(Effect::Encode { session, .. }) = bench.effects.pop() else { panic!() };
        bench.act(Action::Encoded { session, outcome });
        assert_eq!(bench.error().0, ErrorClass::InvalidRequest);
    }
}

#[test]
fn a_request_without_reply_subject_is_ignored() {
    let mut bench = Bench::new();
    let headers = PublicHeaders::default();
    let payload = "{}".into();
    bench.act(Action::Request(Incoming { payload, headers, client: None, trace: None }));
    assert_eq!((bench.effects.len(), bench.state.counters.requests_ignored), (0, 1));
}

#[test]
fn requests_beyond_the_queue_are_refused_at_once() {
    let settings = CoordinatorSettings { max_sessions: 1, max_queued: 1, ..without_drafts() };
    let mut bench = Bench::with(settings);
    let prefill = bench.started(r#","max_tokens":1"#);
    bench.events();
    bench.request(r#"{"request_id":"waits","tokens":[1]}"#);
    assert!(bench.opens().is_empty());
    bench.request(r#"{"tokens":[1]}"#);
    let (class, _, retry_after_ms) = bench.error();
    assert_eq!(class, ErrorClass::Overloaded);
    assert!(retry_after_ms.is_some_and(|ms| ms > 0));
    // The end of the first lets the second one in.
    bench.answer(&prefill, 1);
    assert_eq!(bench.opens().len(), 2);
}

#[test]
fn a_refusing_worker_is_replaced_by_another() {
    let mut bench = Bench::new();
    for (name, stage) in [("a0", 0), ("b0", 0), ("w1", 1)] {
        bench.worker(name, stage);
    }
    bench.request(r#"{"tokens":[1,2]}"#);
    let first = bench.opens();
    assert_eq!(first[0].1, id("a0"));
    let full = ErrorReply {
        class: ErrorClass::Overloaded,
        message: "full".to_owned(),
        retry_after_ms: Some(70),
    };
    bench.answer_open(&first[0], Err(OpenFailure::Refused(full.clone())));
    assert!(bench.opens().is_empty(), "all answers are awaited");
    bench.answer_open(&first[1], Ok(0));
    assert_eq!(bench.closed(), [id("w1")]);
    let second = bench.opens();
    assert_eq!((&second[0].1, &second[1].1), (&id("b0"), &id("w1")));
    assert_eq!(second[0].2.epoch, Epoch::new(1));
    assert_eq!(second[0].2.route, [id("b0"), id("w1")]);
    bench.answer_open(&second[1], Ok(0));
    bench.answer_open(&second[0], Err(OpenFailure::Refused(full)));
    let (class, message, retry_after_ms) = bench.error();
    assert_eq!((class, &message[..], retry_after_ms), (ErrorClass::Overloaded, "full", Some(70)));
    assert_eq!(bench.closed(), [id("w1")]);
}

#[test]
fn a_silent_or_dead_worker_is_replaced_by_another() {
    for failure in [OpenFailure::Silent, OpenFailure::Gone] {
        let mut bench = Bench::new();
        for (name, stage) in [("a0", 0), ("b0", 0), ("w1", 1)] {
            bench.worker(name, stage);
        }
        bench.request(r#"{"tokens":[1,2]}"#);
        let first = bench.opens();
        bench.answer_open(&first[0], Err(failure.clone()));
        bench.answer_open(&first[1], Ok(0));
        let closed = bench.closed();
        assert_eq!(closed.contains(&id("a0")), failure == OpenFailure::Silent, "{closed:?}");
        let second = bench.opens();
        assert_eq!(second[0].1, id("b0"));
        // The next session avoids it too.
        bench.request(r#"{"tokens":[1,2]}"#);
        assert_eq!(bench.opens()[0].1, id("b0"));
    }
}

#[test]
fn a_request_waits_for_a_worker_and_then_gives_up() {
    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.request(r#"{"tokens":[1]}"#);
    assert!(bench.opens().is_empty());
    bench.worker("w1", 1);
    assert_eq!(bench.opens().len(), 2);

    let mut bench = Bench::new();
    bench.worker("w0", 0);
    bench.request(r#"{"tokens":[1]}"#);
    let wait = bench.state.settings.route_wait();
    assert_eq!(bench.state.next_deadline(), Some(bench.now + wait));
    bench.wait(wait);
    let (class, message, _) = bench.error();
    assert_eq!(class, ErrorClass::StageUnavailable);
    assert!(message.contains("stage 1"), "{message}");
}

#[test]
fn cancelling_works_in_every_state() {
    let cancel = || Action::Cancel(RequestId::new("r").unwrap());
    // Running.
    let mut bench = Bench::new();
    let prefill = bench.started("");
    bench.answer(&prefill, 100);
    bench.events();
    bench.act(cancel());
    let events = bench.events();
    assert_eq!(finish_reason(&events[0]), (FinishReason::Cancelled, 1));
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    let step = bench.step();
    bench.answer(&step, 1);
    bench.act(cancel());
    assert_eq!(bench.events(), []);
    // Opening: a late answer is closed once more.
    bench.request(r#"{"request_id":"r","tokens":[1,2]}"#);
    let opens = bench.opens();
    bench.act(cancel());
    assert_eq!(finish_reason(&bench.events()[1]), (FinishReason::Cancelled, 0));
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
    bench.answer_open(&opens[0], Ok(0));
    bench.answer_open(&opens[1], Err(OpenFailure::Gone));
    assert_eq!(bench.closed(), [id("w0")]);
    // Encoding.
    bench.request(r#"{"request_id":"r","prompt":"a"}"#);
    bench.act(cancel());
    assert_eq!(finish_reason(&bench.events()[1]), (FinishReason::Cancelled, 0));
    assert!(bench.state.is_idle());
}

#[test]
fn a_draining_worker_keeps_its_sessions() {
    let mut bench = Bench::new();
    let prefill = bench.started("");
    bench.announce("w1", 1, WorkerState::Draining);
    bench.answer(&prefill, 100);
    assert_eq!(bench.steps().len(), 1);
}

#[test]
fn repeats_old_epochs_and_other_workers_are_dropped() {
    let mut bench = Bench::new();
    let prefill = bench.started("");
    let mut other_epoch = head(&prefill, 1);
    other_epoch.steps[0].epoch = Epoch::new(9);
    let mut other_worker = head(&prefill, 1);
    other_worker.worker = id("w9");
    for head in [other_epoch, other_worker] {
        bench.act(Action::Head(head));
    }
    assert!(bench.steps().is_empty());
    bench.answer(&prefill, 1);
    assert_eq!(bench.steps().len(), 1);
    bench.answer(&prefill, 1);
    assert!(bench.steps().is_empty());
    assert_eq!(bench.state.counters.late_answers, 3);
}

#[test]
fn stopping_tells_every_client() {
    let mut bench = Bench::new();
    bench.started("");
    bench.request(r#"{"prompt":"a"}"#);
    bench.events();
    bench.act(Action::Drain);
    assert!(!bench.state.is_idle());
    assert!(
        bench.effects.iter().any(
            |effect| matches!(effect, Effect::Announce(announcement) if !announcement.accepting)
        )
    );
    bench.act(Action::Stop);
    let events = bench.events();
    assert_eq!(events.len(), 4);
    assert!(bench.state.is_idle());
    assert_eq!(bench.closed(), [id("w0"), id("w1")]);
}
