//! Connections of one process that reach each other past the broker.

use bytes::Bytes;
use stagebus_bus::{Bus, BusOptions, PublishError, RequestError, Switch};
use stagebus_schemas::codec::ContentType;
use stagebus_schemas::messages::control::{Control, ControlAction, ControlOutcome, ControlReply};
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_schemas::trace::TraceContext;
use stagebus_schemas::version::MessageVersion;

use crate::broker::Broker;
use crate::{PATIENCE, connect};

async fn join(broker: &Broker, switch: &Switch) -> Bus {
    let options =
        BusOptions { switch: Some(switch.clone()), ..BusOptions::new(broker.url(), "test") };
    Bus::connect(options).await.expect("the broker is up")
}

/// Waits until the broker knows all subscriptions of `listener`. It reads one connection in order, so
/// it knows them once it passes the connection's word on, and passes it on once it knows who hears it.
async fn settle(hearer: &Bus, listener: &Bus) {
    let mut words = hearer.subscribe("settled").await.expect("subscribes");
    for bus in [hearer, listener] {
        bus.publish_bytes("settled", None, Bytes::new()).await.expect("publishes");
        words.next().await.expect("the word");
    }
}

fn control() -> Control {
    Control { version: MessageVersion::CURRENT, action: ControlAction::Stats }
}

#[tokio::test]
async fn an_address_is_reached_past_the_broker_by_its_process_and_through_it_by_others() {
    let broker = Broker::start();
    let switch = Switch::new();
    let (here, there) = (join(&broker, &switch).await, join(&broker, &switch).await);
    let stranger = connect(&broker).await;
    let mut tap = stranger.subscribe(">").await.expect("subscribes");
    stranger.publish_bytes("seen", None, Bytes::new()).await.expect("publishes");
    assert_eq!(tap.next().await.expect("the tap hears").subject(), "seen");

    let mut address = there.subscribe_address("a.1").await.expect("subscribes");
    there.publish_bytes("a.1", None, "own".into()).await.expect("publishes");
    here.publish_with_reply("a.1", "lost.1", "near".into()).await.expect("publishes");
    let own = address.next().await.expect("a message");
    let near = address.next().await.expect("a message");
    assert_eq!((near.subject(), near.reply()), ("a.1", Some("lost.1")));
    assert_eq!((own.payload, near.payload), ("own".into(), "near".into()));

    // The broker hears the subscription after the connection's word on another subject.
    there.publish_bytes("after", None, Bytes::new()).await.expect("publishes");
    assert_eq!(tap.next().await.expect("the tap hears").subject(), "after");
    stranger.publish_bytes("a.1", None, "far".into()).await.expect("publishes");
    assert_eq!(address.next().await.expect("a message").payload, "far");
    assert_eq!(tap.next().await.expect("the tap hears").payload, "far");
}

#[tokio::test]
async fn questions_are_answered_past_the_broker_while_it_is_away() {
    let mut broker = Broker::start();
    let switch = Switch::new();
    let (here, there) = (join(&broker, &switch).await, join(&broker, &switch).await);
    let mut questions = there.subscribe_address("ctl").await.expect("subscribes");
    broker.kill();
    let server = async {
        let question = questions.next().await.expect("a question");
        let reply =
            ControlReply { version: MessageVersion::CURRENT, outcome: ControlOutcome::Draining };
        there.respond(&question, &reply).await.expect("answers");
    };
    let question = control();
    let client = here.request::<_, ControlReply>("ctl", &question, PATIENCE);
    let ((), answer) = tokio::join!(server, client);
    assert_eq!(answer.expect("an answer").outcome, ControlOutcome::Draining);
    let large = Bytes::from(vec![0; here.max_payload() + 1]);
    let error = here.publish_bytes("ctl", None, large).await.expect_err("too large");
    assert!(matches!(error, PublishError::PayloadTooLarge { .. }), "{error}");
}

#[tokio::test]
async fn a_trace_travels_beside_the_message_through_the_broker_and_past_it() {
    let broker = Broker::start();
    let switch = Switch::new();
    let (here, there) = (join(&broker, &switch).await, join(&broker, &switch).await);
    let stranger = connect(&broker).await;
    let mut questions = there.subscribe_address("ctl").await.expect("subscribes");
    let mut prompts = stranger.subscribe("prompt").await.expect("subscribes");
    settle(&stranger, &there).await;
    let trace = TraceContext { trace_id: 7, span_id: 9, is_sampled: true };
    for (asker, trace) in [(&here, Some(trace)), (&stranger, Some(trace)), (&stranger, None)] {
        let server = async {
            let question = questions.next().await.expect("a question");
            assert_eq!(question.trace(), trace);
            let reply =
                ControlReply { version: MessageVersion::CURRENT, outcome: ControlOutcome::Closed };
            there.respond(&question, &reply).await.expect("answers");
        };
        let question = control();
        let client = asker.request_in_trace::<_, ControlReply>("ctl", &question, PATIENCE, trace);
        let ((), answer) = tokio::join!(server, client);
        assert_eq!(answer.expect("an answer").outcome, ControlOutcome::Closed);
    }
    let prompt = PromptRequest::default();
    let sent = stranger.prompt_in_trace("prompt", &prompt, PATIENCE, Some(trace)).await;
    let heard = prompts.next().await.expect("a prompt");
    assert_eq!((heard.trace(), heard.content()), (Some(trace), ContentType::Json));
    drop(sent.expect("sends"));
}

#[tokio::test]
async fn an_address_that_ended_is_told_at_once_while_the_broker_is_away() {
    let mut broker = Broker::start();
    let switch = Switch::new();
    let (here, there) = (join(&broker, &switch).await, join(&broker, &switch).await);
    let mut lost = here.subscribe_address("lost.c.>").await.expect("subscribes");
    let address = there.subscribe_address("a.1").await.expect("subscribes");
    broker.kill();
    // Not read, and published after the end.
    here.publish_with_reply("a.1", "lost.c.1", "x".into()).await.expect("publishes");
    let question = control();
    let asked = here.request::<_, ControlReply>("a.1", &question, PATIENCE);
    let (answer, ()) = tokio::join!(asked, async { drop(address) });
    assert!(matches!(answer, Err(RequestError::NoResponders { .. })), "{answer:?}");
    here.publish_with_reply("a.1", "lost.c.2", "x".into()).await.expect("publishes");
    for subject in ["lost.c.1", "lost.c.2"] {
        let word = lost.next().await.expect("the word");
        assert!(word.no_responders);
        assert_eq!(word.subject(), subject);
    }
    let answer = here.request::<_, ControlReply>("a.1", &control(), PATIENCE).await;
    assert!(matches!(answer, Err(RequestError::NoResponders { .. })), "{answer:?}");
}

#[tokio::test]
async fn without_a_switch_an_address_is_a_subject_like_any_other() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let mut address = bus.subscribe_address("a.1").await.expect("subscribes");
    bus.publish_bytes("a.1", None, "x".into()).await.expect("publishes");
    assert_eq!(address.next().await.expect("a message").payload, "x");
    address.unsubscribe().await.expect("connected");
    assert!(address.next().await.is_none());
}
