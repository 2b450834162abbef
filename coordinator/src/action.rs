//! What reaches the coordinator, and what it does to the outside.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use stagebus_draft::constraint::{Constraint, Guide};
use stagebus_schemas::cloud_events::PublicHeaders;
use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{Epoch, RequestId, SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::control::{Close, Open, SessionProgress};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement};
use stagebus_schemas::messages::forward::Step;
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::messages::public::{Event, PromptInput};
use stagebus_schemas::subjects::LostStep;
use stagebus_schemas::trace::TraceContext;

use crate::client::Client;
use crate::drafting::{DraftCommand, Drafted};
use crate::jobs::{JobKey, JobStart};

/// One thing that happened. [`crate::state::State::apply`] handles each without waiting.
#[derive(Debug)]
pub(crate) enum Action {
    /// A request on the prompt subject.
    Request(Incoming),
    /// A job from the queue.
    Job(Box<JobStart>),
    /// A job is out of our hands: what still runs of it is for nobody.
    JobLost(JobKey),
    /// A request's text has become token ids, and its constraint is compiled.
    Encoded { session: SessionId, outcome: Result<Encoded, ErrorReply> },
    /// A client wants the end of its request.
    Cancel(RequestId),
    /// A worker answered an `open`, or did not.
    Opened(OpenAnswer),
    /// A worker was asked at that moment whether it lives and how far its sessions are.
    Checked { worker: WorkerId, asked: Instant, answer: CheckAnswer },
    /// Rows or faults came from a stage.
    Head(Head),
    /// Drafts have come.
    Drafted(Vec<Drafted>),
    /// The broker says that nobody heard a step.
    Lost(LostStep),
    /// A worker announced itself.
    Worker(WorkerAnnouncement),
    /// Somebody asked who is there, or the time for an announcement has come.
    Announce,
    /// A step or an event of a session could not be handed to the broker.
    Unsent(SessionId),
    /// Nobody hears the events to this reply subject.
    ClientGone(Arc<str>),
    /// Messages to this coordinator may be lost.
    MessagesLost,
    /// The connection to the broker broke.
    Disconnected,
    /// The connection to the broker stands again: messages may be lost.
    Reconnected,
    /// A deadline has passed.
    Tick,
    /// Take no new requests.
    Drain,
    /// End what still runs.
    Stop,
}

/// What a request is once its text and its constraint have been read.
#[derive(Debug)]
pub(crate) struct Encoded {
    /// Token ids of the prompt.
    pub(crate) tokens: Vec<u32>,
    /// The compiled constraint, if there is one.
    pub(crate) guide: Option<Guide>,
}

/// A request as it came.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// The bytes.
    pub(crate) payload: Bytes,
    /// What its headers say of them.
    pub(crate) headers: PublicHeaders<'static>,
    /// Who gets the events; nobody without a reply subject outside our own.
    pub(crate) client: Option<Client>,
    /// The client's span.
    pub(crate) trace: Option<TraceContext>,
}

/// The outcome of one `open`.
#[derive(Debug)]
pub(crate) struct OpenAnswer {
    /// The session.
    pub(crate) session: SessionId,
    /// Epoch that was to be opened.
    pub(crate) epoch: Epoch,
    /// Stage of the worker.
    pub(crate) stage: StageIndex,
    /// The worker.
    pub(crate) worker: WorkerId,
    /// Length of the cached prefix in tokens, or why the session is not open.
    pub(crate) outcome: Result<u32, OpenFailure>,
}

/// Why a worker did not open a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OpenFailure {
    /// Nobody listens on its control subject.
    Gone,
    /// No valid answer came in time; it may have opened the session.
    Silent,
    /// It refused.
    Refused(ErrorReply),
}

/// What came of a question to a worker.
#[derive(Debug)]
pub(crate) enum CheckAnswer {
    /// Nobody listens there.
    Gone,
    /// No valid answer came in time, which proves nothing.
    Silent,
    /// It lives, and has got so far with the sessions that it was asked for.
    Progress(Vec<SessionProgress>),
}

/// What is to be done outside, in order.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Turn the text of a request into token ids and compile its constraint, off the owner's task.
    Encode { session: SessionId, input: PromptInput, constraint: Option<Arc<Constraint>> },
    /// Ask a worker to open a session, as a part of a trace or not.
    Open { stage: StageIndex, worker: WorkerId, open: Open, trace: Option<TraceContext> },
    /// Tell a worker to end a session.
    Close { stage: StageIndex, worker: WorkerId, close: Close },
    /// Tell a worker which sessions of this coordinator it is to keep.
    Keep { stage: StageIndex, worker: WorkerId, sessions: Vec<SessionId> },
    /// Ask a worker whether it lives, and how far these sessions are.
    Check { stage: StageIndex, worker: WorkerId, sessions: Vec<SessionId> },
    /// Send rows to the first stage.
    Step { worker: WorkerId, step: Step },
    /// Tell the drafter something.
    Draft(DraftCommand),
    /// Send an event to a client.
    Event { session: Option<SessionId>, client: Client, event: Event },
    /// End a client's event stream.
    EndOfEvents { client: Client },
    /// Give a job back to the queue.
    GiveBack(JobKey),
    /// Announce this coordinator.
    Announce(CoordinatorAnnouncement),
}
