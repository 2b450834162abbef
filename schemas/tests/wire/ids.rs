//! Ids: valid subject tokens, checked wherever they come from.

use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, IdError, ModelName, RequestId, SessionId, StageIndex, StepNumber,
    WorkerId,
};

#[test]
fn a_text_that_is_no_subject_token_is_no_id() {
    assert!(matches!(ModelName::new(""), Err(IdError::Empty { .. })));
    assert!(matches!(ModelName::new("a".repeat(65)), Err(IdError::TooLong { bytes: 65, .. })));
    assert_eq!(ModelName::new("a".repeat(64)).expect("64 bytes").as_str().len(), 64);
    for text in ["a.b", "*", ">", "a b", "a\n", "\0", "größe", "a/b", "$SYS", "a,b"] {
        let errors = [
            ModelName::new(text).expect_err("no token"),
            WorkerId::new(text).expect_err("no token"),
            CoordinatorId::new(text).expect_err("no token"),
            text.parse::<RequestId>().expect_err("no token"),
        ];
        for error in errors {
            assert!(matches!(error, IdError::Character { .. }), "{text}: {error}");
        }
        for content in [ContentType::Json, ContentType::MessagePack] {
            let bytes = codec::encode_public(content, &text).expect("encodes");
            codec::decode_public::<RequestId>(content, &bytes).expect_err("no token");
        }
    }
}

#[test]
fn an_id_is_a_plain_text_on_the_wire() {
    let id = RequestId::new("r-1").expect("an id");
    assert_eq!(codec::encode_public(ContentType::Json, &id).expect("encodes"), b"\"r-1\"");
    assert_eq!(id.to_string(), "r-1");
}

#[test]
fn made_up_ids_are_valid_and_differ() {
    assert_ne!(WorkerId::random(StageIndex::FIRST), WorkerId::random(StageIndex::FIRST));
    assert_ne!(CoordinatorId::random(), CoordinatorId::random());
    assert_ne!(RequestId::random(), RequestId::random());
    assert_ne!(SessionId::random(), SessionId::random());
    let last = StageIndex::new(u16::MAX);
    WorkerId::new(WorkerId::random(last).to_string()).expect("a valid id");
    CoordinatorId::new(CoordinatorId::random().to_string()).expect("a valid id");
    RequestId::new(RequestId::random().to_string()).expect("a valid id");
}

#[test]
fn counters_count_and_stop_at_their_end() {
    assert_eq!(Epoch::FIRST.next(), Epoch::new(1));
    assert_eq!(StepNumber::new(u32::MAX).next(), StepNumber::new(u32::MAX));
    assert_eq!(StageIndex::FIRST.next().index(), 1);
    assert_eq!(SessionId::from_u64(0xab).to_string(), "00000000000000ab");
}
