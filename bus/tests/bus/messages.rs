//! Publishing, subscribing and requests.

use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::{Bus, BusOptions, PublishError, RequestError, SubscribeError};
use stagebus_schemas::codec::{CodecError, ContentType};
use stagebus_schemas::messages::control::{Control, ControlAction, ControlOutcome, ControlReply};
use stagebus_schemas::version::MessageVersion;

use crate::broker::Broker;
use crate::{PATIENCE, connect};

fn control() -> Control {
    Control { version: MessageVersion::CURRENT, action: ControlAction::Stats }
}

#[tokio::test]
async fn a_message_arrives_with_its_subject_type_and_reply() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let mut subscription = bus.subscribe("a.*").await.expect("subscribes");
    bus.publish("a.1", &control()).await.expect("publishes");
    bus.publish_bytes("a.2", Some(ContentType::Json), "{}".into()).await.expect("publishes");
    bus.publish_with_reply("a.3", "answers", "x".into()).await.expect("publishes");

    let first = subscription.next().await.expect("a message");
    assert_eq!(first.subject(), "a.1");
    assert_eq!(first.decode::<Control>().expect("decodes"), control());
    assert_eq!((first.reply(), first.content_type()), (None, None));
    let second = subscription.next().await.expect("a message");
    assert_eq!(second.content_type(), Some("application/json"));
    assert_eq!(second.content(), ContentType::Json);
    let third = subscription.next().await.expect("a message");
    assert_eq!(third.reply(), Some("answers"));
    assert!(!third.no_responders);
    assert!(subscription.try_next().is_none());
}

#[tokio::test]
async fn a_step_that_nobody_hears_is_answered_on_its_reply_subject() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let mut lost = bus.subscribe("lost.>").await.expect("subscribes");
    bus.publish_with_reply("nobody.here", "lost.s1.7", "x".into()).await.expect("publishes");
    let answer = lost.next().await.expect("the broker answers");
    assert!(answer.no_responders);
    assert_eq!(answer.subject(), "lost.s1.7");
    assert!(answer.payload.is_empty());
}

#[tokio::test]
async fn a_request_is_answered_and_a_bad_answer_is_told() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let mut requests = bus.subscribe("ctl").await.expect("subscribes");
    let server = async {
        let request = requests.next().await.expect("a request");
        let reply =
            ControlReply { version: MessageVersion::CURRENT, outcome: ControlOutcome::Draining };
        bus.respond(&request, &reply).await.expect("answers");
        let request = requests.next().await.expect("a request");
        let reply = request.reply().expect("a reply subject");
        bus.publish_bytes(reply, None, "nonsense".into()).await.expect("answers");
    };
    let client = async {
        let good = bus.request::<_, ControlReply>("ctl", &control(), PATIENCE).await;
        let bad = bus.request::<_, ControlReply>("ctl", &control(), PATIENCE).await;
        (good, bad)
    };
    let ((), (good, bad)) = tokio::join!(server, client);
    assert_eq!(good.expect("an answer").outcome, ControlOutcome::Draining);
    assert!(matches!(bad, Err(RequestError::Decode { source: CodecError::MessagePack(_), .. })));
}

#[tokio::test]
async fn nobody_there_and_no_answer_are_different_errors() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let silent = bus.subscribe("silent").await.expect("subscribes");
    let ask = |subject: &'static str, timeout| {
        let bus = bus.clone();
        async move { bus.request::<_, ControlReply>(subject, &control(), timeout).await }
    };
    assert!(matches!(
        ask("nobody", PATIENCE).await,
        Err(RequestError::NoResponders { subject }) if subject == "nobody"
    ));
    assert!(matches!(
        ask("silent", Duration::from_millis(50)).await,
        Err(RequestError::Timeout { .. })
    ));
    assert!(matches!(
        ask("not valid", PATIENCE).await,
        Err(RequestError::Publish(PublishError::Subject { .. }))
    ));
    drop(silent);
}

#[tokio::test]
async fn an_answer_without_a_reply_subject_is_an_error() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let mut subscription = bus.subscribe("a").await.expect("subscribes");
    bus.publish("a", &control()).await.expect("publishes");
    let delivery = subscription.next().await.expect("a message");
    let error = bus.respond(&delivery, &control()).await.expect_err("no reply subject");
    assert!(matches!(error, PublishError::NoReply { subject } if subject == "a"));
}

#[tokio::test]
async fn the_brokers_size_limit_is_known_and_kept() {
    let broker = Broker::start_with("max_payload: 4096\n", &[]);
    let bus = connect(&broker).await;
    assert_eq!(bus.max_payload(), 4096);
    let payload = Bytes::from(vec![0; 4097]);
    let too_large = |error: &PublishError| {
        matches!(error, PublishError::PayloadTooLarge { bytes: 4097.., limit: 4096 })
    };
    let error = bus.publish_bytes("a", None, payload.clone()).await.expect_err("too large");
    assert!(too_large(&error), "{error}");
    let error = bus.publish_with_reply("a", "b", payload.clone()).await.expect_err("too large");
    assert!(too_large(&error), "{error}");
    // The header counts too.
    let error = bus
        .publish_bytes("a", Some(ContentType::Json), payload.slice(..4090))
        .await
        .expect_err("too large with its header");
    assert!(matches!(error, PublishError::PayloadTooLarge { limit: 4096, .. }), "{error}");
    let error = bus.request_bytes("a", None, payload, PATIENCE).await.expect_err("too large");
    assert!(matches!(error, RequestError::Publish(error) if too_large(&error)));

    // The connection is none the worse.
    let mut subscription = bus.subscribe("a").await.expect("subscribes");
    bus.publish_bytes("a", None, vec![1; 4096].into()).await.expect("publishes");
    assert_eq!(subscription.next().await.expect("a message").payload.len(), 4096);
}

#[tokio::test]
async fn a_group_shares_and_a_member_that_drains_leaves_the_rest_to_the_others() {
    let broker = Broker::start();
    let (first, second, sender) =
        (connect(&broker).await, connect(&broker).await, connect(&broker).await);
    let mut leaving = first.queue_subscribe("jobs", "g").await.expect("subscribes");
    let mut staying = second.queue_subscribe("jobs", "g").await.expect("subscribes");
    for bus in [&first, &second] {
        settle(bus).await;
    }
    for i in 0..20_u8 {
        sender.publish_bytes("jobs", None, vec![i].into()).await.expect("publishes");
    }
    settle(&sender).await;
    leaving.drain().await.expect("drains");
    settle(&first).await;
    for i in 20..40_u8 {
        sender.publish_bytes("jobs", None, vec![i].into()).await.expect("publishes");
    }
    let mut seen = Vec::new();
    while let Some(delivery) = leaving.next().await {
        assert!(delivery.payload[0] < 20, "came after the member left");
        seen.push(delivery.payload[0]);
    }
    while seen.len() < 40 {
        seen.push(staying.next().await.expect("a message").payload[0]);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<u8>>());
}

/// Waits until the broker has taken in everything that this connection sent before.
async fn settle(bus: &Bus) {
    let answer = bus.request_bytes("nobody.answers", None, Bytes::new(), PATIENCE).await;
    assert!(matches!(answer, Err(RequestError::NoResponders { .. })));
}

#[tokio::test]
async fn drain_sends_what_is_queued_and_closes_for_all_clones() {
    let broker = Broker::start();
    let receiver = connect(&broker).await;
    let mut subscription = receiver.subscribe("a").await.expect("subscribes");
    settle(&receiver).await;
    let sender = connect(&broker).await;
    let clone = sender.clone();
    let mut own = sender.subscribe("b").await.expect("subscribes");
    for _ in 0..100 {
        sender.publish_bytes("a", None, vec![0; 65_536].into()).await.expect("publishes");
    }
    sender.drain(PATIENCE).await.expect("drains");
    for _ in 0..100 {
        assert_eq!(subscription.next().await.expect("a message").payload.len(), 65_536);
    }
    assert!(own.next().await.is_none());
    let error = clone.publish_bytes("a", None, "x".into()).await.expect_err("closed");
    assert!(matches!(error, PublishError::Closed), "{error}");
    let error = clone.subscribe("a").await.expect_err("closed");
    assert!(matches!(error, SubscribeError::Closed), "{error}");
    assert!(clone.drain(PATIENCE).await.is_err());
}

#[tokio::test]
async fn subjects_are_checked() {
    let broker = Broker::start();
    let bus = Bus::connect(BusOptions::new(broker.url(), "test")).await.expect("connects");
    for subject in ["", "a b", "a\r\nPUB x 0"] {
        let error = bus.publish_bytes(subject, None, Bytes::new()).await.expect_err("not valid");
        assert!(matches!(error, PublishError::Subject { .. }), "{subject:?}: {error}");
        let error = bus.subscribe(subject).await.expect_err("not valid");
        assert!(matches!(error, SubscribeError::Subject { .. }), "{subject:?}: {error}");
    }
}
