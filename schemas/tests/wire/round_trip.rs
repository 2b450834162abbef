//! Whatever a message holds, it comes back equal.

use std::fmt::Debug;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use serde_json::json;
use stagebus_schemas::codec::{self, ContentType, Message};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, ModelName, NodeId, RequestId, SessionId, StageIndex, StepNumber, WorkerId,
};
use stagebus_schemas::messages::bulk::Part;
use stagebus_schemas::messages::constraint::Constraint;
use stagebus_schemas::messages::control::{
    Close, Control, ControlAction, ControlOutcome, ControlReply, Drain, HeadMode, Keep, Open,
    Priority, SessionProgress, StepProgress,
};
use stagebus_schemas::messages::fleet::{
    CoordinatorAnnouncement, WorkerAnnouncement, WorkerLoad, WorkerState,
};
use stagebus_schemas::messages::forward::{Forward, Phase, StageTime, Step};
use stagebus_schemas::messages::head::{Head, HeadRow, HeadStep, StepFault};
use stagebus_schemas::messages::node::{
    DeviceMeasurement, Echo, NodeAnswer, NodeMeasurement, NodeQuery, NodeQuestion, NodeReply,
    Probe, ProbeProgress, StageMeasurement, Ways,
};
use stagebus_schemas::messages::public::{
    ChatMessage, Event, FinishReason, Function, FunctionCall, Logprob, PromptRequest, RequestState,
    StepTimes, Timings, TokenLogprobs, Tool, ToolCall, ToolKind, Usage,
};
use stagebus_schemas::messages::sampling::{Sampling, TokenLogprob};
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_schemas::version::MessageVersion;

const TOKEN: &str = "[a-zA-Z0-9_-]{1,64}";

fn worker() -> impl Strategy<Value = WorkerId> {
    TOKEN.prop_map(|text| WorkerId::new(text).expect("a token"))
}

fn coordinator() -> impl Strategy<Value = CoordinatorId> {
    TOKEN.prop_map(|text| CoordinatorId::new(text).expect("a token"))
}

fn model() -> impl Strategy<Value = ModelName> {
    TOKEN.prop_map(|text| ModelName::new(text).expect("a token"))
}

fn position() -> impl Strategy<Value = (SessionId, Epoch, StepNumber)> {
    any::<(u64, u32, u32)>().prop_map(|(session, epoch, step)| {
        (SessionId::from_u64(session), Epoch::new(epoch), StepNumber::new(step))
    })
}

fn failure() -> impl Strategy<Value = ErrorReply> {
    (prop::sample::select(ErrorClass::ALL.to_vec()), any::<String>(), any::<Option<u64>>())
        .prop_map(|(class, message, retry_after_ms)| ErrorReply { class, message, retry_after_ms })
}

fn trace() -> impl Strategy<Value = Vec<StageTime>> {
    let time = any::<(u16, [u32; 5])>().prop_map(
        |(stage, [queue_us, infer_us, rows, masked, total_us])| {
            let stage = StageIndex::new(stage);
            StageTime { stage, queue_us, infer_us, rows, masked, total_us }
        },
    );
    vec(time, 0..4)
}

fn step() -> impl Strategy<Value = Step> {
    let rows = vec(any::<(u32, bool)>(), 1..6);
    let held_from = option::of((1_u16..1024).prop_map(StageIndex::new));
    (position(), 0..u32::MAX - 8, any::<bool>(), rows, held_from, trace()).prop_map(
        |((session, epoch, step), start_pos, is_prefill, rows, held_from, trace)| Step {
            session,
            epoch,
            step,
            start_pos,
            phase: if is_prefill { Phase::Prefill } else { Phase::Decode },
            wanted: (0..)
                .zip(&rows)
                .filter(|(_, row)| row.1 && held_from.is_none())
                .map(|(at, _)| at)
                .collect(),
            held_from,
            tokens: rows.into_iter().map(|row| row.0).collect(),
            trace,
        },
    )
}

pub(crate) fn forward() -> impl Strategy<Value = Forward> {
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Int8]);
    let tensor = option::of((dtype, 1_u32..20, any::<u8>()));
    (option::of(worker()), vec(step(), 1..4), tensor).prop_map(|(from, steps, tensor)| {
        let n_rows: usize = steps.iter().map(|step| step.tokens.len()).sum();
        let hidden = tensor.map(|(dtype, hidden_dim, fill)| Tensor {
            dtype,
            n_rows: u32::try_from(n_rows).expect("few rows"),
            hidden_dim,
            data: vec![fill; n_rows * dtype.row_bytes(hidden_dim as usize)].into(),
        });
        Forward { version: MessageVersion::CURRENT, from, steps, hidden }
    })
}

fn head() -> impl Strategy<Value = Head> {
    let logprob = || -100_f32..0.0;
    let top = vec((any::<u32>(), logprob()), 0..3);
    let row = (any::<u32>(), option::of(logprob()), top);
    let rows = prop::collection::btree_map(any::<u32>(), row, 0..5);
    let step = (position(), rows, trace()).prop_map(|((session, epoch, step), rows, trace)| {
        let token_logprob = |(token, logprob)| TokenLogprob { token, logprob };
        let rows = rows
            .into_iter()
            .map(|(pos, (token, logprob, top))| HeadRow {
                pos,
                token,
                logprob,
                top: top.into_iter().map(token_logprob).collect(),
            })
            .collect();
        HeadStep { session, epoch, step, rows, logits: None, trace }
    });
    let fault = (position(), failure()).prop_map(|((session, epoch, step), error)| StepFault {
        session,
        epoch,
        step,
        error,
    });
    (any::<u16>(), worker(), vec(step, 0..4), vec(fault, 0..3)).prop_map(
        |(stage, worker, steps, faults)| Head {
            version: MessageVersion::CURRENT,
            stage: StageIndex::new(stage),
            worker,
            steps,
            faults,
        },
    )
}

fn open() -> impl Strategy<Value = Open> {
    let ids = (position(), coordinator(), vec(worker(), 1..5));
    let prompt = vec(any::<u32>(), 0..9);
    let modes = any::<(bool, bool)>();
    (ids, ".{1,60}", prompt, 9..u32::MAX, sampling(), modes).prop_map(
        |(
            ((session, epoch, _), coordinator, route),
            fingerprint,
            prompt,
            max_len,
            sampling,
            modes,
        )| Open {
            session,
            epoch,
            coordinator,
            route,
            fingerprint,
            prompt_len: u32::try_from(prompt.len() / 2).expect("short"),
            prompt,
            max_len,
            sampling,
            head: if modes.0 { HeadMode::Full } else { HeadMode::Token },
            priority: if modes.1 { Priority::Batch } else { Priority::Interactive },
        },
    )
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let number = || 0_f32..4.0;
    let numbers = (number(), number(), number(), number(), number(), number());
    let bias = vec((any::<u32>(), number()), 0..3);
    let rest = (option::of(0_u32..65), option::of(constraint()));
    (numbers, any::<(u32, u64)>(), bias, rest).prop_map(
        |(numbers, (top_k, seed), logit_bias, (top_logprobs, constraint))| Sampling {
            temperature: numbers.0,
            top_p: numbers.1,
            top_k,
            min_p: numbers.2,
            repetition_penalty: numbers.3,
            presence_penalty: numbers.4,
            frequency_penalty: numbers.5,
            logit_bias,
            seed,
            top_logprobs,
            constraint: constraint.map(Arc::new),
        },
    )
}

fn constraint() -> impl Strategy<Value = Constraint> {
    prop_oneof![
        any::<String>()
            .prop_map(|key| Constraint::JsonSchema { schema: json!({ key: [1.5, null] }) }),
        vec(any::<String>(), 0..3).prop_map(|options| Constraint::Choice { options }),
        any::<String>().prop_map(|grammar| Constraint::Lark { grammar }),
    ]
}

fn control() -> impl Strategy<Value = Control> {
    prop_oneof![
        open().prop_map(ControlAction::Open),
        position().prop_map(|(session, epoch, _)| ControlAction::Close(Close { session, epoch })),
        option::of(any::<u64>()).prop_map(|within_ms| ControlAction::Drain(Drain { within_ms })),
        (coordinator(), vec(any::<u64>(), 0..4)).prop_map(|(coordinator, sessions)| {
            let sessions = sessions.into_iter().map(SessionId::from_u64).collect();
            ControlAction::Keep(Keep { coordinator, sessions })
        }),
        Just(ControlAction::Stats),
        vec(any::<u64>().prop_map(SessionId::from_u64), 0..4).prop_map(ControlAction::Progress),
    ]
    .prop_map(|action| Control { version: MessageVersion::CURRENT, action })
}

fn load() -> impl Strategy<Value = WorkerLoad> {
    any::<([u32; 7], [u64; 6])>().prop_map(|(small, large)| WorkerLoad {
        n_sessions: small[0],
        max_sessions: small[1],
        queue_depth: small[2],
        kv_tokens: large[0],
        kv_bytes: large[1],
        kv_max_bytes: large[3],
        steps_completed: large[2],
        rows_completed: large[5],
        decode_us: small[3],
        prefill_row_us: small[4],
        busy_ms: small[5],
        expected_ms: small[6],
        losses: large[4],
    })
}

fn progress() -> impl Strategy<Value = SessionProgress> {
    (position(), any::<u32>(), any::<bool>()).prop_map(
        |((session, epoch, expected), unsent, is_open)| {
            let steps = StepProgress { epoch, expected, unsent: StepNumber::new(unsent) };
            SessionProgress { session, steps: is_open.then_some(steps) }
        },
    )
}

fn control_reply() -> impl Strategy<Value = ControlReply> {
    prop_oneof![
        any::<u32>().prop_map(|cached_len| ControlOutcome::Opened { cached_len }),
        Just(ControlOutcome::Closed),
        Just(ControlOutcome::Draining),
        load().prop_map(ControlOutcome::Stats),
        vec(progress(), 0..4).prop_map(ControlOutcome::Progress),
        failure().prop_map(ControlOutcome::Failed),
    ]
    .prop_map(|outcome| ControlReply { version: MessageVersion::CURRENT, outcome })
}

fn worker_announcement() -> impl Strategy<Value = WorkerAnnouncement> {
    let states = vec![
        WorkerState::Joining,
        WorkerState::Starting,
        WorkerState::Ready,
        WorkerState::Draining,
        WorkerState::Leaving,
    ];
    let numbers = (1_u16..=1024, any::<u16>(), 0_u32..1000, 1_u32..1000, any::<u32>());
    let texts = (".{0,60}", ".{0,60}", ".{0,60}", ".{0,60}");
    (worker(), model(), numbers, texts, prop::sample::select(states), load()).prop_map(
        |(
            worker,
            model,
            (n_stages, stage, first_layer, n_layers, interval_ms),
            texts,
            state,
            load,
        )| {
            let (fingerprint, device, profile, host) = texts;
            WorkerAnnouncement {
                version: MessageVersion::CURRENT,
                worker,
                model,
                fingerprint,
                stage: StageIndex::new(stage % n_stages),
                n_stages,
                first_layer,
                end_layer: first_layer + n_layers,
                device,
                profile,
                host,
                state,
                interval_ms,
                load,
            }
        },
    )
}

fn coordinator_announcement() -> impl Strategy<Value = CoordinatorAnnouncement> {
    let numbers = (1_u16..=1024, any::<bool>(), any::<[u32; 2]>(), any::<[u64; 5]>());
    (coordinator(), model(), ".{0,60}", ".{0,60}", numbers).prop_map(
        |(coordinator, model, fingerprint, host, (n_stages, accepting, small, large))| {
            CoordinatorAnnouncement {
                version: MessageVersion::CURRENT,
                coordinator,
                model,
                fingerprint,
                n_stages,
                host,
                accepting,
                interval_ms: small[0],
                n_sessions: small[1],
                requests_done: large[0],
                tokens_out: large[1],
                tokens_drafted: large[2],
                tokens_accepted: large[3],
                recoveries: large[4],
            }
        },
    )
}

fn node() -> impl Strategy<Value = NodeId> {
    TOKEN.prop_map(|text| NodeId::new(text).expect("a token"))
}

fn node_question() -> impl Strategy<Value = NodeQuestion> {
    let texts = (".{0,60}", ".{0,60}", option::of(".{0,60}"));
    let probe = (model(), texts, vec(1_u32..200, 1..9), 2_u32..=256).prop_map(
        |(model, (fingerprint, weights, floats), split, many_rows)| Probe {
            model,
            fingerprint,
            split,
            weights,
            floats,
            many_rows,
        },
    );
    let ways = (node(), 0_u32..=1 << 20, 0_u32..=1 << 20, 1_u32..=1000)
        .prop_map(|(to, bytes, back_bytes, count)| Ways { to, bytes, back_bytes, count });
    let echo = (vec(any::<u8>(), 0..100), 0_u32..=1 << 20)
        .prop_map(|(payload, back_bytes)| Echo { payload: payload.into(), back_bytes });
    prop_oneof![
        probe.prop_map(NodeQuery::Measure),
        Just(NodeQuery::Measured),
        ways.prop_map(NodeQuery::Ways),
        echo.prop_map(NodeQuery::Echo),
    ]
    .prop_map(|query| NodeQuestion { version: MessageVersion::CURRENT, query })
}

fn node_reply() -> impl Strategy<Value = NodeReply> {
    let stage = any::<(u32, [u64; 3])>().prop_map(|(stage, [one_ns, many_ns, rested_ns])| {
        StageMeasurement { stage, one_ns, many_ns, rested_ns }
    });
    let device = (".{0,60}", vec(stage, 0..5), any::<[u64; 3]>(), option::of(".{0,60}")).prop_map(
        |(device, stages, numbers, failure)| DeviceMeasurement {
            device,
            stages,
            resident_bytes: numbers[0],
            kv_bytes: numbers[1],
            kv_tokens: numbers[2],
            failure,
        },
    );
    let measured = (any::<u64>(), vec(device, 0..3))
        .prop_map(|(handoff_ns, devices)| NodeMeasurement { handoff_ns, devices });
    let progress = any::<(u32, u32)>().prop_map(|(done, total)| ProbeProgress { done, total });
    let answer = prop_oneof![
        progress.prop_map(NodeAnswer::Underway),
        measured.prop_map(NodeAnswer::Measured),
        vec(any::<u64>(), 1..9).prop_map(NodeAnswer::Ways),
        vec(any::<u8>(), 0..100).prop_map(|payload| NodeAnswer::Echo(payload.into())),
        failure().prop_map(NodeAnswer::Failed),
    ];
    (node(), answer).prop_map(|(node, answer)| NodeReply {
        version: MessageVersion::CURRENT,
        node,
        answer,
    })
}

fn chat() -> impl Strategy<Value = (Vec<ChatMessage>, Vec<Tool>)> {
    let call = any::<(Option<String>, String)>().prop_map(|(id, name)| ToolCall {
        id,
        kind: ToolKind::Function,
        function: FunctionCall { arguments: json!({ &name: [1.5, null] }), name },
    });
    let message = (any::<(String, String, Option<String>)>(), vec(call, 0..2)).prop_map(
        |((role, content, tool_call_id), tool_calls)| ChatMessage {
            role,
            content,
            tool_calls,
            tool_call_id,
        },
    );
    let tool = any::<(String, Option<String>, bool)>().prop_map(|(name, description, takes)| {
        let parameters = takes.then(|| json!({ "type": "object" }));
        Tool { kind: ToolKind::Function, function: Function { name, description, parameters } }
    });
    (vec(message, 0..3), vec(tool, 0..3))
}

fn prompt_request() -> impl Strategy<Value = PromptRequest> {
    let input = (option::of(chat()), any::<Option<String>>(), option::of(vec(any::<u32>(), 0..9)));
    let number = || option::of(-1e6_f32..1e6);
    let numbers = (number(), number(), any::<Option<u32>>(), number(), any::<Option<u64>>());
    let sampling = (numbers, option::of(constraint()));
    let rest = (
        option::of(TOKEN),
        any::<Option<u32>>(),
        vec(any::<String>(), 0..3),
        any::<Option<bool>>(),
        any::<Option<bool>>(),
        any::<(Option<u32>, Option<bool>)>(),
    );
    (input, sampling, rest).prop_map(|((chat, prompt, tokens), (numbers, constraint), rest)| {
        let (messages, tools) = chat.unzip();
        let (temperature, top_p, top_k, min_p, seed) = numbers;
        let (request_id, max_tokens, stop, logprobs, stream, (draft_tokens, batch)) = rest;
        let priority = |batch| if batch { Priority::Batch } else { Priority::Interactive };
        PromptRequest {
            request_id: request_id.map(|text| RequestId::new(text).expect("a token")),
            messages,
            tools: tools.unwrap_or_default(),
            prompt,
            tokens,
            max_tokens,
            temperature,
            top_p,
            top_k,
            min_p,
            seed,
            repetition_penalty: temperature,
            presence_penalty: top_p,
            frequency_penalty: min_p,
            logit_bias: top_k.into_iter().map(|token| (token, -7.5)).collect(),
            constraint,
            stop,
            logprobs,
            top_logprobs: max_tokens,
            stream,
            draft_tokens,
            draft_windows: max_tokens,
            draft_alternatives: max_tokens,
            priority: batch.map(priority),
            timings: stream,
        }
    })
}

fn logprobs() -> impl Strategy<Value = Vec<TokenLogprobs>> {
    let entry = || {
        (any::<u32>(), any::<String>(), option::of(vec(any::<u8>(), 0..4)), any::<i16>()).prop_map(
            |(token, text, bytes, eighths)| Logprob {
                token,
                text,
                bytes,
                logprob: f32::from(eighths) / 8.0,
            },
        )
    };
    vec((entry(), vec(entry(), 0..3)).prop_map(|(chosen, top)| TokenLogprobs { chosen, top }), 0..3)
}

fn step_times() -> impl Strategy<Value = StepTimes> {
    let ms = || any::<i32>().prop_map(|eighths| f64::from(eighths) / 8.0);
    (any::<u32>(), ms(), ms(), vec(ms(), 0..3)).prop_map(|(tokens, a, b, stage_queue_ms)| {
        let stage_infer_ms = stage_queue_ms.iter().map(|ms| ms * 2.0).collect();
        StepTimes { tokens, round_trip_ms: a, hops_ms: b, stage_queue_ms, stage_infer_ms }
    })
}

fn event() -> impl Strategy<Value = Event> {
    let tokens = || vec(any::<u32>(), 0..5);
    let reason = prop::sample::select(vec![
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::Cancelled,
    ]);
    // Eighths: the JSON reader may be off by the last bit of other numbers.
    let ms = || any::<i32>().prop_map(|eighths| f64::from(eighths) / 8.0);
    let timings = (ms(), ms(), vec(ms(), 0..4)).prop_map(|(a, b, stage_infer_ms)| Timings {
        queue_ms: a,
        ttft_ms: b,
        decode_tok_s: a * 2.0,
        total_ms: b * 2.0,
        stage_infer_ms,
        overhead_ms: -a,
    });
    let done = (reason, any::<[u32; 7]>(), timings, any::<Option<String>>(), option::of(tokens()));
    prop_oneof![
        (TOKEN, any::<u32>(), any::<Option<u64>>()).prop_map(|(id, prompt_tokens, seed)| {
            let request_id = RequestId::new(id).expect("a token");
            Event::Accepted { request_id, prompt_tokens, seed }
        }),
        (0_u16..4, option::of(any::<String>())).prop_map(|(stage, message)| Event::Status {
            state: RequestState::Waiting,
            stage: Some(StageIndex::new(stage)),
            message,
        }),
        (any::<u64>(), any::<String>(), tokens(), logprobs(), vec(step_times(), 0..3)).prop_map(
            |(i, text, tokens, logprobs, steps)| Event::Token { i, text, tokens, logprobs, steps }
        ),
        (done, logprobs()).prop_map(|((finish_reason, used, timings, text, tokens), logprobs)| {
            Event::Done {
                finish_reason,
                usage: Usage {
                    prompt_tokens: used[0],
                    completion_tokens: used[1],
                    cached_tokens: used[2],
                    drafted_tokens: used[3],
                    accepted_tokens: used[4],
                    steps: used[5],
                    bloat: f64::from(used[6]) / 8.0,
                },
                timings,
                text,
                tokens,
                logprobs,
            }
        }),
        failure().prop_map(|error| Event::Error {
            class: error.class,
            message: error.message,
            retry_after_ms: error.retry_after_ms,
        }),
    ]
}

fn check<M: Message + PartialEq + Debug>(message: &M) {
    let bytes = codec::encode(message).expect("encodes");
    assert_eq!(&codec::decode::<M>(&bytes).expect("decodes"), message);
}

fn check_public<T>(value: &T)
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + Debug,
{
    for content in [ContentType::Json, ContentType::MessagePack] {
        let bytes = codec::encode_public(content, value).expect("encodes");
        assert_eq!(ContentType::detect(None, &bytes), content);
        assert_eq!(ContentType::detect(Some(content.header()), &bytes), content);
        let found: T = codec::decode_public(content, &bytes).expect("decodes");
        assert_eq!(&found, value, "{content:?}");
    }
}

proptest! {
    #[test]
    fn forward_comes_back(message in forward()) {
        check(&message);
    }

    #[test]
    fn parts_come_back(
        (transfer, n_parts) in (any::<u64>(), 1_u32..8192),
        reply in option::of("[a-z.]{1,256}"),
        data in vec(any::<u8>(), 0..100),
    ) {
        let version = MessageVersion::CURRENT;
        let (index, data) = (if reply.is_some() { 0 } else { n_parts - 1 }, data.into());
        check(&Part { version, transfer, index, n_parts, reply, data });
    }

    #[test]
    fn head_comes_back(message in head()) {
        check(&message);
    }

    #[test]
    fn control_comes_back(message in control()) {
        check(&message);
    }

    #[test]
    fn control_reply_comes_back(message in control_reply()) {
        check(&message);
    }

    #[test]
    fn worker_announcement_comes_back(message in worker_announcement()) {
        check(&message);
    }

    #[test]
    fn coordinator_announcement_comes_back(message in coordinator_announcement()) {
        check(&message);
    }

    #[test]
    fn node_question_comes_back(message in node_question()) {
        check(&message);
    }

    #[test]
    fn node_reply_comes_back(message in node_reply()) {
        check(&message);
    }

    #[test]
    fn prompt_request_comes_back(request in prompt_request()) {
        check_public(&request);
    }

    #[test]
    fn event_comes_back(event in event()) {
        check_public(&event);
    }
}
