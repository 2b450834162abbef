//! One sample of every internal message, with what a test does to any of them.

use std::sync::Arc;

use stagebus_schemas::codec::{self, CodecError, Message};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, ModelName, NodeId, SessionId, StageIndex, StepNumber, WorkerId,
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
    DeviceMeasurement, Echo, NodeAnswer, NodeDescription, NodeMeasurement, NodeQuery, NodeQuestion,
    NodeReply, Probe, ProbeProgress, StageMeasurement, Ways,
};
use stagebus_schemas::messages::sampling::{Sampling, TokenLogprob};
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_schemas::version::MessageVersion;

/// A message, its bytes, and its decoder with the type taken away.
pub(crate) struct Sample {
    /// Name of the sample.
    pub(crate) name: &'static str,
    /// The encoded message.
    pub(crate) bytes: Vec<u8>,
    /// Decodes a message of this type and encodes it again.
    pub(crate) recode: fn(&[u8]) -> Result<Vec<u8>, CodecError>,
}

fn sample<M: Message>(name: &'static str, message: &M) -> Sample {
    Sample {
        name,
        bytes: codec::encode(message).expect("a sample encodes"),
        recode: |bytes| codec::encode(&codec::decode::<M>(bytes)?),
    }
}

/// All samples; every variant of every enum is in one of them, error classes excepted.
pub(crate) fn all() -> Vec<Sample> {
    let action = |action| Control { version: MessageVersion::CURRENT, action };
    let outcome = |outcome| ControlReply { version: MessageVersion::CURRENT, outcome };
    let query = |query| NodeQuestion { version: MessageVersion::CURRENT, query };
    let answer = |answer| NodeReply { version: MessageVersion::CURRENT, node: node(), answer };
    let echo = Echo { payload: vec![7, 0, 255].into(), back_bytes: 64 };
    let close = Close { session: session(), epoch: Epoch::new(2) };
    let keep = Keep { coordinator: coordinator(), sessions: vec![session()] };
    vec![
        sample("forward_first", &forward_first()),
        sample("forward_f32", &forward(Dtype::F32)),
        sample("forward_f16", &forward(Dtype::F16)),
        sample("forward_bf16", &forward(Dtype::Bf16)),
        sample("forward_int8", &forward(Dtype::Int8)),
        sample("forward_held", &forward_held()),
        sample("part_first", &part(0)),
        sample("part_last", &part(1)),
        sample("head", &head()),
        sample("control_open", &action(ControlAction::Open(open()))),
        sample("control_close", &action(ControlAction::Close(close))),
        sample("control_drain", &action(ControlAction::Drain(Drain { within_ms: Some(5000) }))),
        sample("control_keep", &action(ControlAction::Keep(keep))),
        sample("control_stats", &action(ControlAction::Stats)),
        sample("control_progress", &action(ControlAction::Progress(vec![session()]))),
        sample("reply_opened", &outcome(ControlOutcome::Opened { cached_len: 32 })),
        sample("reply_closed", &outcome(ControlOutcome::Closed)),
        sample("reply_draining", &outcome(ControlOutcome::Draining)),
        sample("reply_stats", &outcome(ControlOutcome::Stats(load()))),
        sample("reply_progress", &outcome(ControlOutcome::Progress(progress()))),
        sample("reply_failed", &outcome(ControlOutcome::Failed(failure()))),
        sample("worker_joining", &worker_announcement(WorkerState::Joining)),
        sample("worker_starting", &worker_announcement(WorkerState::Starting)),
        sample("worker_ready", &worker_announcement(WorkerState::Ready)),
        sample("worker_draining", &worker_announcement(WorkerState::Draining)),
        sample("worker_leaving", &worker_announcement(WorkerState::Leaving)),
        sample("coordinator", &coordinator_announcement()),
        sample("node_describe", &query(NodeQuery::Describe)),
        sample("node_measure", &query(NodeQuery::Measure(probe()))),
        sample("node_measured", &query(NodeQuery::Measured)),
        sample("node_ways", &query(NodeQuery::Ways(ways()))),
        sample("node_echo", &query(NodeQuery::Echo(echo))),
        sample("node_reply_here", &answer(NodeAnswer::Here(description()))),
        sample("node_reply_begun", &answer(NodeAnswer::Begun)),
        sample(
            "node_reply_underway",
            &answer(NodeAnswer::Underway(ProbeProgress { done: 3, total: 12 })),
        ),
        sample("node_reply_measured", &answer(NodeAnswer::Measured(measurement()))),
        sample("node_reply_ways", &answer(NodeAnswer::Ways(vec![200_000, 5_000_000_000]))),
        sample("node_reply_echo", &answer(NodeAnswer::Echo(vec![0, 255].into()))),
        sample("node_reply_failed", &answer(NodeAnswer::Failed(failure()))),
    ]
}

fn node() -> NodeId {
    NodeId::new("n-0123456789ab").expect("an id")
}

fn probe() -> Probe {
    Probe {
        model: model(),
        fingerprint: "f".repeat(64),
        split: vec![1, 1, 27, 1],
        weights: "exact".into(),
        floats: Some("int4".into()),
        many_rows: 8,
    }
}

fn ways() -> Ways {
    Ways { to: node(), bytes: 2304, back_bytes: 64, count: 20 }
}

fn description() -> NodeDescription {
    NodeDescription {
        name: "desk-4".into(),
        host: "desk-4.example".into(),
        n_cores: 8,
        memory_bytes: 16_000_000_000,
        free_bytes: 9_000_000_000,
        devices: vec!["CPU".into(), "GPU".into()],
        engine: "auto".into(),
        profile: "fast".into(),
        threads: 4,
        has_model: true,
    }
}

fn measurement() -> NodeMeasurement {
    let measured = DeviceMeasurement {
        device: "CPU".into(),
        stages: vec![StageMeasurement {
            stage: 2,
            one_ns: 250_000,
            many_ns: 600_000,
            rested_ns: 300_000,
        }],
        resident_bytes: 5_000_000_000,
        kv_bytes: 4_000_000,
        kv_tokens: 30_000,
        failure: None,
    };
    let failed = DeviceMeasurement {
        device: "GPU".into(),
        stages: Vec::new(),
        resident_bytes: 0,
        kv_bytes: 0,
        kv_tokens: 0,
        failure: Some("no such device".into()),
    };
    NodeMeasurement { handoff_ns: 40_000, devices: vec![measured, failed] }
}

fn session() -> SessionId {
    SessionId::from_u64(0x0123_4567_89ab_cdef)
}

fn worker() -> WorkerId {
    WorkerId::new("w1-0123456789ab").expect("an id")
}

fn coordinator() -> CoordinatorId {
    CoordinatorId::new("c-0123456789ab").expect("an id")
}

fn model() -> ModelName {
    ModelName::new("smollm2-135m").expect("a name")
}

fn failure() -> ErrorReply {
    ErrorReply {
        class: ErrorClass::Overloaded,
        message: "no room for a session".into(),
        retry_after_ms: Some(250),
    }
}

fn trace(stage: u16) -> StageTime {
    StageTime {
        stage: StageIndex::new(stage),
        queue_us: 20,
        infer_us: 5000,
        rows: 6,
        masked: 2,
        total_us: 5040,
    }
}

/// Two decode rows of one session for stage 0.
fn forward_first() -> Forward {
    Forward {
        version: MessageVersion::CURRENT,
        from: None,
        steps: vec![Step {
            session: session(),
            epoch: Epoch::FIRST,
            step: StepNumber::new(7),
            start_pos: 70_000,
            phase: Phase::Decode,
            tokens: vec![1, 49_151],
            wanted: vec![0, 1],
            held_from: None,
            trace: Vec::new(),
        }],
        hidden: None,
    }
}

/// The first or the last of two parts.
fn part(index: u32) -> Part {
    Part {
        version: MessageVersion::CURRENT,
        transfer: u64::MAX - 1,
        index,
        n_parts: 2,
        reply: (index == 0).then(|| "stagebus.v1.tiny.lost.c.0000000000000001.0.4.2".to_owned()),
        data: vec![7, 0, 255].into(),
    }
}

/// A prefill chunk and a decode row for a later stage.
pub(crate) fn forward(dtype: Dtype) -> Forward {
    let hidden_dim = 4_u32;
    let step = |session, phase, tokens: Vec<u32>, wanted| Step {
        session: SessionId::from_u64(session),
        epoch: Epoch::new(1),
        step: StepNumber::new(300),
        start_pos: 0,
        phase,
        tokens,
        wanted,
        held_from: None,
        trace: vec![trace(0)],
    };
    let n_bytes = 3 * dtype.row_bytes(hidden_dim as usize);
    let data: Vec<u8> = (0..=u8::MAX).cycle().take(n_bytes).collect();
    Forward {
        version: MessageVersion::CURRENT,
        from: Some(worker()),
        steps: vec![
            step(1, Phase::Prefill, vec![5, 6], vec![]),
            step(u64::MAX, Phase::Decode, vec![9], vec![0]),
        ],
        hidden: Some(Tensor { dtype, n_rows: 3, hidden_dim, data: data.into() }),
    }
}

/// A replayed chunk that the second stage holds.
fn forward_held() -> Forward {
    let Forward { version, from, mut steps, .. } = forward(Dtype::F32);
    steps.truncate(1);
    steps[0].held_from = Some(StageIndex::new(1));
    Forward { version, from, steps, hidden: None }
}

fn head() -> Head {
    Head {
        version: MessageVersion::CURRENT,
        stage: StageIndex::new(1),
        worker: worker(),
        steps: vec![HeadStep {
            session: session(),
            epoch: Epoch::new(1),
            step: StepNumber::new(8),
            rows: vec![
                HeadRow::new(41, 28),
                HeadRow {
                    pos: 42,
                    token: 49_151,
                    logprob: Some(-0.5),
                    top: vec![TokenLogprob { token: 49_151, logprob: -0.5 }],
                },
            ],
            logits: None,
            trace: vec![trace(0), trace(1)],
        }],
        faults: vec![StepFault {
            session: session(),
            epoch: Epoch::FIRST,
            step: StepNumber::FIRST,
            error: ErrorReply::new(ErrorClass::StaleEpoch, "epoch 0 is fenced off by 1"),
        }],
    }
}

pub(crate) fn open() -> Open {
    Open {
        session: session(),
        epoch: Epoch::FIRST,
        coordinator: coordinator(),
        route: vec![WorkerId::new("w0-a").expect("an id"), worker()],
        fingerprint: "f".repeat(64),
        prompt: vec![1, 2, 3],
        prompt_len: 2,
        max_len: 2048,
        sampling: Sampling {
            temperature: 0.75,
            logit_bias: vec![(49_151, -100.0)],
            seed: u64::MAX,
            top_logprobs: Some(5),
            constraint: Some(Arc::new(Constraint::Regex { pattern: "a|b".to_owned() })),
            ..Sampling::default()
        },
        head: HeadMode::Full,
        priority: Priority::Batch,
    }
}

fn progress() -> Vec<SessionProgress> {
    let steps = StepProgress {
        epoch: Epoch::new(1),
        expected: StepNumber::new(301),
        unsent: StepNumber::new(300),
    };
    vec![
        SessionProgress { session: session(), steps: Some(steps) },
        SessionProgress { session: SessionId::from_u64(1), steps: None },
    ]
}

fn load() -> WorkerLoad {
    WorkerLoad {
        n_sessions: 3,
        max_sessions: 16,
        queue_depth: 2,
        kv_tokens: 5000,
        kv_bytes: 5_000_000_000,
        kv_max_bytes: 8_000_000_000,
        steps_completed: 123_456,
        rows_completed: 7_654_321,
        decode_us: 5000,
        prefill_row_us: 800,
        busy_ms: 12,
        expected_ms: 9,
        losses: 1,
    }
}

fn worker_announcement(state: WorkerState) -> WorkerAnnouncement {
    WorkerAnnouncement {
        version: MessageVersion::CURRENT,
        worker: worker(),
        model: model(),
        fingerprint: "f".repeat(64),
        stage: StageIndex::new(1),
        n_stages: 2,
        first_layer: 16,
        end_layer: 30,
        device: "CPU".into(),
        profile: "exact".into(),
        host: "desk-4".into(),
        state,
        interval_ms: 500,
        load: load(),
    }
}

fn coordinator_announcement() -> CoordinatorAnnouncement {
    CoordinatorAnnouncement {
        version: MessageVersion::CURRENT,
        coordinator: coordinator(),
        model: model(),
        fingerprint: "f".repeat(64),
        n_stages: 2,
        host: "desk-1".into(),
        accepting: true,
        interval_ms: 500,
        n_sessions: 4,
        requests_done: 1000,
        tokens_out: 5_000_000_000,
        tokens_drafted: 4_000_000_000,
        tokens_accepted: 3_000_000,
        recoveries: 5,
    }
}
