//! Large messages in parts.

use bytes::Bytes;
use stagebus_bus::{Bulk, BulkDelivery, BulkReceiver, BulkSender};

use crate::{PATIENCE, broker, connect, subscribed};

const SUBJECT: &str = "large.messages";

/// Bytes that may wait: all of a test's.
const ROOM: u32 = 256 << 20;

fn bulk(number: u8, len: usize) -> Bulk {
    Bulk {
        subject: SUBJECT.to_owned(),
        reply: Some(format!("lost.{number}")),
        payload: (0..=254_u8)
            .cycle()
            .take(len)
            .map(|byte| byte ^ number)
            .collect::<Vec<u8>>()
            .into(),
        on_arrival: Box::new(|| ()),
    }
}

async fn next(receiver: &mut BulkReceiver) -> BulkDelivery {
    let next = tokio::time::timeout(PATIENCE, receiver.next()).await;
    next.expect("a message comes").expect("the connection stands")
}

#[tokio::test]
async fn messages_larger_than_the_broker_takes_arrive_whole_and_in_order() {
    let broker = broker::Broker::start();
    let (there, here) = (connect(&broker).await, connect(&broker).await);
    let mut receiver = BulkReceiver::subscribe(there.clone(), SUBJECT).await.expect("subscribed");
    subscribed(&there).await;
    let largest = here.max_payload();
    let (sender, mut losses) = BulkSender::start(here, ROOM).await.expect("started");
    let (told, mut arrived) = tokio::sync::mpsc::channel(16);
    let lengths = [0, 1, 16 << 10, (16 << 10) + 1, largest * 2 + 3, 5, 300_000];
    for (number, len) in (0_u8..).zip(lengths) {
        let told = told.clone();
        let on_arrival = Box::new(move || told.try_send(number).expect("there is room"));
        sender.send(Bulk { on_arrival, ..bulk(number, len) }).expect("there is room");
    }
    for (number, len) in (0_u8..).zip(lengths) {
        let expected = bulk(number, len);
        let found = next(&mut receiver).await;
        assert_eq!(found.reply, expected.reply);
        assert!(found.payload == expected.payload, "message {number} of {len} bytes changed");
    }
    // The task ends once everything is acknowledged.
    drop(sender);
    assert_eq!(tokio::time::timeout(PATIENCE, losses.next()).await.expect("it ends"), None);
    drop(told);
    let mut order = Vec::new();
    while let Some(number) = arrived.recv().await {
        order.push(number);
    }
    assert_eq!(order, (0_u8..).take(lengths.len()).collect::<Vec<_>>());
}

#[tokio::test]
async fn messages_that_nobody_hears_are_named() {
    let broker = broker::Broker::start();
    let here = connect(&broker).await;
    let (sender, mut lost) = BulkSender::start(here, ROOM).await.expect("started");
    for number in 0..3 {
        sender.send(bulk(number, 100_000)).expect("there is room");
    }
    let mut found = Vec::new();
    while found.len() < 3 {
        let reply = tokio::time::timeout(PATIENCE, lost.next()).await.expect("a loss is told");
        found.push(reply.expect("the task runs"));
    }
    assert_eq!(found, ["lost.0", "lost.1", "lost.2"]);
}

#[tokio::test]
async fn what_is_no_part_is_ignored_and_a_full_queue_says_so() {
    let broker = broker::Broker::start();
    let (there, here) = (connect(&broker).await, connect(&broker).await);
    let mut receiver = BulkReceiver::subscribe(there.clone(), SUBJECT).await.expect("subscribed");
    subscribed(&there).await;
    here.publish_bytes(SUBJECT, None, Bytes::from_static(b"junk")).await.expect("published");
    let (sender, _losses) = BulkSender::start(here, 15).await.expect("started");
    // Nothing runs between the two: the task has not taken the first.
    sender.send(bulk(1, 10)).expect("there is room");
    let full = sender.send(bulk(2, 10)).expect_err("it is full");
    assert!(full.to_string().contains("15 bytes are the most"), "{full}");
    assert_eq!(next(&mut receiver).await.payload, bulk(1, 10).payload);
}
