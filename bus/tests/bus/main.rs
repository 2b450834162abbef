//! The bus against a real broker: one private nats-server per test, stopped when the test ends.

mod broker;
mod bulk;
mod faults;
mod jobs;
mod messages;
mod security;
mod store;
mod streams;
mod switch;

use std::time::Duration;

use stagebus_bus::{Bus, BusEvent, BusEvents, BusOptions};

/// Long enough for a busy machine; no test passes or fails by how long something took.
const PATIENCE: Duration = Duration::from_secs(20);

/// Connects to a private broker.
async fn connect(broker: &broker::Broker) -> Bus {
    Bus::connect(BusOptions::new(broker.url(), "test")).await.expect("the broker is up")
}

/// Waits until the broker knows the subscriptions of a connection: it takes a connection's messages
/// in order, so it knows them once it has sent one back.
async fn subscribed(bus: &Bus) {
    let inbox = bus.new_inbox();
    let mut echo = bus.subscribe(&inbox).await.expect("subscribed");
    bus.publish_bytes(&inbox, None, bytes::Bytes::new()).await.expect("published");
    tokio::time::timeout(PATIENCE, echo.next()).await.expect("an echo comes").expect("connected");
}

/// Reads events until one matches.
async fn wait_for(events: &mut BusEvents, wanted: impl Fn(&BusEvent) -> bool) -> BusEvent {
    let search = async {
        loop {
            let event = events.next().await.expect("the connection is held by the test");
            if wanted(&event) {
                return event;
            }
        }
    };
    tokio::time::timeout(PATIENCE, search).await.expect("the event comes")
}
