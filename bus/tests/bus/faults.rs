//! What breaks: full subscriptions, a broker that goes away, forbidden subjects.

use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::{
    Bus, BusError, BusEvent, BusOptions, CloseError, Credentials, Operation, PublishError,
    RequestError, Violation,
};

use crate::broker::Broker;
use crate::{PATIENCE, connect, wait_for};

#[tokio::test]
async fn a_full_subscription_is_a_gap_that_cannot_be_missed() {
    let broker = Broker::start();
    let options = BusOptions { subscription_capacity: 8, ..BusOptions::new(broker.url(), "slow") };
    let slow = Bus::connect(options).await.expect("connects");
    let mut events = slow.events();
    let mut full = slow.subscribe("burst").await.expect("subscribes");
    let mut end = slow.subscribe("end").await.expect("subscribes");
    let before = slow.loss_generation();
    for i in 0..100_u8 {
        slow.publish_bytes("burst", None, vec![i].into()).await.expect("publishes");
    }
    // One connection keeps its order: once this is here, the burst has been delivered or dropped.
    slow.publish_bytes("end", None, Bytes::new()).await.expect("publishes");
    end.next().await.expect("a message");
    assert_eq!(
        wait_for(&mut events, |e| *e == BusEvent::SlowConsumer).await,
        BusEvent::SlowConsumer
    );
    assert!(slow.loss_generation() > before);
    assert!(slow.slow_consumer_reports() > 0);
    // The oldest are kept, and the subscription goes on.
    for i in 0..8_u8 {
        assert_eq!(full.next().await.expect("a message").payload[0], i);
    }
    slow.publish_bytes("burst", None, vec![200].into()).await.expect("publishes");
    assert_eq!(full.next().await.expect("a message").payload[0], 200);
}

#[tokio::test]
async fn while_the_broker_is_away_nothing_is_queued_and_nothing_hangs() {
    let mut broker = Broker::start();
    let options = BusOptions {
        publish_timeout: Duration::from_millis(100),
        ..BusOptions::new(broker.url(), "test")
    };
    let bus = Bus::connect(options).await.expect("connects");
    let mut events = bus.events();
    let mut subscription = bus.subscribe("a").await.expect("subscribes");
    bus.publish_bytes("a", None, "before".into()).await.expect("publishes");
    assert_eq!(subscription.next().await.expect("a message").payload, "before");

    let losses = bus.loss_generation();
    broker.kill();
    wait_for(&mut events, |event| *event == BusEvent::Disconnected).await;
    assert!(bus.loss_generation() > losses);
    assert!(!bus.is_connected());
    // Nothing is queued to be delivered late, and nothing waits for ever.
    let error = bus.publish_bytes("a", None, "stale".into()).await.expect_err("disconnected");
    assert!(matches!(error, PublishError::Disconnected { .. }), "{error}");
    let error =
        bus.request_bytes("a", None, Bytes::new(), PATIENCE).await.expect_err("disconnected");
    assert!(matches!(error, RequestError::Publish(PublishError::Disconnected { .. })), "{error}");
    let error = bus.drain(Duration::from_millis(50)).await.expect_err("nobody to flush to");
    assert!(matches!(error, CloseError::Timeout { .. }), "{error}");

    broker.restart();
    wait_for(&mut events, |event| *event == BusEvent::Connected).await;
    bus.publish_bytes("a", None, "after".into()).await.expect("publishes");
    assert_eq!(subscription.next().await.expect("a message").payload, "after");
}

#[tokio::test]
async fn subscriptions_hear_again_after_a_restart() {
    let mut broker = Broker::start();
    let bus = connect(&broker).await;
    let mut events = bus.events();
    let mut subscription = bus.subscribe("a").await.expect("subscribes");
    broker.kill();
    wait_for(&mut events, |event| *event == BusEvent::Disconnected).await;
    broker.restart();
    wait_for(&mut events, |event| *event == BusEvent::Connected).await;
    bus.publish_bytes("a", None, "after".into()).await.expect("publishes");
    assert_eq!(subscription.next().await.expect("a message").payload, "after");
}

#[tokio::test]
async fn connecting_waits_for_a_broker_that_starts_later() {
    let mut broker = Broker::start();
    broker.kill();
    let options = BusOptions { connect_wait: PATIENCE, ..BusOptions::new(broker.url(), "early") };
    let connecting = Bus::connect(options);
    let starting = async {
        tokio::task::yield_now().await;
        broker.restart();
        broker
    };
    let (bus, broker) = tokio::join!(connecting, starting);
    assert_eq!(bus.expect("connects").url(), broker.url());
}

#[tokio::test]
async fn nobody_at_the_address_is_told_with_the_address() {
    let mut broker = Broker::start();
    broker.kill();
    let error =
        Bus::connect(BusOptions::new(broker.url(), "test")).await.expect_err("nobody there");
    assert!(matches!(&error, BusError::Unreachable { url, .. } if *url == broker.url()), "{error}");
    assert!(std::error::Error::source(&error).is_some());
}

#[tokio::test]
async fn something_else_than_a_broker_is_told_apart() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let options = BusOptions {
        connect_timeout: Duration::from_millis(100),
        ..BusOptions::new(format!("nats://127.0.0.1:{port}"), "test")
    };
    let error = Bus::connect(options).await.expect_err("it never speaks");
    assert!(matches!(error, BusError::TimedOut { .. }), "{error}");
}

#[tokio::test]
async fn a_forbidden_subject_is_an_event() {
    let config = r#"
authorization { users: [
  { user: w, password: p, permissions: { publish: ["ok.>"], subscribe: ["ok.>"] } }
] }
"#;
    let broker = Broker::start_with(config, &[]);
    let options = BusOptions {
        credentials: Credentials::UserPassword { user: "w".into(), password: "p".into() },
        ..BusOptions::new(broker.url(), "test")
    };
    let bus = Bus::connect(options).await.expect("connects");
    let mut events = bus.events();
    let is_violation = |event: &BusEvent| matches!(event, BusEvent::PermissionViolation(_));
    bus.publish_bytes("secret.1", None, Bytes::new()).await.expect("seems to succeed");
    let event = wait_for(&mut events, is_violation).await;
    let violation = |operation, subject: &str| {
        BusEvent::PermissionViolation(Violation { operation, subject: subject.to_owned() })
    };
    assert_eq!(event, violation(Operation::Publish, "secret.1"));
    let _subscription = bus.subscribe("secret.2").await.expect("seems to succeed");
    let event = wait_for(&mut events, is_violation).await;
    assert_eq!(event, violation(Operation::Subscribe, "secret.2"));
}

#[tokio::test]
async fn a_reader_of_events_that_lags_is_told_so() {
    let broker = Broker::start();
    let options = BusOptions { subscription_capacity: 1, ..BusOptions::new(broker.url(), "slow") };
    let bus = Bus::connect(options).await.expect("connects");
    let mut lagging = bus.events();
    let mut watching = bus.events();
    let _full = bus.subscribe("burst").await.expect("subscribes");
    while bus.slow_consumer_reports() < 200 {
        bus.publish_bytes("burst", None, Bytes::new()).await.expect("publishes");
        tokio::task::yield_now().await;
    }
    assert!(matches!(lagging.next().await, Some(BusEvent::Missed(1..))));
    bus.drain(PATIENCE).await.expect("drains");
    wait_for(&mut watching, |event| *event == BusEvent::Closed).await;
}
