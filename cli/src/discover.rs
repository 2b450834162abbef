//! Finding out who is there: listens to announcements and asks for them.

use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use stagebus_bus::{Bus, BusEvent, BusEvents, Subscription, Violation};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::subjects::{ANY_FLEET, Subjects};
use stagebus_view::FleetView;
use tokio::time::Instant;
use tracing::warn;

/// How long to listen when the model's name is unknown: longer than the interval in which
/// everybody announces itself unasked, by default.
pub const LISTEN: Duration = Duration::from_millis(1500);

/// How long to listen after everybody has been asked.
pub const ANSWER: Duration = Duration::from_millis(500);

/// Collects announcements until `enough` says so or the time is up.
///
/// With a model's name everybody is asked at once. Without one, the first announcement of each
/// model starts the question for that model.
///
/// # Errors
/// A broker that refuses the subscription or the question.
pub async fn listen(
    bus: &Bus,
    model: Option<&ModelName>,
    window: Duration,
    enough: impl Fn(&FleetView) -> bool,
) -> anyhow::Result<FleetView> {
    let deadline = Instant::now() + window;
    let mut listener = Listener::start(bus, model).await?;
    while !enough(&listener.view) {
        match tokio::time::timeout_at(deadline, listener.hear()).await {
            Ok(heard) => heard?,
            Err(_) => break,
        }
    }
    Ok(listener.view)
}

/// Hears the announcements of a fleet, and asks for them.
#[derive(Debug)]
pub struct Listener<'a> {
    /// What was heard so far.
    pub view: FleetView,
    bus: &'a Bus,
    model: Option<&'a ModelName>,
    announcements: Subscription,
    events: BusEvents,
    asked: Vec<Subjects>,
}

impl<'a> Listener<'a> {
    /// Starts to listen; with a model's name everybody of it is asked at once.
    ///
    /// # Errors
    /// A broker that refuses the subscription or the question at once.
    pub async fn start(bus: &'a Bus, model: Option<&'a ModelName>) -> anyhow::Result<Self> {
        let events = bus.events();
        let (view, asked) = (FleetView::default(), Vec::new());
        let Some(named) = model else {
            let announcements = bus.subscribe(ANY_FLEET).await?;
            return Ok(Self { view, bus, model, announcements, events, asked });
        };
        let subjects = Subjects::new(named);
        let announcements = bus.subscribe(&subjects.fleet_all()).await?;
        ask(bus, &subjects).await?;
        Ok(Self { view, bus, model, announcements, events, asked: vec![subjects] })
    }

    /// Takes in the next announcement.
    ///
    /// # Errors
    /// A closed connection, or permissions that forbid to hear or to ask.
    ///
    /// # Cancel safety
    /// No announcement is lost when the future is dropped; a question may be.
    pub async fn hear(&mut self) -> anyhow::Result<()> {
        let heard = tokio::select! {
            heard = self.announcements.next() => heard,
            refused = refusal(&mut self.events) => return Err(explain(refused, self.model)),
        };
        let heard = heard.context("the connection to the broker was closed")?;
        let subjects = match self.view.hear(heard.subject(), &heard.payload, Instant::now().into())
        {
            Ok(subjects) => subjects,
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "nothing is learnt from a message");
                return Ok(());
            }
        };
        if !self.asked.contains(&subjects) {
            ask(self.bus, &subjects).await?;
            self.asked.push(subjects);
        }
        Ok(())
    }
}

/// Waits until the broker forbids what listening needs. Questions to the broker itself do not count.
async fn refusal(events: &mut BusEvents) -> Violation {
    loop {
        match events.next().await {
            Some(BusEvent::PermissionViolation(violation))
                if !violation.subject.starts_with('$') =>
            {
                return violation;
            }
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn explain(refused: Violation, model: Option<&ModelName>) -> anyhow::Error {
    let context = match model {
        Some(model) => format!("the announcements of model {model} cannot be heard"),
        None => "the announcements of all models cannot be heard; name one with --model".to_owned(),
    };
    anyhow::Error::from(refused).context(context)
}

async fn ask(bus: &Bus, subjects: &Subjects) -> anyhow::Result<()> {
    bus.publish_bytes(&subjects.probe(), None, Bytes::new())
        .await
        .context("cannot ask who is there")
}

/// Finds the model that the fleet serves when the user names none.
///
/// # Errors
/// Nobody announces itself, or there are several models to choose from.
pub async fn only_model(bus: &Bus) -> anyhow::Result<ModelName> {
    let mut models = listen(bus, None, ANSWER, |_| false).await?.models();
    if models.is_empty() {
        models = listen(bus, None, LISTEN, |view| !view.models().is_empty()).await?.models();
    }
    let served = models.iter().filter(|model| model.served).count();
    if served > 0 {
        models.retain(|model| model.served);
    }
    match models.as_slice() {
        [] => anyhow::bail!("nobody announces itself on the broker at {}", bus.url()),
        [model] => Ok(model.model.clone()),
        several => {
            let names: Vec<&str> = several.iter().map(|model| model.model.as_str()).collect();
            anyhow::bail!(
                "several models are served, choose one with --model: {}",
                names.join(", ")
            )
        }
    }
}
