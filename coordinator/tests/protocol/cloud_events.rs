//! Requests that come as CloudEvents, and answers that go out as such.

use std::time::Duration;

use stagebus_bus::Delivery;
use stagebus_coordinator::{CoordinatorSettings, JobSettings, JobsMode};
use stagebus_schemas::cloud_events::{
    ANSWER_HEADER, Attributes, PROMPT_TYPE, Packing, PublicMessage, STRUCTURED, decode_event,
    encode,
};
use stagebus_schemas::codec::ContentType;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::PromptRequest;

use crate::harness::{Answer, Bed, tokens};

/// Longest wait for an event; only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A request of that name, as an event of a shop.
fn order(name: &str, packing: Packing, content: ContentType) -> PublicMessage {
    let request_id = Some(RequestId::new(name).unwrap());
    let request = PromptRequest { request_id, ..tokens(&[5], 3) };
    let attributes = Attributes { id: "17", source: "/shop", kind: PROMPT_TYPE, subject: None };
    encode(&request, content, packing, &attributes).unwrap()
}

/// Everything that a request is answered with, but for the empty message.
async fn ask(bed: &Bed, message: PublicMessage) -> Vec<Delivery> {
    let subject = bed.subjects.prompt();
    let mut stream = bed.bus.message_stream(&subject, message, PATIENCE).await.unwrap();
    let mut all = Vec::new();
    while let Some(delivery) = stream.next_raw().await.unwrap() {
        all.push(delivery);
    }
    all
}

/// What the events say, whatever they are packed in.
fn answer(deliveries: &[Delivery]) -> Answer {
    let mut answer = Answer::default();
    for delivery in deliveries {
        answer.add(decode_event(&delivery.public_headers(), &delivery.payload).unwrap());
    }
    answer
}

/// An attribute of an event.
fn attribute(delivery: &Delivery, name: &str) -> String {
    if delivery.content_type() == Some(STRUCTURED) {
        let envelope: serde_json::Value = serde_json::from_slice(&delivery.payload).unwrap();
        return envelope[name].as_str().unwrap().to_owned();
    }
    delivery.header(&format!("ce-{name}")).unwrap().to_owned()
}

fn packings(deliveries: &[Delivery]) -> Vec<Packing> {
    let mut all: Vec<_> = deliveries.iter().map(|one| one.public_headers().packing()).collect();
    all.dedup();
    all
}

#[tokio::test]
async fn an_answer_comes_in_the_packing_of_its_request_or_as_asked() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(CoordinatorSettings::default()).await;
    let expected = bed.expected(&[5], 3);
    let mut sources = Vec::new();
    for (n, (packing, content)) in [
        (Packing::Structured, ContentType::Json),
        (Packing::Binary, ContentType::Json),
        (Packing::Binary, ContentType::MessagePack),
    ]
    .into_iter()
    .enumerate()
    {
        let events = ask(&bed, order("order-1", packing, content)).await;
        assert_eq!(answer(&events).tokens, expected);
        assert_eq!(packings(&events), [packing]);
        for (i, event) in events.iter().enumerate() {
            // The same name again is another answer.
            assert_eq!(attribute(event, "id"), format!("order-1.{n}.{i}"));
            assert_eq!(attribute(event, "subject"), "order-1");
            assert_eq!(attribute(event, "specversion"), "1.0");
            assert_eq!(attribute(event, "datacontenttype"), content.header());
            sources.push(attribute(event, "source"));
        }
        let last = events.last().unwrap();
        assert_eq!(attribute(&events[0], "type"), "io.stagebus.accepted.v1");
        assert_eq!(attribute(last, "type"), "io.stagebus.done.v1");
    }
    sources.dedup();
    assert!(matches!(&sources[..], [one] if one.starts_with("/stagebus/v1/")), "{sources:?}");

    for (packing, asked, expected_packing) in [
        (Packing::Plain, None, Packing::Plain),
        (Packing::Plain, Some("structured"), Packing::Structured),
        (Packing::Plain, Some("binary"), Packing::Binary),
        (Packing::Structured, Some("binary"), Packing::Binary),
        (Packing::Binary, Some("plain"), Packing::Plain),
    ] {
        let mut message = order("order-2", packing, ContentType::Json);
        message.attributes.extend(asked.map(|asked| (ANSWER_HEADER, asked.to_owned())));
        let events = ask(&bed, message).await;
        assert_eq!(packings(&events), [expected_packing], "{packing:?} {asked:?}");
        assert_eq!(answer(&events).tokens, expected);
    }
}

#[tokio::test]
async fn a_bad_envelope_is_answered_in_its_own_packing() {
    let bed = Bed::new(1).await;
    let settings = CoordinatorSettings { max_request_bytes: 1000, ..Default::default() };
    let _coordinator = bed.coordinator(settings).await;
    let without = |name: &str| {
        let mut message = order("a", Packing::Binary, ContentType::Json);
        message.attributes.retain(|(header, _)| *header != name);
        message
    };
    let structured = |payload: &str| PublicMessage {
        content_type: STRUCTURED,
        attributes: Vec::new(),
        payload: payload.to_owned().into(),
    };
    let huge = format!(r#"{{"specversion":"1.0","data_base64":"{}"}}"#, "A".repeat(1000));
    let too_hot = r#"{"specversion":"1.0","id":"1","source":"/s","type":"io.stagebus.prompt.v1",
        "data":{"request_id":"hot","prompt":"a","temperature":99}}"#;
    for (message, packing, expected) in [
        (without("ce-id"), Packing::Binary, "no id"),
        (without("ce-specversion"), Packing::Binary, "no specversion"),
        (structured("{}"), Packing::Structured, "no specversion"),
        (structured(r#"{"specversion":"0.3"}"#), Packing::Structured, "no id"),
        (structured(&huge), Packing::Structured, "at most 1000 are taken"),
        (structured(too_hot), Packing::Structured, "temperature is 99"),
    ] {
        let events = ask(&bed, message).await;
        assert_eq!((events.len(), packings(&events)), (1, vec![packing]), "{expected}");
        assert_eq!(attribute(&events[0], "type"), "io.stagebus.error.v1");
        let (class, text, _) = answer(&events).error.unwrap();
        assert_eq!(class, ErrorClass::InvalidRequest);
        assert!(text.contains(expected), "{expected}: {text}");
    }
    // What could be read has its name.
    let events = ask(&bed, structured(too_hot)).await;
    assert_eq!(attribute(&events[0], "subject"), "hot");
}

#[tokio::test]
async fn a_job_may_be_a_cloud_event_and_its_stored_events_are() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let jobs = JobSettings { mode: JobsMode::On, ..JobSettings::default() };
    let _coordinator = bed.coordinator(CoordinatorSettings { jobs, ..Default::default() }).await;
    let name = RequestId::new("order-3").unwrap();
    let mut live = bed.bus.subscribe(&bed.subjects.result(&name)).await.unwrap();
    let message = order("order-3", Packing::Structured, ContentType::Json);
    bed.bus.publish_public(&bed.subjects.job(), &bed.bus.new_inbox(), message).await.unwrap();

    let mut results = bed.bus.results(&bed.subjects, &name).await.unwrap();
    let (mut stored, mut i) = (Answer::default(), 0);
    while stored.done.is_none() {
        stored.add(results.next(PATIENCE).await.unwrap().event);
        let event = live.next().await.unwrap();
        assert_eq!(attribute(&event, "id"), format!("order-3.{i}"));
        i += 1;
    }
    assert_eq!(stored.tokens, bed.expected(&[5], 3));
}
