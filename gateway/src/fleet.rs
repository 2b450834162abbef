//! Which models are served, by the announcements of coordinators.
//!
//! One task hears them ([`watch()`]) and owns the list; everybody else reads the last snapshot.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream, SelectAll};
use stagebus_bus::{Bus, BusEvent, BusEvents, Delivery, Subscription};
use stagebus_schemas::ids::{CoordinatorId, ModelName};
use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;
use stagebus_schemas::subjects::{Subject, Subjects};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::error::GatewayError;

/// Coordinators that are remembered; further ones are not, so that nobody can fill the memory.
const MAX_COORDINATORS: usize = 1024;

/// Announcements that may be missed before a coordinator counts as gone.
const MISSED: u32 = 3;

/// How often the list is looked through for coordinators that are gone.
const LOOK: Duration = Duration::from_millis(250);

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

/// The announcements that are heard.
pub(crate) type Announcements = SelectAll<BoxStream<'static, Delivery>>;

/// Subscribes to the announcements of some models' coordinators, of all if none is named, and asks
/// the named ones to announce themselves.
///
/// # Errors
/// The broker is away.
pub(crate) async fn subscribe(
    bus: &Bus,
    models: &[ModelName],
) -> Result<Announcements, GatewayError> {
    let mut all = SelectAll::new();
    if models.is_empty() {
        let subscription = bus.subscribe(&Subjects::any_model().coordinator_all()).await?;
        all.push(deliveries(subscription));
    }
    for model in models {
        let subjects = Subjects::new(model);
        all.push(deliveries(bus.subscribe(&subjects.coordinator_all()).await?));
        if let Err(error) = bus.publish_bytes(&subjects.probe(), None, Bytes::new()).await {
            warn!(%model, %error, "cannot ask who is there; announcements will tell");
        }
    }
    Ok(all)
}

fn deliveries(subscription: Subscription) -> BoxStream<'static, Delivery> {
    let next = |mut subscription: Subscription| async move {
        subscription.next().await.map(|delivery| (delivery, subscription))
    };
    stream::unfold(subscription, next).boxed()
}

/// Keeps `models` up to date until `stop` is cancelled.
///
/// # Errors
/// The broker refuses us, or the connection is closed for good: nothing will be heard any more.
pub(crate) async fn watch(
    mut announcements: Announcements,
    mut events: BusEvents,
    models: watch::Sender<Models>,
    stop: CancellationToken,
) -> Result<(), GatewayError> {
    let mut roster = Roster::default();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            heard = announcements.next() => match heard {
                Some(heard) => roster.hear(&heard, Instant::now()),
                None => return Err(GatewayError::ConnectionClosed),
            },
            event = events.next() => on_event(event)?,
            _ = look.tick() => {}
        }
        let found = roster.models(Instant::now());
        models.send_if_modified(|known| {
            let changed = *known != found;
            if changed {
                tell_changes(known, &found);
                *known = found;
            }
            changed
        });
    }
}

fn on_event(event: Option<BusEvent>) -> Result<(), GatewayError> {
    match event {
        Some(BusEvent::AuthRefused) => Err(GatewayError::AuthRefused),
        Some(BusEvent::PermissionViolation(violation))
            if Subjects::any_model().coordinator_all() == violation.subject =>
        {
            Err(violation.into())
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

/// The coordinators that were heard.
#[derive(Debug, Default)]
struct Roster {
    coordinators: BTreeMap<(ModelName, CoordinatorId), Heard>,
    since: BTreeMap<ModelName, u64>,
    is_full: bool,
}

#[derive(Debug)]
struct Heard {
    at: Instant,
    announcement: CoordinatorAnnouncement,
}

impl Heard {
    fn is_alive(&self, now: Instant) -> bool {
        let interval = Duration::from_millis(self.announcement.interval_ms.into());
        // One interval more than may be missed: the next one is only due then.
        now < self.at + interval * (MISSED + 1)
    }
}

impl Roster {
    /// Takes in an announcement.
    fn hear(&mut self, heard: &Delivery, now: Instant) {
        let subject = heard.subject();
        let ours = Subjects::of(subject).and_then(|subjects| subjects.parse(subject));
        if !matches!(ours, Ok(Subject::Coordinator(_))) {
            warn!(subject, "announcement on a subject that is none of ours");
            return;
        }
        match heard.decode::<CoordinatorAnnouncement>() {
            Ok(announcement) => self.take(announcement, now),
            Err(error) => warn!(subject, %error, "announcement cannot be read"),
        }
    }

    fn take(&mut self, announcement: CoordinatorAnnouncement, now: Instant) {
        let key = (announcement.model.clone(), announcement.coordinator.clone());
        if self.coordinators.len() >= MAX_COORDINATORS && !self.coordinators.contains_key(&key) {
            if !std::mem::replace(&mut self.is_full, true) {
                warn!(known = MAX_COORDINATORS, "more coordinators than are remembered");
            }
            return;
        }
        self.coordinators.insert(key, Heard { at: now, announcement });
    }

    /// The models with a coordinator that takes requests; forgets those that are gone.
    fn models(&mut self, now: Instant) -> Models {
        self.coordinators.retain(|_, heard| heard.is_alive(now));
        let mut models: Models = Vec::new();
        for ((name, _), Heard { announcement, .. }) in &self.coordinators {
            if !announcement.accepting || models.last().is_some_and(|last| last.name == *name) {
                continue;
            }
            let since = *self.since.entry(name.clone()).or_insert_with(unix_seconds);
            let fingerprint = announcement.fingerprint.clone();
            models.push(Model { name: name.clone(), since, fingerprint });
        }
        self.since.retain(|name, _| models.iter().any(|model| model.name == *name));
        models
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use stagebus_schemas::version::MessageVersion;

    fn announcement(model: &str, coordinator: &str, accepting: bool) -> CoordinatorAnnouncement {
        CoordinatorAnnouncement {
            version: MessageVersion::CURRENT,
            coordinator: coordinator.parse().expect("an id"),
            model: model.parse().expect("a name"),
            fingerprint: "f".to_owned(),
            n_stages: 1,
            host: String::new(),
            accepting,
            interval_ms: 500,
            n_sessions: 0,
            requests_done: 0,
            tokens_out: 0,
            tokens_drafted: 0,
            tokens_accepted: 0,
            recoveries: 0,
        }
    }

    fn names(roster: &mut Roster, now: Instant) -> Vec<String> {
        roster.models(now).iter().map(|model| model.name.to_string()).collect()
    }

    #[test]
    fn a_model_is_served_while_a_coordinator_accepts_and_is_heard() {
        let mut roster = Roster::default();
        let start = Instant::now();
        assert!(names(&mut roster, start).is_empty());
        roster.take(announcement("b", "c-1", true), start);
        roster.take(announcement("a", "c-2", true), start);
        roster.take(announcement("a", "c-3", true), start);
        assert_eq!(names(&mut roster, start), ["a", "b"]);
        roster.take(announcement("b", "c-1", false), start);
        assert_eq!(names(&mut roster, start), ["a"], "b drains");
        let late = start + Duration::from_millis(1900);
        roster.take(announcement("a", "c-3", true), late);
        let silent = start + Duration::from_millis(2100);
        assert_eq!(names(&mut roster, silent), ["a"], "one of two is enough");
        assert_eq!(roster.coordinators.len(), 1, "who is silent is forgotten");
        assert!(names(&mut roster, late + Duration::from_secs(3)).is_empty());
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let mut roster = Roster::default();
        let now = Instant::now();
        for n in 0..=MAX_COORDINATORS {
            roster.take(announcement("m", &format!("c-{n}"), true), now);
        }
        assert_eq!(roster.coordinators.len(), MAX_COORDINATORS);
        roster.take(announcement("m", "c-0", false), now);
        let model = ModelName::new("m").expect("a name");
        let known = &roster.coordinators[&(model, CoordinatorId::new("c-0").expect("an id"))];
        assert!(!known.announcement.accepting, "those that are known are followed");
    }
}
