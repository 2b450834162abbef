//! The coordinator's state and how actions change it. Nothing here waits or does I/O: what is to
//! be done outside is collected as effects.
//!
//! A session's life: its text is encoded, it waits for a free place, for a worker on every stage
//! and for their `open` answers, then its prompt chunks and decode steps run until a stop. Every
//! state has a deadline, except the wait for a place, whose queue is bounded.
//!
//! The answer to a step is handled in two parts. [`State::apply`] only notes the token and makes
//! the next step; [`State::settle`] turns tokens into text and events while that step is on its
//! way. A stop string is thus found one step late: that step's answer comes for a session that no
//! longer exists and is dropped.

mod admission;
mod checks;
mod ending;
mod intake;
mod jobs;
mod placing;
mod showing;
mod stepping;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stagebus_draft::costs::StepCostModel;
use stagebus_draft::sampling::Sampler;
use stagebus_draft::windows::Fit;
use stagebus_schemas::ids::{CoordinatorId, SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement, WorkerState};
use stagebus_schemas::messages::head::HeadRow;
use stagebus_schemas::messages::public::{FinishReason, Limits, StepTimes};
use stagebus_schemas::version::MessageVersion;
use stagebus_shards::text::TextModel;
use stagebus_telemetry::{CoordinatorMetrics, CoordinatorTelemetry, Tracer};
use tracing::{info, warn};

use admission::OutputShare;
use checks::CHECK_PATIENCE;

use crate::action::{Action, Effect};
use crate::config::CoordinatorSettings;
use crate::fault::Fault;
use crate::fleet_view::{FleetView, Observed, ShardSetIdentity};
use crate::prefixes::PrefixIndex;
use crate::session::{Session, SessionState};
use crate::timings::{Smoothed, step_timeout};

/// How long answers may still come after messages may have been lost.
const LOSS_GRACE: Duration = Duration::from_secs(1);

/// Time without an event after which a client is told how its request fares.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// Share of drafted tokens that is expected to stand before any session has shown it.
const FIRST_ACCEPTANCE: f64 = 0.6;

/// What a coordinator knows of its model.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) identity: ShardSetIdentity,
    pub(crate) text: Arc<TextModel>,
    pub(crate) limits: Limits,
    pub(crate) eos_ids: Vec<u32>,
}

/// Who this coordinator is.
#[derive(Debug, Clone)]
pub(crate) struct Name {
    pub(crate) id: CoordinatorId,
    pub(crate) host: String,
    /// The worker in its process.
    pub(crate) hosted: Option<WorkerId>,
}

/// What happened since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Requests that ended with `done`.
    pub(crate) requests_done: u64,
    /// Requests that ended with `error`, refused ones included.
    pub(crate) requests_failed: u64,
    /// Requests without a reply subject.
    pub(crate) requests_ignored: u64,
    /// Tokens generated.
    pub(crate) tokens_out: u64,
    /// Tokens drafted.
    pub(crate) tokens_drafted: u64,
    /// Of these, tokens that the last stage chose too.
    pub(crate) tokens_accepted: u64,
    /// Times that a session lost its place and was replayed elsewhere.
    pub(crate) recoveries: u64,
    /// Requests whose client did not listen any more.
    pub(crate) clients_gone: u64,
    /// Answers for steps and sessions that no longer exist.
    pub(crate) late_answers: u64,
    /// Announcements of other shard sets, and of more workers than are kept.
    pub(crate) announcements_refused: u64,
}

/// What one step may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLimits {
    /// Rows of a prompt chunk.
    pub(crate) chunk_rows: usize,
    /// Rows whose tokens are wanted.
    pub(crate) wanted_rows: usize,
}

/// The state of a coordinator.
#[derive(Debug)]
pub(crate) struct State {
    name: Name,
    settings: CoordinatorSettings,
    model: Model,
    /// Most rows of a prompt chunk.
    limits: StepLimits,
    sampler: Sampler,
    fleet: FleetView,
    /// Where prompts have run lately.
    prefixes: PrefixIndex,
    sessions: HashMap<SessionId, Session>,
    /// Sessions that wait for a place, oldest first.
    queue: VecDeque<SessionId>,
    unsettled: Vec<Unsettled>,
    /// Smoothed round trip of a step of any kind.
    round_trip: Smoothed,
    /// Smoothed time from the first step to the end of a session.
    place_time: Smoothed,
    /// What sessions generate of what they may.
    output_share: OutputShare,
    /// What decode steps cost.
    costs: StepCostModel,
    /// How fast sessions were against what was expected.
    fit: Fit,
    /// Smoothed acceptance of the sessions that have ended.
    acceptance: f64,
    /// Sessions that decode.
    n_decoding: usize,
    counters: Counters,
    metrics: CoordinatorMetrics,
    tracer: Tracer,
    connected: bool,
    draining: bool,
    effects: Vec<Effect>,
}

/// New tokens whose text is not made yet.
#[derive(Debug)]
struct Unsettled {
    session: SessionId,
    /// The tokens, with the rows that chose them.
    rows: Vec<HeadRow>,
    /// Generated tokens up to the last of them.
    output_len: usize,
    /// Set with the last token.
    end: Option<FinishReason>,
    /// What their step took, if the request asked for it.
    times: Option<StepTimes>,
}

impl State {
    /// Makes the state of a coordinator that knows no worker yet.
    pub(crate) fn new(
        name: Name,
        settings: CoordinatorSettings,
        model: Model,
        limits: StepLimits,
        telemetry: CoordinatorTelemetry,
    ) -> Self {
        Self {
            fleet: FleetView::new(model.identity.clone(), name.hosted.clone()),
            name,
            settings,
            limits,
            sampler: Sampler::default(),
            model,
            prefixes: PrefixIndex::default(),
            sessions: HashMap::new(),
            queue: VecDeque::new(),
            unsettled: Vec::new(),
            round_trip: Smoothed::default(),
            place_time: Smoothed::default(),
            output_share: OutputShare::default(),
            costs: StepCostModel::default(),
            fit: Fit::default(),
            acceptance: FIRST_ACCEPTANCE,
            n_decoding: 0,
            counters: Counters::default(),
            metrics: telemetry.metrics,
            tracer: telemetry.tracer,
            connected: true,
            draining: false,
            effects: Vec::new(),
        }
    }

    /// Takes one action.
    pub(crate) fn apply(&mut self, action: Action, now: Instant) {
        match action {
            Action::Request(incoming) => self.on_request(incoming, now),
            Action::Job(job) => self.on_job(*job, now),
            Action::JobLost(job) => self.on_job_lost(job, now),
            Action::Encoded { session, outcome } => self.on_encoded(session, outcome, now),
            Action::Cancel(request) => self.on_cancel(&request, now),
            Action::Opened(answer) => self.on_open_answer(answer, now),
            Action::Checked { worker, asked, answer } => {
                self.on_checked(&worker, asked, answer, now);
            }
            Action::Head(head) => self.on_head(&head, now),
            Action::Drafted(drafted) => self.on_drafted(drafted, now),
            Action::Lost(lost) => self.on_lost(lost, now),
            Action::Worker(announcement) => {
                self.on_worker(&announcement, now);
                self.show_workers(now);
            }
            Action::Announce => {
                self.show_workers(now);
                self.announce();
            }
            Action::Unsent(session) => self.on_session_fault(session, Fault::Unsent, now),
            Action::ClientGone(reply) => self.on_client_gone(&reply, now),
            Action::MessagesLost => self.expect_losses(now, |_| true),
            Action::Disconnected => self.connected = false,
            Action::Reconnected => self.on_reconnected(now),
            Action::Tick => self.on_tick(now),
            Action::Drain => {
                self.draining = true;
                self.give_jobs_back(now);
                self.announce();
            }
            Action::Stop => self.on_stop(now),
        }
        self.admit(now);
        self.show();
    }

    /// Turns new tokens into text and events, and ends the sessions that are done.
    pub(crate) fn settle(&mut self, now: Instant) {
        for unsettled in std::mem::take(&mut self.unsettled) {
            self.settle_session(&unsettled, now);
        }
        self.admit(now);
        self.show();
    }

    /// Returns what is to be done outside, in order.
    pub(crate) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// When [`Action::Tick`] is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let (timeout, patience) = (self.step_timeout(), CHECK_PATIENCE);
        let sessions = self.sessions.values().filter_map(|session| {
            let status = session.accepted.then_some(session.last_event + STATUS_INTERVAL);
            match session.state() {
                SessionState::Routing => {
                    earliest([status, session.placement.deadline, session.placement.retry_at])
                }
                SessionState::Opening(opening) => {
                    earliest([status, Some(opening.last_check + patience)])
                }
                SessionState::Running(running) => earliest([
                    status,
                    running.deadline(timeout),
                    running.next_check(patience),
                    running.draft_deadline(),
                ]),
                SessionState::Encoding | SessionState::Queued => None,
            }
        });
        let worker = if self.connected { self.fleet.next_expiry() } else { None };
        sessions.chain(worker).min()
    }

    /// Name of this coordinator.
    pub(crate) fn id(&self) -> &CoordinatorId {
        &self.name.id
    }

    /// Whether [`State::settle`] has something to do.
    pub(crate) fn is_unsettled(&self) -> bool {
        !self.unsettled.is_empty()
    }

    /// Whether no request is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Requests under way.
    pub(crate) fn n_sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Whether every stage has a worker that takes sessions.
    pub(crate) fn has_all_stages(&self, now: Instant) -> bool {
        self.fleet.is_complete(now)
    }

    /// What happened since the start.
    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }

    fn step_timeout(&self) -> Duration {
        step_timeout(self.settings.step_timeout(), self.round_trip)
    }

    fn on_worker(&mut self, announcement: &WorkerAnnouncement, now: Instant) {
        let worker = &announcement.worker;
        match self.fleet.observe(announcement, self.settings.step_timeout(), now) {
            Observed::Joined => {
                info!(%worker, stage_index = %announcement.stage, "worker joined");
            }
            Observed::Known => {}
            Observed::Lossy => {
                warn!(%worker, stage_index = %announcement.stage, "worker may have missed messages");
                self.expect_losses(now, |route| route.contains(worker));
            }
            Observed::Stuck => {
                let (busy_ms, expected_ms) =
                    (announcement.load.busy_ms, announcement.load.expected_ms);
                warn!(%worker, stage_index = %announcement.stage, busy_ms, expected_ms, "worker is stuck");
                self.leave_worker(worker, |stage| Fault::WorkerStuck { stage }, now);
                return;
            }
            Observed::Left => {
                info!(%worker, stage_index = %announcement.stage, "worker left");
                self.on_worker_gone(worker, now);
                return;
            }
            Observed::Full { first } => {
                self.counters.announcements_refused += 1;
                if first {
                    warn!(%worker, "too many workers announce themselves, new ones are not used");
                }
                return;
            }
            Observed::Refused { first } => {
                self.counters.announcements_refused += 1;
                if first {
                    let (found, n_stages) = (&announcement.fingerprint, announcement.n_stages);
                    warn!(%worker, %found, n_stages, "worker has another shard set, not used");
                }
                return;
            }
        }
        if announcement.state == WorkerState::Ready {
            self.place_waiting(now);
        }
    }

    /// Ends the sessions of a worker that is dead or left.
    fn on_worker_gone(&mut self, worker: &WorkerId, now: Instant) {
        self.fleet.remove(worker);
        self.prefixes.remove(worker);
        self.leave_worker(worker, |stage| Fault::WorkerGone { stage }, now);
    }

    /// Takes all sessions off a worker.
    fn leave_worker(
        &mut self,
        worker: &WorkerId,
        fault: impl Fn(StageIndex) -> Fault,
        now: Instant,
    ) {
        let held: Vec<_> = self
            .sessions
            .values()
            .filter_map(|session| {
                let route = &session.running()?.route;
                let stage = self.fleet.stages().zip(route).find(|(_, held)| *held == worker)?.0;
                Some((session.id, stage))
            })
            .collect();
        for (session, stage) in held {
            self.on_session_fault(session, fault(stage), now);
        }
        self.end_opens_on(worker, now);
    }

    /// Steps under way on the routes that `concerned` names count as lost if they are not answered
    /// soon.
    fn expect_losses(&mut self, now: Instant, concerned: impl Fn(&[WorkerId]) -> bool) {
        for session in self.sessions.values_mut() {
            if let Some(running) = session.running_mut()
                && concerned(&running.route)
            {
                running.expect_loss(now + LOSS_GRACE);
            }
        }
    }

    fn on_reconnected(&mut self, now: Instant) {
        self.connected = true;
        self.fleet.restart_clocks(now);
        self.expect_losses(now, |_| true);
        // The word that a session is over may have been lost.
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        self.effects.extend(self.fleet.members().map(|(stage, worker)| Effect::Keep {
            stage,
            worker: worker.clone(),
            sessions: sessions.clone(),
        }));
    }

    fn on_tick(&mut self, now: Instant) {
        if self.connected {
            for worker in self.fleet.expire(now) {
                warn!(%worker, "worker has not announced itself, counts as dead");
                self.on_worker_gone(&worker, now);
            }
        }
        let waited = self.step_timeout();
        let silent: Vec<_> = self
            .sessions
            .values()
            .filter(|session| {
                let deadline = session.running().and_then(|running| running.deadline(waited));
                deadline.is_some_and(|deadline| deadline <= now)
            })
            .map(|session| session.id)
            .collect();
        for session in silent {
            self.on_session_fault(session, Fault::NoAnswer { waited }, now);
        }
        self.end_draft_waits(now);
        self.check_workers(now);
        self.place_waiting(now);
        self.tell_silent(now);
    }

    /// Tells clients that have heard nothing for a while how their requests fare.
    fn tell_silent(&mut self, now: Instant) {
        let is_silent =
            |session: &&Session| session.accepted && session.last_event + STATUS_INTERVAL <= now;
        let silent = self.sessions.values().filter(is_silent);
        for session in silent.map(|session| session.id).collect::<Vec<_>>() {
            self.tell_state(session, None, None, now);
        }
    }

    fn announce(&mut self) {
        self.effects.push(Effect::Announce(CoordinatorAnnouncement {
            version: MessageVersion::CURRENT,
            coordinator: self.name.id.clone(),
            model: self.model.identity.model.clone(),
            fingerprint: self.model.identity.fingerprint.clone(),
            n_stages: self.model.identity.n_stages,
            host: self.name.host.clone(),
            accepting: !self.draining,
            interval_ms: self.settings.announce_ms,
            n_sessions: u32::try_from(self.sessions.len()).unwrap_or(u32::MAX),
            requests_done: self.counters.requests_done,
            tokens_out: self.counters.tokens_out,
            tokens_drafted: self.counters.tokens_drafted,
            tokens_accepted: self.counters.tokens_accepted,
            recoveries: self.counters.recoveries,
        }));
    }
}

/// The first of the deadlines that exist.
fn earliest<const N: usize>(deadlines: [Option<Instant>; N]) -> Option<Instant> {
    deadlines.into_iter().flatten().min()
}
