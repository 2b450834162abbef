//! The fleet as its announcements tell it: the models that are served, and everything that the page
//! shows.
//!
//! One task hears them ([`watch()`]) and owns the view; everybody else reads what it said last.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream, SelectAll};
use stagebus_bus::{Bus, BusEvent, BusEvents, Delivery, Subscription};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::subjects::{ANY_FLEET, Subjects};
use stagebus_view::{FleetView, Meter, Snapshot};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::error::GatewayError;

/// How often the fleet is looked at. Whoever misses three announcements, which are 1.5 s by
/// default, is shown as gone within two seconds.
const LOOK: Duration = Duration::from_millis(250);

/// Least time between two values of a model's history.
const HISTORY_PACE: Duration = Duration::from_secs(1);

/// What a micro-batch may take of whose kind nothing has been measured: the coordinators' own limit
/// for a step, by default.
const UNMEASURED: Duration = Duration::from_secs(30);

/// Pause between two measurements of the way to the broker. Where it forbids the question it
/// writes a line in its log for each.
const WAY_PAUSE: Duration = Duration::from_secs(10);

/// How long the broker may take to answer.
const WAY_LIMIT: Duration = Duration::from_secs(5);

/// Models whose workers and coordinators were asked who they are.
const MAX_ASKED: usize = 1024;

/// A model that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    /// Its name.
    pub(crate) name: ModelName,
    /// When it was first heard of, in seconds since 1970.
    pub(crate) since: u64,
    /// Fingerprint of its shard set.
    pub(crate) fingerprint: String,
}

/// The models that are served, by name.
pub(crate) type Models = Vec<Model>;

/// A snapshot of the fleet as JSON: written once, however many read it.
pub(crate) type FleetDocument = Arc<str>;

/// The announcements that are heard.
pub(crate) type Announcements = SelectAll<BoxStream<'static, Delivery>>;

/// Where the view is told.
#[derive(Debug)]
pub(crate) struct Tell {
    pub(crate) models: watch::Sender<Models>,
    pub(crate) fleet: watch::Sender<FleetDocument>,
}

/// Subscribes to the announcements of some models, of all if none is named.
///
/// # Errors
/// The broker is away.
pub(crate) async fn subscribe(
    bus: &Bus,
    models: &[ModelName],
) -> Result<Announcements, GatewayError> {
    let mut all = SelectAll::new();
    if models.is_empty() {
        all.push(deliveries(bus.subscribe(ANY_FLEET).await?));
    }
    for model in models {
        let subjects = Subjects::new(model);
        all.push(deliveries(bus.subscribe(&subjects.fleet_all()).await?));
        ask(bus, &subjects).await;
    }
    Ok(all)
}

fn deliveries(subscription: Subscription) -> BoxStream<'static, Delivery> {
    let next = |mut subscription: Subscription| async move {
        subscription.next().await.map(|delivery| (delivery, subscription))
    };
    stream::unfold(subscription, next).boxed()
}

/// Asks everybody of a model to announce themselves.
async fn ask(bus: &Bus, subjects: &Subjects) {
    if let Err(error) = bus.publish_bytes(&subjects.probe(), None, Bytes::new()).await {
        warn!(%error, "cannot ask who is there; announcements will tell");
    }
}

/// Keeps what is told up to date until `stop` is cancelled.
///
/// # Errors
/// The broker refuses us, or the connection is closed for good: nothing will be heard any more.
pub(crate) async fn watch(
    bus: Bus,
    mut announcements: Announcements,
    mut events: BusEvents,
    tell: Tell,
    stop: CancellationToken,
) -> Result<(), GatewayError> {
    let mut outlook = Outlook::new();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut way = pin!(measure(&bus, Duration::ZERO));
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            heard = announcements.next() => match heard {
                Some(heard) => {
                    if let Some(new) = outlook.hear(&heard, Instant::now()) {
                        ask(&bus, &new).await;
                    }
                }
                None => return Err(GatewayError::ConnectionClosed),
            },
            event = events.next() => on_event(event)?,
            round_trip = &mut way => {
                outlook.round_trip = round_trip;
                way.set(measure(&bus, WAY_PAUSE));
            }
            _ = look.tick() => {
                if let Some(document) = outlook.look(bus.is_connected(), Instant::now()) {
                    tell.fleet.send_replace(document);
                }
            }
        }
        let found = outlook.models();
        tell.models.send_if_modified(|known| {
            let changed = *known != found;
            if changed {
                tell_changes(known, &found);
                *known = found;
            }
            changed
        });
    }
}

/// The way to the broker and back, measured after a pause; nothing while it does not answer.
async fn measure(bus: &Bus, pause: Duration) -> Option<Duration> {
    sleep(pause).await;
    bus.round_trip(WAY_LIMIT).await.ok()
}

fn on_event(event: Option<BusEvent>) -> Result<(), GatewayError> {
    match event {
        Some(BusEvent::AuthRefused) => Err(GatewayError::AuthRefused),
        Some(BusEvent::PermissionViolation(violation)) if violation.subject == ANY_FLEET => {
            Err(violation.into())
        }
        // The question by which the way is measured; the refusal answers it.
        Some(BusEvent::PermissionViolation(violation)) if violation.subject.starts_with('$') => {
            debug!(error = %violation, "the broker forbids");
            Ok(())
        }
        Some(BusEvent::PermissionViolation(violation)) => {
            warn!(error = %violation, "the broker forbids");
            Ok(())
        }
        Some(BusEvent::Disconnected) => {
            warn!("the connection to the broker broke, it is being made again");
            Ok(())
        }
        Some(BusEvent::Closed) | None => Err(GatewayError::ConnectionClosed),
        Some(_) => Ok(()),
    }
}

fn tell_changes(before: &[Model], after: &[Model]) {
    let is_in = |models: &[Model], name: &ModelName| models.iter().any(|m| m.name == *name);
    for model in after.iter().filter(|model| !is_in(before, &model.name)) {
        info!(model = %model.name, "model is served");
    }
    for model in before.iter().filter(|model| !is_in(after, &model.name)) {
        info!(model = %model.name, "model is no longer served");
    }
}

/// What was heard, and what was told of it.
#[derive(Debug)]
struct Outlook {
    view: FleetView,
    meter: Meter,
    round_trip: Option<Duration>,
    since: BTreeMap<ModelName, u64>,
    asked: Vec<Subjects>,
    told: Snapshot,
}

impl Outlook {
    fn new() -> Self {
        Self {
            view: FleetView::default(),
            meter: Meter::every(HISTORY_PACE),
            round_trip: None,
            since: BTreeMap::new(),
            asked: Vec::new(),
            told: Snapshot::default(),
        }
    }

    /// Takes in an announcement; returns the subjects of a model that nobody asked yet.
    fn hear(&mut self, heard: &Delivery, now: Instant) -> Option<Subjects> {
        let subjects = match self.view.hear(heard.subject(), &heard.payload, now.into()) {
            Ok(subjects) => subjects,
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "nothing is learnt from a message");
                return None;
            }
        };
        if self.asked.contains(&subjects) || self.asked.len() >= MAX_ASKED {
            return None;
        }
        self.asked.push(subjects.clone());
        Some(subjects)
    }

    /// Forgets those who are gone, and writes down how things are if that has changed.
    fn look(&mut self, connected: bool, now: Instant) -> Option<FleetDocument> {
        self.view.forget_silent(now.into());
        let snapshot = Snapshot {
            connected,
            round_trip_ms: self.round_trip.map(|way| way.as_secs_f64() * 1e3),
            models: self.meter.look(&self.view, UNMEASURED, now.into()),
            strangers: self.view.strangers().cloned().collect(),
        };
        if snapshot == self.told {
            return None;
        }
        let document = match serde_json::to_string(&snapshot) {
            Ok(document) => document.into(),
            Err(error) => {
                warn!(%error, "the fleet cannot be represented");
                return None;
            }
        };
        self.told = snapshot;
        Some(document)
    }

    /// The models with a coordinator that takes requests.
    fn models(&mut self) -> Models {
        let mut models: Models = Vec::new();
        for heard in self.view.coordinators().filter(|heard| heard.announcement.accepting) {
            let name = &heard.announcement.model;
            if models.last().is_some_and(|last| last.name == *name) {
                continue;
            }
            let since = *self.since.entry(name.clone()).or_insert_with(unix_seconds);
            let fingerprint = heard.announcement.fingerprint.clone();
            models.push(Model { name: name.clone(), since, fingerprint });
        }
        self.since.retain(|name, _| models.iter().any(|model| model.name == *name));
        models
    }
}

/// The document before anything is known.
pub(crate) fn nothing_known() -> FleetDocument {
    serde_json::to_string(&Snapshot::default()).unwrap_or_default().into()
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;
    use stagebus_view::testing;

    fn hear(outlook: &mut Outlook, model: &str, coordinator: &str, accepting: bool, at: Instant) {
        let announcement =
            CoordinatorAnnouncement { accepting, ..testing::coordinator(model, coordinator) };
        outlook.view.hear_coordinator(announcement, at.into());
    }

    fn names(outlook: &mut Outlook) -> Vec<String> {
        outlook.models().iter().map(|model| model.name.to_string()).collect()
    }

    /// The document of a look that found something new.
    fn told(outlook: &mut Outlook, now: Instant) -> Value {
        let document = outlook.look(true, now).expect("something has changed");
        serde_json::from_str(&document).expect("JSON")
    }

    #[test]
    fn a_model_is_served_while_a_coordinator_accepts_and_is_heard() {
        let mut outlook = Outlook::new();
        let start = Instant::now();
        assert!(names(&mut outlook).is_empty());
        hear(&mut outlook, "b", "c-1", true, start);
        hear(&mut outlook, "a", "c-2", true, start);
        hear(&mut outlook, "a", "c-3", true, start);
        assert_eq!(names(&mut outlook), ["a", "b"]);
        hear(&mut outlook, "b", "c-1", false, start);
        assert_eq!(names(&mut outlook), ["a"], "b drains");
        let late = start + Duration::from_millis(1400);
        hear(&mut outlook, "a", "c-3", true, late);
        told(&mut outlook, late + Duration::from_millis(400));
        assert_eq!(names(&mut outlook), ["a"], "one of two is enough");
        assert_eq!(outlook.view.coordinators().count(), 1, "who is silent is forgotten");
        told(&mut outlook, late + Duration::from_secs(3));
        assert!(names(&mut outlook).is_empty());
    }

    #[test]
    fn a_worker_that_dies_is_gone_within_two_seconds_and_comes_back_at_the_next_look() {
        let (mut outlook, start) = (Outlook::new(), Instant::now());
        let n_workers = |told: &Value| told["models"][0]["workers"].as_array().map(Vec::len);
        hear(&mut outlook, "m", "c", true, start);
        outlook.view.hear_worker(testing::worker("m", 0, "w0"), start.into());
        outlook.view.hear_worker(testing::worker("m", 1, "w1"), start.into());
        let first = told(&mut outlook, start);
        assert_eq!((n_workers(&first), &first["models"][0]["served"]), (Some(2), &true.into()));
        // It dies right after this announcement.
        let died = start + Duration::from_millis(500);
        for half in 1..=4 {
            let at = start + Duration::from_millis(500 * half);
            outlook.view.hear_worker(testing::worker("m", 0, "w0"), at.into());
            hear(&mut outlook, "m", "c", true, at);
        }
        outlook.view.hear_worker(testing::worker("m", 1, "w1"), died.into());
        // The look that comes latest after the third announcement is due.
        let gone = told(&mut outlook, died + Duration::from_millis(1500) + LOOK);
        assert!(Duration::from_millis(1500) + LOOK < Duration::from_secs(2));
        assert_eq!((n_workers(&gone), &gone["models"][0]["served"]), (Some(1), &false.into()));
        assert_eq!(gone["models"][0]["problems"][0]["problem"], "stage_empty");
        let back = died + Duration::from_millis(1950);
        outlook.view.hear_worker(testing::worker("m", 1, "w1-new"), back.into());
        assert_eq!(n_workers(&told(&mut outlook, back)), Some(2));
    }

    #[test]
    fn nothing_is_told_while_nothing_changes() {
        let (mut outlook, start) = (Outlook::new(), Instant::now());
        hear(&mut outlook, "m", "c", true, start);
        told(&mut outlook, start);
        assert_eq!(outlook.look(true, start + Duration::from_millis(400)), None);
        assert!(outlook.look(false, start + Duration::from_millis(500)).is_some(), "it is cut off");
    }
}
