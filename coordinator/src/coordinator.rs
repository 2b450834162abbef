//! The owner task: waits for what happens, lets the state take it, does what the state wants.
//!
//! ```text
//! prompt cancel head lost unheard fleet probe ─┐
//! connection events, timer, shutdown ──┼─► select ─► State::apply ─► perform ─► broker
//! tasks: encode, open, check, jobs ────┘             State::settle ─► perform ─► broker
//!            ▲                                                           │
//!            └───────────────────────────────────────────────────────────┘
//! ```
//! The owner runs where [`run`] is awaited. Its only tasks are short: the encoding of one text (on
//! a blocking thread), one `open` and one question to a worker (which have timeouts). They live in one `JoinSet`, their
//! number is bounded by the requests under way, and they end with the owner.

mod delivery;
mod steps;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_bus::{Bus, BusOptions, RequestError, Role};
use stagebus_draft::constraint::{Constraint, Grammars};
use stagebus_schemas::ids::{CoordinatorId, ModelName, SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::control::{
    Control, ControlAction, ControlOutcome, ControlReply, HeadMode, Keep, Open,
};
use stagebus_schemas::messages::forward::MAX_ROWS;
use stagebus_schemas::messages::public::{Limits, PromptInput};
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::trace::TraceContext;
use stagebus_schemas::version::MessageVersion;
use stagebus_shards::ShardSet;
use stagebus_shards::text::TextModel;
use stagebus_telemetry::{CoordinatorMetrics, mirror};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::action::{Action, CheckAnswer, Effect, OpenAnswer, OpenFailure};
use crate::client::Client;
use crate::config::CoordinatorConfig;
use crate::drafting::{self, DraftCommand, DraftHost};
use crate::encoding;
use crate::error::CoordinatorError;
use crate::fleet_view::ShardSetIdentity;
use crate::inputs::{Inputs, Wake};
use crate::jobs::Jobs;
use crate::outbox::Outboxes;
use crate::prefill::{MIN_CHUNK_ROWS, logits_rows_per_message, rows_per_message};
use crate::state::{Model, Name, State, StepLimits};
use steps::StepMessages;

/// How long the start waits for a broker that is not there yet.
pub(crate) const CONNECT_WAIT: Duration = Duration::from_secs(10);

/// Messages that wait in one subscription. Head rows are bounded by the steps under way; prompts
/// beyond this number, come faster than they can be refused, are dropped by the client.
const SUBSCRIPTION_CAPACITY: usize = 8192;

/// How long the last messages may take to leave at the end.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a question whether a worker lives waits for the answer. Silence does not make the
/// worker dead: it is asked again.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);

/// What a coordinator says when it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ready {
    /// True.
    pub ready: bool,
    /// `coordinator`.
    pub role: &'static str,
    /// Name of this start.
    pub id: CoordinatorId,
    /// The model served.
    pub model: ModelName,
    /// Number of stages.
    pub stages: u16,
    /// Whether durable jobs are taken.
    pub jobs: bool,
    /// The worker in its process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosted: Option<WorkerId>,
}

/// Runs a coordinator until `shutdown` is cancelled, then lets the requests under way finish.
/// Calls `on_ready` once requests are taken.
///
/// # Errors
/// [`CoordinatorError`]: it cannot start, the broker is lost for good, or requests were cut off at
/// the end.
pub async fn run(
    config: CoordinatorConfig,
    shutdown: CancellationToken,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), CoordinatorError> {
    config.settings.validate()?;
    if config.settings.host_stage0 && config.hosted.is_none() {
        return Err(CoordinatorError::NoHost);
    }
    let loaded = load(&config).await?;
    let (model, hidden_dim) = (loaded.model, loaded.hidden_dim);
    let id = CoordinatorId::random();
    let options = BusOptions {
        connect_wait: CONNECT_WAIT,
        subscription_capacity: SUBSCRIPTION_CAPACITY,
        switch: config.hosted.as_ref().map(|hosted| hosted.switch.clone()),
        ..BusOptions::from_settings(
            &config.broker,
            Role::Coordinator(&model.identity.model),
            &format!("coordinator {id}"),
        )?
    };
    let mut settings = config.settings.clone();
    if matches!(loaded.draft, DraftHost::Off) {
        settings.max_draft_tokens = 0;
    }
    let bus = Bus::connect(options).await?;
    let limits = StepLimits {
        chunk_rows: max_chunk_rows(&config, &model, hidden_dim, bus.max_payload())?,
        wanted_rows: max_wanted_rows(&config, &model, bus.max_payload())?,
    };
    let subjects = Subjects::new(&model.identity.model);
    let jobs = Jobs::open(&bus, &subjects, &id, &settings).await?;
    let ready = Ready {
        jobs: jobs.are_on(),
        ready: true,
        role: "coordinator",
        id: id.clone(),
        model: model.identity.model.clone(),
        stages: model.identity.n_stages,
        hosted: config.hosted.map(|hosted| hosted.worker),
    };
    let inputs = Inputs::subscribe(&bus, &subjects, &id).await?;
    let text = Arc::clone(&model.text);
    let vocab_size = model.limits.vocab_size as usize;
    let grammars = Grammars::new(Arc::clone(&text), vocab_size, &model.eos_ids);
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let name = Name { id, host, hosted: ready.hosted.clone() };
    let coordinator = Coordinator {
        open_timeout: config.settings.open_timeout(),
        drain: config.settings.drain(),
        announce: config.settings.announce(),
        state: State::new(name, settings, model, limits, config.telemetry.clone()),
        metrics: config.telemetry.metrics,
        draft: loaded.draft,
        outboxes: Outboxes::new(config.settings.client_wait()),
        broken_at: None,
        steps: StepMessages::default(),
        bus: bus.clone(),
        subjects,
        text,
        grammars: Arc::new(grammars),
        inputs,
        jobs,
        tasks: JoinSet::new(),
        shutdown,
    };
    let wait_for_workers = config.wait_for_workers;
    let outcome = coordinator.serve(wait_for_workers, || on_ready(&ready)).await;
    if let Err(error) = bus.drain(FLUSH_TIMEOUT).await {
        warn!(%error, "last messages may not have left");
    }
    outcome
}

/// What is read at the start.
struct Loaded {
    model: Model,
    hidden_dim: usize,
    draft: DraftHost,
}

/// Reads the shard set's text files and loads the drafter, off the async threads.
async fn load(config: &CoordinatorConfig) -> Result<Loaded, CoordinatorError> {
    let (path, settings) = (config.shards.clone(), config.settings.clone());
    let loading = tokio::task::spawn_blocking(move || {
        let shards = ShardSet::open(&path)?;
        shards.verify_text()?;
        let draft = drafting::start(&settings, &shards)?;
        let hidden_dim = shards.manifest.dims.hidden_dim;
        Ok(Loaded { model: load_model(shards, &path)?, hidden_dim, draft })
    });
    loading.await.map_err(|error| CoordinatorError::Thread(error.into()))?
}

fn load_model(shards: ShardSet, path: &Path) -> Result<Model, CoordinatorError> {
    let text = Arc::new(TextModel::load(path)?);
    let manifest = shards.manifest;
    let n_stages = manifest.n_stages();
    let identity = ShardSetIdentity {
        model: ModelName::new(manifest.model)?,
        fingerprint: manifest.fingerprint,
        n_stages: u16::try_from(n_stages).map_err(|_too_large| CoordinatorError::Dimension {
            name: "number of stages",
            found: n_stages,
        })?,
    };
    let model = Model {
        identity,
        text,
        limits: Limits::new(
            dimension("context_length", manifest.dims.context_length)?,
            dimension("vocab_size", manifest.dims.vocab_size)?,
        ),
        eos_ids: manifest.eos_ids,
    };
    Ok(model)
}

fn dimension(name: &'static str, found: usize) -> Result<u32, CoordinatorError> {
    u32::try_from(found).map_err(|_too_large| CoordinatorError::Dimension { name, found })
}

/// Prompt rows of one step: as configured, but no more than fit a message between stages.
fn max_chunk_rows(
    config: &CoordinatorConfig,
    model: &Model,
    hidden_dim: usize,
    max_payload: usize,
) -> Result<usize, CoordinatorError> {
    let configured = config.settings.prefill_chunk;
    if model.identity.n_stages == 1 {
        return Ok(configured);
    }
    let rows = rows_per_message(max_payload, hidden_dim);
    if rows < MIN_CHUNK_ROWS {
        let needed = MIN_CHUNK_ROWS;
        return Err(CoordinatorError::MaxPayload { max_payload, rows, needed, hidden_dim });
    }
    Ok(configured.min(rows))
}

/// Rows of one step whose tokens are wanted: what fits a message if it carries their logits.
fn max_wanted_rows(
    config: &CoordinatorConfig,
    model: &Model,
    max_payload: usize,
) -> Result<usize, CoordinatorError> {
    if config.settings.head == HeadMode::Token {
        return Ok(MAX_ROWS);
    }
    let vocab_size = model.limits.vocab_size;
    match logits_rows_per_message(max_payload, vocab_size as usize) {
        0 => Err(CoordinatorError::LogitsPayload { max_payload, vocab_size }),
        rows => Ok(rows),
    }
}

/// The owner.
struct Coordinator {
    state: State,
    bus: Bus,
    subjects: Subjects,
    text: Arc<TextModel>,
    grammars: Arc<Grammars>,
    inputs: Inputs,
    jobs: Jobs,
    tasks: JoinSet<Action>,
    draft: DraftHost,
    /// Events that may have to be sent again.
    outboxes: Outboxes,
    /// When the connection to the broker broke, while it is away.
    broken_at: Option<Instant>,
    /// Steps that leave when the effects at hand are done.
    steps: StepMessages,
    metrics: CoordinatorMetrics,
    shutdown: CancellationToken,
    open_timeout: Duration,
    drain: Duration,
    announce: Duration,
}

impl Coordinator {
    async fn serve(
        mut self,
        wait_for_workers: bool,
        on_ready: impl FnOnce(),
    ) -> Result<(), CoordinatorError> {
        let mut on_ready = Some(on_ready);
        let mut probed = false;
        let mut drain_deadline = None;
        let mut announce = interval(self.announce);
        announce.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Our own announcement comes back after the probe: by then a refusal, which another task
            // brings, has been heard.
            let announced = probed;
            let wake = tokio::select! {
                wake = self.select(drain_deadline) => wake?,
                _ = announce.tick() => Wake::Act(Action::Announce),
            };
            match wake {
                Wake::Act(action) => self.handle(action).await,
                Wake::Nothing => {}
                Wake::Unheard(unheard) => self.on_unheard(unheard),
                Wake::Outboxes => self.tend_outboxes().await,
                Wake::Probed => {
                    probed = true;
                    self.handle(Action::Announce).await;
                }
                Wake::Shutdown => {
                    drain_deadline = Some(Instant::now() + self.drain);
                    self.jobs.stop();
                    self.leave_queue_group().await;
                    self.handle(Action::Drain).await;
                }
                Wake::DrainDeadline => {
                    let n_sessions = self.state.n_sessions();
                    self.handle(Action::Stop).await;
                    self.log_end();
                    return Err(CoordinatorError::DrainDeadline { n_sessions });
                }
            }
            if announced
                && (!wait_for_workers || self.state.has_all_stages(Instant::now()))
                && let Some(on_ready) = on_ready.take()
            {
                on_ready();
            }
            if self.jobs.may_pull() && self.state.has_job_room(Instant::now()) {
                self.jobs.pull();
            }
            if drain_deadline.is_some()
                && self.inputs.has_left_queue_group()
                && self.state.is_idle()
                && self.jobs.is_idle()
            {
                self.log_end();
                return Ok(());
            }
        }
    }

    /// Waits for the next thing to do.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped: every branch is cancel safe.
    async fn select(&mut self, drain_deadline: Option<Instant>) -> Result<Wake, CoordinatorError> {
        let next_deadline = self.state.next_deadline();
        let next_event = self.outboxes.next_deadline();
        let wake = tokio::select! {
            wake = self.inputs.next() => wake?,
            action = self.jobs.next() => action.map_or(Wake::Nothing, Wake::Act),
            drafted = self.draft.answers() => Wake::Act(Action::Drafted(drafted)),
            Some(done) = self.tasks.join_next() => match done {
                Ok(action) => Wake::Act(action),
                Err(error) => {
                    // Tasks catch their panics and are never aborted.
                    error!(%error, "task failed");
                    Wake::Nothing
                }
            },
            () = at(next_deadline) => Wake::Act(Action::Tick),
            () = at(next_event) => Wake::Outboxes,
            () = at(drain_deadline) => Wake::DrainDeadline,
            () = self.shutdown.cancelled(), if drain_deadline.is_none() => Wake::Shutdown,
        };
        Ok(wake)
    }

    /// Takes an action. The next step leaves before its token becomes text: the yield lets the
    /// connection write it when both run on one thread.
    async fn handle(&mut self, action: Action) {
        match action {
            Action::Disconnected => self.broken_at = Some(Instant::now()),
            Action::Reconnected => {
                if let Some(broken) = self.broken_at.take() {
                    self.outboxes.reconnected(broken, Instant::now());
                }
            }
            _ => {}
        }
        mirror(&self.metrics.slow_consumer, self.bus.slow_consumer_reports());
        mirror(&self.metrics.reconnects, self.bus.reconnects());
        self.state.apply(action, Instant::now());
        self.perform().await;
        if self.state.is_unsettled() {
            tokio::task::yield_now().await;
            self.state.settle(Instant::now());
            self.perform().await;
        }
    }

    /// Does what the state wants. What cannot be sent ends its session, which may want more.
    async fn perform(&mut self) {
        loop {
            let effects = self.state.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                if let Err(session) = self.perform_one(effect).await {
                    self.state.apply(Action::Unsent(session), Instant::now());
                }
            }
            self.send_steps().await;
        }
    }

    /// Tells the drafter, and the state what came of it at once.
    fn draft(&mut self, command: DraftCommand) {
        let drafted = self.draft.give(command);
        if !drafted.is_empty() {
            self.state.apply(Action::Drafted(drafted), Instant::now());
        }
    }

    /// # Errors
    /// The session whose event could not be sent.
    async fn perform_one(&mut self, effect: Effect) -> Result<(), SessionId> {
        match effect {
            Effect::Step { worker, step } => self.steps.add(worker, step),
            Effect::Draft(command) => self.draft(command),
            Effect::Event { session, client: Client { job: Some(job), .. }, event } => {
                if !self.jobs.store(job, event) {
                    session.map_or(Ok(()), Err)?;
                }
            }
            // The last event of a job says that it is the last.
            Effect::EndOfEvents { client: Client { job: Some(_), .. } } => {}
            Effect::GiveBack(job) => self.jobs.give_back(job),
            Effect::Event { session, client, event } => {
                if let Err(error) = self.send_event(&client, &event).await {
                    warn!(subject = %client.reply, %error, "event was not sent");
                    session.map_or(Ok(()), Err)?;
                }
            }
            Effect::EndOfEvents { client } => {
                if let Err(error) = self.send_end(&client).await {
                    warn!(subject = %client.reply, %error, "end of events was not sent");
                }
            }
            Effect::Encode { session, input, constraint } => {
                self.spawn_encode(session, input, constraint);
            }
            Effect::Open { stage, worker, open, trace } => {
                self.spawn_open(stage, worker, open, trace);
            }
            Effect::Check { stage, worker, sessions } => {
                self.spawn_check(stage, worker, sessions);
            }
            Effect::Close { stage, worker, close } => {
                self.tell_worker(stage, &worker, ControlAction::Close(close)).await;
            }
            Effect::Keep { stage, worker, sessions } => {
                let keep = Keep { coordinator: self.state.id().clone(), sessions };
                self.tell_worker(stage, &worker, ControlAction::Keep(keep)).await;
            }
            Effect::Announce(announcement) if self.bus.is_connected() => {
                let subject = self.subjects.coordinator(self.state.id());
                if let Err(error) = self.bus.publish(&subject, &announcement).await {
                    debug!(%error, "announcement was not sent");
                }
            }
            // It would be out of date when it leaves.
            Effect::Announce(_) => {}
        }
        Ok(())
    }

    /// Tells a worker something that it need not answer. What is lost because the broker is away
    /// is made good when it is back.
    async fn tell_worker(&mut self, stage: StageIndex, worker: &WorkerId, action: ControlAction) {
        if !self.bus.is_connected() {
            return;
        }
        let subject = self.subjects.control(stage, worker);
        if let Err(error) = self.bus.publish(&subject, &control(action)).await {
            warn!(stage_index = %stage, %error, "worker was not told");
        }
    }

    fn spawn_encode(
        &mut self,
        session: SessionId,
        input: PromptInput,
        constraint: Option<Arc<Constraint>>,
    ) {
        let (text, grammars) = (Arc::clone(&self.text), Arc::clone(&self.grammars));
        self.tasks.spawn_blocking(move || {
            let outcome = encoding::encode(&text, &grammars, input, constraint.as_deref());
            Action::Encoded { session, outcome }
        });
    }

    fn spawn_open(
        &mut self,
        stage: StageIndex,
        worker: WorkerId,
        open: Open,
        trace: Option<TraceContext>,
    ) {
        let (bus, timeout) = (self.bus.clone(), self.open_timeout);
        let subject = self.subjects.control(stage, &worker);
        let (session, epoch) = (open.session, open.epoch);
        self.tasks.spawn(async move {
            let request = control(ControlAction::Open(open));
            let answer = bus
                .request_in_trace::<Control, ControlReply>(&subject, &request, timeout, trace)
                .await;
            let outcome = match answer.map(|reply| reply.outcome) {
                Ok(ControlOutcome::Opened { cached_len }) => Ok(cached_len),
                Ok(ControlOutcome::Failed(error)) => Err(OpenFailure::Refused(error)),
                Err(RequestError::NoResponders { .. }) => Err(OpenFailure::Gone),
                Ok(other) => {
                    warn!(session_id = %session, stage_index = %stage, ?other, "wrong answer");
                    Err(OpenFailure::Silent)
                }
                Err(error) => {
                    warn!(session_id = %session, stage_index = %stage, %error, "open failed");
                    Err(OpenFailure::Silent)
                }
            };
            Action::Opened(OpenAnswer { session, epoch, stage, worker, outcome })
        });
    }

    fn spawn_check(&mut self, stage: StageIndex, worker: WorkerId, sessions: Vec<SessionId>) {
        let bus = self.bus.clone();
        let subject = self.subjects.control(stage, &worker);
        self.tasks.spawn(async move {
            let request = control(ControlAction::Progress(sessions));
            let asked = Instant::now();
            let answer =
                bus.request::<Control, ControlReply>(&subject, &request, CHECK_TIMEOUT).await;
            let answer = match answer.map(|reply| reply.outcome) {
                Ok(ControlOutcome::Progress(sessions)) => CheckAnswer::Progress(sessions),
                Err(RequestError::NoResponders { .. }) => CheckAnswer::Gone,
                Ok(_) | Err(_) => CheckAnswer::Silent,
            };
            Action::Checked { worker, asked, answer }
        });
    }

    async fn leave_queue_group(&mut self) {
        let n_sessions = self.state.n_sessions();
        info!(n_sessions, "draining: no new requests");
        if let Err(error) = self.inputs.leave_queue_group().await {
            warn!(%error, "queue group was not left");
        }
    }

    fn log_end(&self) {
        let counters = self.state.counters();
        info!(?counters, slow_consumers = self.bus.slow_consumer_reports(), "coordinator ends");
    }
}

fn control(action: ControlAction) -> Control {
    Control { version: MessageVersion::CURRENT, action }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
