//! Everything that the coordinator listens to, turned into actions.

use stagebus_bus::{Bus, BusEvent, BusEvents, Delivery, SubscribeError, Subscription};
use stagebus_schemas::access;
use stagebus_schemas::ids::CoordinatorId;
use stagebus_schemas::messages::fleet::WorkerAnnouncement;
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::subjects::{COORDINATOR_QUEUE, Subject, Subjects, UnheardEvent};
use tracing::{error, warn};

use crate::action::{Action, Incoming};
use crate::client::Client;
use crate::error::CoordinatorError;

/// What woke the owner.
#[expect(clippy::large_enum_variant, reason = "one value lives at a time, on the stack")]
pub(crate) enum Wake {
    /// The state has something to take.
    Act(Action),
    /// A message that is not worth an action.
    Nothing,
    /// The broker answered our probe, or somebody else's.
    Probed,
    /// Nobody heard an event.
    Unheard(UnheardEvent),
    /// Events are due to be sent again, or clients to be given up.
    Outboxes,
    /// The coordinator is asked to end.
    Shutdown,
    /// The time for requests to finish has passed.
    DrainDeadline,
}

/// Everything that is listened to.
pub(crate) struct Inputs {
    subjects: Subjects,
    /// Absent once the queue group is left.
    prompt: Option<Subscription>,
    cancel: Subscription,
    head: Subscription,
    lost: Subscription,
    unheard: Subscription,
    fleet: Subscription,
    probe: Subscription,
    events: BusEvents,
}

impl Inputs {
    /// Subscribes and asks who is there. The probe comes back to us: its arrival shows that the
    /// broker knows all subscriptions.
    pub(crate) async fn subscribe(
        bus: &Bus,
        subjects: &Subjects,
        id: &CoordinatorId,
    ) -> Result<Self, CoordinatorError> {
        let inputs = Self {
            subjects: subjects.clone(),
            events: bus.events(),
            fleet: bus.subscribe(&subjects.fleet_all()).await?,
            head: bus.subscribe_address(&subjects.head(id)).await?,
            lost: bus.subscribe_address(&subjects.lost_all(id)).await?,
            unheard: bus.subscribe(&subjects.unheard_all(id)).await?,
            cancel: bus.subscribe(&subjects.cancel_all()).await?,
            prompt: Some(bus.queue_subscribe(&subjects.prompt(), COORDINATOR_QUEUE).await?),
            probe: bus.subscribe(&subjects.probe()).await?,
        };
        bus.publish_bytes(&subjects.probe(), None, bytes::Bytes::new()).await?;
        Ok(inputs)
    }

    /// Waits for the next message or event of the connection.
    ///
    /// # Errors
    /// [`CoordinatorError::AuthRefused`], [`CoordinatorError::Forbidden`],
    /// [`CoordinatorError::ConnectionClosed`].
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Result<Wake, CoordinatorError> {
        let Self { subjects, prompt, cancel, head, lost, unheard, fleet, probe, events } = self;
        let message = async {
            let wake = tokio::select! {
                head = head.next() => read_head(&received(head)?),
                lost = lost.next() => read_lost(subjects, &received(lost)?),
                unheard = unheard.next() => read_unheard(subjects, &received(unheard)?),
                next = next_prompt(prompt) => match next {
                    Some(prompt) => Wake::Act(read_request(prompt)),
                    None => {
                        *prompt = None;
                        Wake::Nothing
                    }
                },
                cancel = cancel.next() => read_cancel(subjects, &received(cancel)?),
                fleet = fleet.next() => read_announcement(subjects, &received(fleet)?),
                probe = probe.next() => {
                    received(probe)?;
                    Wake::Probed
                }
            };
            Ok(wake)
        };
        tokio::select! {
            // A refusal comes before whatever else is there: it ends the process.
            biased;
            event = events.next() => read_event(received(event)?),
            wake = message => wake,
        }
    }

    /// Leaves the queue group; prompts that are already here still come.
    ///
    /// # Errors
    /// [`SubscribeError`]; no prompt comes any more then.
    pub(crate) async fn leave_queue_group(&mut self) -> Result<(), SubscribeError> {
        let Some(prompt) = &mut self.prompt else { return Ok(()) };
        let left = prompt.drain().await;
        if left.is_err() {
            self.prompt = None;
        }
        left
    }

    /// Whether the queue group is left and its last prompt read.
    pub(crate) fn has_left_queue_group(&self) -> bool {
        self.prompt.is_none()
    }
}

fn read_lost(subjects: &Subjects, delivery: &Delivery) -> Wake {
    match subjects.parse(delivery.subject()) {
        // The broker tells it of the first stage's worker, a worker of the next one's.
        Ok(Subject::Lost(_, lost)) => Wake::Act(Action::Lost(lost)),
        _ => Wake::Nothing,
    }
}

/// Only the broker's own word counts: a client may well answer an event.
fn read_unheard(subjects: &Subjects, delivery: &Delivery) -> Wake {
    match subjects.parse(delivery.subject()) {
        Ok(Subject::Unheard(_, unheard)) if delivery.no_responders => Wake::Unheard(unheard),
        _ => Wake::Nothing,
    }
}

fn read_cancel(subjects: &Subjects, delivery: &Delivery) -> Wake {
    match subjects.parse(delivery.subject()) {
        Ok(Subject::Cancel(request)) => Wake::Act(Action::Cancel(request)),
        _ => Wake::Nothing,
    }
}

fn read_announcement(subjects: &Subjects, delivery: &Delivery) -> Wake {
    let Ok(Subject::Worker(stage, worker)) = subjects.parse(delivery.subject()) else {
        return Wake::Nothing;
    };
    match delivery.decode::<WorkerAnnouncement>() {
        Ok(announcement) if announcement.worker == worker && announcement.stage == stage => {
            Wake::Act(Action::Worker(announcement))
        }
        Ok(_) => {
            warn!(subject = delivery.subject(), "announcement of another worker, ignored");
            Wake::Nothing
        }
        Err(error) => {
            warn!(subject = delivery.subject(), %error, "announcement cannot be read");
            Wake::Nothing
        }
    }
}

fn read_event(event: BusEvent) -> Result<Wake, CoordinatorError> {
    match event {
        BusEvent::Connected => Ok(Wake::Act(Action::Reconnected)),
        BusEvent::Disconnected => {
            warn!("connection to the broker broke");
            Ok(Wake::Act(Action::Disconnected))
        }
        BusEvent::AuthRefused => Err(CoordinatorError::AuthRefused),
        BusEvent::Closed => Err(CoordinatorError::ConnectionClosed),
        BusEvent::PermissionViolation(violation) if violation.is_fatal() => Err(violation.into()),
        BusEvent::PermissionViolation(error) => {
            error!(%error, "a client's events cannot be sent");
            Ok(Wake::Nothing)
        }
        BusEvent::SlowConsumer => {
            warn!("messages dropped, this coordinator reads too slowly");
            Ok(Wake::Act(Action::MessagesLost))
        }
        event @ (BusEvent::LameDuck
        | BusEvent::ReconnectFailed(_)
        | BusEvent::ServerError(_)
        | BusEvent::Missed(_)) => {
            warn!(?event, "broker connection");
            Ok(Wake::Nothing)
        }
    }
}

fn read_head(delivery: &Delivery) -> Wake {
    match delivery.decode::<Head>() {
        Ok(head) => Wake::Act(Action::Head(head)),
        Err(error) => {
            warn!(%error, payload_bytes = delivery.payload.len(), "head rows cannot be read");
            Wake::Nothing
        }
    }
}

fn read_request(delivery: Delivery) -> Action {
    let headers = delivery.public_headers().into_owned();
    let reply = delivery.reply().filter(|reply| access::is_answerable(reply));
    let client = reply.map(|reply| Client::new(reply.into(), &headers, &delivery.payload));
    let trace = delivery.trace();
    Action::Request(Incoming { payload: delivery.payload, headers, client, trace })
}

/// Internal subscriptions end only with the connection.
fn received<T>(item: Option<T>) -> Result<T, CoordinatorError> {
    item.ok_or(CoordinatorError::ConnectionClosed)
}

/// The next prompt; never, once the queue group is left.
async fn next_prompt(prompt: &mut Option<Subscription>) -> Option<Delivery> {
    match prompt {
        Some(subscription) => subscription.next().await,
        None => std::future::pending().await,
    }
}
