//! Where drafts are made: the owner asks, and hears back.
//!
//! Prompt look-up takes microseconds and runs where it is asked. A draft model runs on a thread of
//! its own, `draft`; whatever waits there when it is free becomes one micro-batch. A session waits
//! for one draft at a time; an order that is out of date when the next one comes is not carried
//! out, so what waits is bounded by the sessions.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use stagebus_draft::constraint::Guide;
use stagebus_draft::drafter::{
    Doubt, DraftRequest, Drafter, HybridDrafter, ModelDrafter, NgramDrafter,
};
use stagebus_draft::sampling::SamplingParams;
use stagebus_engine::{EngineKind, EngineOptions, SessionKey};
use stagebus_schemas::ids::SessionId;
use stagebus_settings::find_openvino;
use stagebus_shards::ShardSet;
use tokio::sync::mpsc;
use tracing::{error, warn};

use crate::config::{CoordinatorSettings, DraftChoice};
use crate::error::CoordinatorError;

/// Commands beyond the channel's capacity after which the drafter counts as hung.
const MAX_WAITING: usize = 4096;

/// One session's wish for a draft.
#[derive(Debug, Clone)]
pub(crate) struct DraftOrder {
    /// The session.
    pub(crate) session: SessionId,
    /// Number of the wish within the session.
    pub(crate) ticket: u64,
    /// Tokens that came to stand since the last wish.
    pub(crate) accepted: Vec<u32>,
    /// Tokens after those that were drafted before and do not stand yet.
    pub(crate) assumed: Vec<u32>,
    /// Most tokens to draft.
    pub(crate) n: usize,
    /// How the last stage will choose; two `top_logprobs` ask for doubts.
    pub(crate) params: Arc<SamplingParams>,
}

/// What the drafter is told.
#[derive(Debug)]
pub(crate) enum DraftCommand {
    /// A session starts with its prompt, and its constraint.
    Open(SessionId, Vec<u32>, Option<Guide>),
    /// A session wants a draft.
    Draft(DraftOrder),
    /// A session has ended.
    Close(SessionId),
}

/// The answer to one [`DraftOrder`].
#[derive(Debug, PartialEq)]
pub(crate) struct Drafted {
    /// The session.
    pub(crate) session: SessionId,
    /// Number of the wish.
    pub(crate) ticket: u64,
    /// What was drafted; `None` if the drafter failed.
    pub(crate) tokens: Option<Vec<u32>>,
    /// How sure the drafter was of each token, if it was asked and knows.
    pub(crate) doubts: Vec<Doubt>,
}

/// Whoever drafts.
pub(crate) enum DraftHost {
    /// Nobody.
    Off,
    /// Where it is asked.
    Inline(Box<dyn Drafter>),
    /// A thread.
    Thread(DraftThread),
}

/// The owner's handle to the thread.
pub(crate) struct DraftThread {
    commands: SyncSender<DraftCommand>,
    /// Closes that found no room.
    waiting: VecDeque<DraftCommand>,
    answers: mpsc::Receiver<Vec<Drafted>>,
}

/// Shortest match after which prompt look-up proposes: shorter ones seldom go on as before.
const MIN_MATCH: usize = 3;

/// Memory for the draft model's KV blocks. A token takes about a kilobyte.
const DRAFT_KV_BYTES: u64 = 256 << 20;

/// Prompt rows that the draft model takes in per call while nobody waits for a draft.
const INTAKE_ROWS: usize = 512;

/// Starts the drafter that the settings name. Loading a draft model takes about a second.
///
/// # Errors
/// [`CoordinatorError::NoDraftModel`], [`CoordinatorError::Draft`]: the draft model is not given or
/// cannot be used. [`CoordinatorError::Thread`]: there is no thread for it.
pub(crate) fn start(
    settings: &CoordinatorSettings,
    target: &ShardSet,
) -> Result<DraftHost, CoordinatorError> {
    let draft_shards = settings.draft_shards.as_deref();
    let model = || draft_shards.ok_or(CoordinatorError::NoDraftModel);
    let drafter: Box<dyn Drafter> = match (settings.draft, draft_shards) {
        (DraftChoice::Off, _) => return Ok(DraftHost::Off),
        (DraftChoice::Ngram, _) | (DraftChoice::Auto, None) => {
            return Ok(DraftHost::Inline(Box::new(NgramDrafter::new(MIN_MATCH))));
        }
        (DraftChoice::Model, _) => Box::new(load(settings, model()?, target)?),
        (DraftChoice::Hybrid | DraftChoice::Auto, _) => {
            Box::new(HybridDrafter::new(load(settings, model()?, target)?))
        }
    };
    // A session has one draft under way, and may have been opened and closed meanwhile.
    DraftHost::start_thread(drafter, 4 * settings.max_sessions)
}

fn load(
    settings: &CoordinatorSettings,
    draft_shards: &Path,
    target: &ShardSet,
) -> Result<ModelDrafter, CoordinatorError> {
    let library = find_openvino().map_err(CoordinatorError::Runtime)?;
    let options = EngineOptions {
        threads: (settings.draft_threads > 0).then_some(usize::from(settings.draft_threads)),
        max_sessions: settings.max_sessions,
        kv_bytes: Some(DRAFT_KV_BYTES),
        same_rows: false,
        ..EngineOptions::default()
    };
    let path = Some(library.path());
    Ok(ModelDrafter::load(EngineKind::Auto, draft_shards, target, path, &options)?)
}

impl DraftHost {
    /// Starts the thread of a drafter. `capacity` commands may wait.
    ///
    /// # Errors
    /// [`CoordinatorError::Thread`]: the system has no thread to give.
    pub(crate) fn start_thread(
        drafter: Box<dyn Drafter>,
        capacity: usize,
    ) -> Result<Self, CoordinatorError> {
        let (commands, inbox) = sync_channel(capacity);
        let (outbox, answers) = mpsc::channel(capacity);
        std::thread::Builder::new()
            .name("draft".to_owned())
            .spawn(move || serve(drafter, &inbox, &outbox))
            .map_err(CoordinatorError::Thread)?;
        Ok(Self::Thread(DraftThread { commands, waiting: VecDeque::new(), answers }))
    }

    /// Gives a command. Answers that exist at once are returned; the others come through
    /// [`Self::answers`].
    pub(crate) fn give(&mut self, command: DraftCommand) -> Vec<Drafted> {
        match self {
            Self::Off => failed(command).into_iter().collect(),
            Self::Inline(drafter) => {
                let mut orders = Vec::new();
                take(drafter.as_mut(), command, &mut orders);
                draft(drafter.as_mut(), &orders)
            }
            Self::Thread(thread) => {
                if thread.waiting.len() > MAX_WAITING {
                    error!("the drafter hangs, sessions go on without drafts");
                    *self = Self::Off;
                    return failed(command).into_iter().collect();
                }
                thread.give(command)
            }
        }
    }

    /// Waits for answers of the thread.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn answers(&mut self) -> Vec<Drafted> {
        if let Self::Thread(thread) = self {
            if let Some(answers) = thread.answers.recv().await {
                return answers;
            }
            error!("the drafter has ended, sessions go on without drafts");
            *self = Self::Off;
        }
        std::future::pending().await
    }
}

impl DraftThread {
    /// A session that is not opened is not drafted for, but one that is not closed leaks: closes
    /// that find no room wait, and everything else fails meanwhile.
    fn give(&mut self, command: DraftCommand) -> Vec<Drafted> {
        while let Some(close) = self.waiting.pop_front() {
            if let Err(TrySendError::Full(close)) = self.commands.try_send(close) {
                self.waiting.push_front(close);
                break;
            }
        }
        let refused = if self.waiting.is_empty() {
            self.commands.try_send(command).err().map(|error| match error {
                TrySendError::Full(command) | TrySendError::Disconnected(command) => command,
            })
        } else {
            Some(command)
        };
        match refused {
            Some(close @ DraftCommand::Close(_)) => {
                self.waiting.push_back(close);
                Vec::new()
            }
            refused => refused.and_then(failed).into_iter().collect(),
        }
    }
}

/// The answer to an order that nobody carries out.
fn failed(command: DraftCommand) -> Option<Drafted> {
    match command {
        DraftCommand::Draft(DraftOrder { session, ticket, .. }) => {
            Some(Drafted { session, ticket, tokens: None, doubts: Vec::new() })
        }
        DraftCommand::Open(..) | DraftCommand::Close(_) => None,
    }
}

/// The thread: ends when the owner does. While nobody waits for a draft it takes in prompts, so
/// that the first draft of a session does not have to.
fn serve(
    mut drafter: Box<dyn Drafter>,
    inbox: &Receiver<DraftCommand>,
    outbox: &mpsc::Sender<Vec<Drafted>>,
) {
    let mut intake = VecDeque::new();
    loop {
        let mut orders = Vec::new();
        let first = if intake.is_empty() { inbox.recv().ok() } else { inbox.try_recv().ok() };
        if first.is_none() && intake.is_empty() {
            return;
        }
        for command in first.into_iter().chain(inbox.try_iter()) {
            if let DraftCommand::Open(session, prompt, _) = &command {
                intake.push_back((*session, prompt.len().div_ceil(INTAKE_ROWS)));
            }
            take(drafter.as_mut(), command, &mut orders);
        }
        if orders.is_empty() {
            take_in(drafter.as_mut(), &mut intake);
        } else if outbox.blocking_send(draft(drafter.as_mut(), &orders)).is_err() {
            return;
        }
    }
}

/// Takes in some rows of the prompt that waits for longest.
fn take_in(drafter: &mut dyn Drafter, intake: &mut VecDeque<(SessionId, usize)>) {
    let Some((session, calls_left)) = intake.pop_front() else { return };
    let params = SamplingParams::default();
    let request = DraftRequest { session: key_of(session), assumed: &[], n: 0, params: &params };
    if let Err(error) = drafter.draft(&[request]) {
        warn!(error = &error as &dyn std::error::Error, "prompt was not taken in");
    } else if calls_left > 1 {
        intake.push_back((session, calls_left - 1));
    }
}

fn take(drafter: &mut dyn Drafter, command: DraftCommand, orders: &mut Vec<DraftOrder>) {
    match command {
        DraftCommand::Open(session, prompt, guide) => {
            drafter.open(key_of(session), &prompt);
            guide.into_iter().for_each(|guide| drafter.guide(key_of(session), guide));
        }
        DraftCommand::Draft(order) => {
            drafter.accept(key_of(order.session), &order.accepted);
            orders.retain(|other| other.session != order.session);
            orders.push(order);
        }
        DraftCommand::Close(session) => {
            orders.retain(|order| order.session != session);
            drafter.close(key_of(session));
        }
    }
}

fn draft(drafter: &mut dyn Drafter, orders: &[DraftOrder]) -> Vec<Drafted> {
    if orders.is_empty() {
        return Vec::new();
    }
    let requests: Vec<DraftRequest<'_>> = orders
        .iter()
        .map(|order| DraftRequest {
            session: key_of(order.session),
            assumed: &order.assumed,
            n: order.n,
            params: &order.params,
        })
        .collect();
    let drafted = drafter.draft(&requests);
    let mut tokens = match drafted {
        Ok(tokens) => tokens.into_iter(),
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "drafting failed");
            Vec::new().into_iter()
        }
    };
    let answer = |order: &DraftOrder| Drafted {
        session: order.session,
        ticket: order.ticket,
        tokens: tokens.next(),
        doubts: drafter.doubts(key_of(order.session)),
    };
    orders.iter().map(answer).collect()
}

fn key_of(session: SessionId) -> SessionKey {
    SessionKey(session.as_u64())
}

#[cfg(test)]
mod tests {
    use stagebus_draft::drafter::NgramDrafter;

    use super::*;

    const SESSION: SessionId = SessionId::from_u64(1);

    fn order(ticket: u64, accepted: &[u32]) -> DraftCommand {
        let params = Arc::new(SamplingParams::default());
        DraftCommand::Draft(DraftOrder {
            session: SESSION,
            ticket,
            accepted: accepted.to_vec(),
            assumed: Vec::new(),
            n: 2,
            params,
        })
    }

    fn tokens(drafted: &[Drafted]) -> Vec<(u64, Option<Vec<u32>>)> {
        drafted.iter().map(|drafted| (drafted.ticket, drafted.tokens.clone())).collect()
    }

    #[test]
    fn a_cheap_drafter_answers_at_once() {
        let mut host = DraftHost::Inline(Box::new(NgramDrafter::new(1)));
        assert!(host.give(DraftCommand::Open(SESSION, vec![1, 2, 3, 1], None)).is_empty());
        let answers = host.give(order(7, &[2]));
        assert_eq!(tokens(&answers), [(7, Some(vec![3, 1]))]);
        host.give(DraftCommand::Close(SESSION));
        let answers = host.give(order(8, &[3]));
        assert_eq!(tokens(&answers), [(8, Some(vec![]))]);
    }

    #[test]
    fn without_a_drafter_orders_fail() {
        let answers = DraftHost::Off.give(order(1, &[]));
        assert_eq!(tokens(&answers), [(1, None)]);
    }

    #[tokio::test]
    async fn a_thread_drafts_the_same() {
        let drafter = Box::new(NgramDrafter::new(1));
        let mut host = DraftHost::start_thread(drafter, 8).unwrap();
        host.give(DraftCommand::Open(SESSION, vec![1, 2, 3, 1], None));
        host.give(order(7, &[2]));
        assert_eq!(tokens(&host.answers().await), [(7, Some(vec![3, 1]))]);
    }

    /// Blocks until told, so that the channel fills.
    struct Stuck(Receiver<()>);

    impl Drafter for Stuck {
        fn open(&mut self, _session: SessionKey, _prompt: &[u32]) {
            assert!(self.0.recv().is_err(), "nothing is sent");
        }
        fn guide(&mut self, _session: SessionKey, _guide: Guide) {}
        fn accept(&mut self, _session: SessionKey, _tokens: &[u32]) {}
        fn draft(
            &mut self,
            requests: &[DraftRequest<'_>],
        ) -> Result<Vec<Vec<u32>>, stagebus_draft::drafter::DraftError> {
            Ok(vec![Vec::new(); requests.len()])
        }
        fn close(&mut self, _session: SessionKey) {}
    }

    #[tokio::test]
    async fn a_full_channel_fails_orders_and_keeps_closes() {
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let mut host = DraftHost::start_thread(Box::new(Stuck(gate)), 1).unwrap();
        host.give(DraftCommand::Open(SESSION, vec![1], None));
        let mut failed = Vec::new();
        while failed.is_empty() {
            failed = host.give(order(1, &[]));
        }
        assert_eq!(tokens(&failed), [(1, None)]);
        host.give(DraftCommand::Close(SESSION));
        let DraftHost::Thread(thread) = &host else { panic!("a thread") };
        assert_eq!(thread.waiting.len(), 1);
        drop(go);
        while !host.give(order(2, &[])).is_empty() {
            std::thread::yield_now();
        }
        assert!(!host.answers().await.is_empty());
    }
}
