//! What comes over the broker.

use serde::Serialize;
use serde::de::DeserializeOwned;
use stagebus_schemas::cloud_events::{PublicHeaders, STRUCTURED, decode_event, decode_request};
use stagebus_schemas::codec::{self, ContentType, Message};
use stagebus_schemas::messages::bulk::Part;
use stagebus_schemas::messages::control::{Control, ControlReply};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement};
use stagebus_schemas::messages::forward::Forward;
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::messages::node::{NodeQuestion, NodeReply};
use stagebus_schemas::messages::public::{Event, Limits, PromptRequest};

/// Name and bytes of a sample of each message, as text: one line `name hex` each.
const GOLDEN: &str = include_str!("../../schemas/tests/fixtures/golden.txt");

/// The messages that the wire's own tests keep, which are inputs for [`message`].
pub fn golden() -> impl Iterator<Item = Vec<u8>> {
    GOLDEN.lines().filter_map(|line| {
        let hex = line.split_once(' ')?.1;
        let digits = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
        (0..hex.len()).step_by(2).map(digits).collect()
    })
}

/// An internal message of any type: what is decoded must have the same meaning once it is encoded
/// again.
pub fn message(data: &[u8]) {
    one::<Forward>(data);
    one::<Part>(data);
    one::<Head>(data);
    one::<Control>(data);
    one::<ControlReply>(data);
    one::<WorkerAnnouncement>(data);
    one::<CoordinatorAnnouncement>(data);
    one::<NodeQuestion>(data);
    one::<NodeReply>(data);
}

fn one<M: Message>(data: &[u8]) {
    let Ok(message) = codec::decode::<M>(data) else { return };
    let bytes = encoded(codec::encode(&message));
    // Bytes are compared and not values: a number may be none (NaN), which is not equal to itself.
    match codec::decode::<M>(&bytes) {
        Ok(again) => assert_eq!(encoded(codec::encode(&again)), bytes, "it changed on the way"),
        Err(error) => panic!("our own message is refused: {error}"),
    }
}

/// A public request, or an event as a client reads it, each also in an envelope.
pub fn request(data: &[u8]) {
    let content = ContentType::detect(None, data);
    if let Some(request) = public::<PromptRequest>(content, data) {
        // Refusing is fine.
        drop(request.validate(&Limits::new(2048, 49152)));
    }
    public::<Event>(content, data);
    let envelope = PublicHeaders::read([("Content-Type", STRUCTURED)]);
    // Refusing is fine here too.
    drop(decode_request(&envelope, data));
    drop(decode_event(&envelope, data));
}

fn public<T: Serialize + DeserializeOwned>(content: ContentType, data: &[u8]) -> Option<T> {
    let value: T = codec::decode_public(content, data).ok()?;
    let bytes = encoded(codec::encode_public(content, &value));
    match codec::decode_public::<T>(content, &bytes) {
        Ok(again) => {
            assert_eq!(encoded(codec::encode_public(content, &again)), bytes, "it changed");
        }
        Err(error) => panic!("our own message is refused: {error}"),
    }
    Some(value)
}

fn encoded(result: Result<Vec<u8>, codec::CodecError>) -> Vec<u8> {
    result.unwrap_or_else(|error| panic!("what was decoded cannot be encoded: {error}"))
}
