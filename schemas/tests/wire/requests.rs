//! Which requests are honoured, and what the others are told.

use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::public::{
    ChatMessage, Limits, PromptInput, PromptRequest, RequestError, ValidRequest,
};

fn limits() -> Limits {
    Limits { max_stops: 2, max_stop_bytes: 4, max_messages: 3, ..Limits::new(8, 100) }
}

fn text(change: impl FnOnce(&mut PromptRequest)) -> Result<ValidRequest, RequestError> {
    let mut request = PromptRequest { prompt: Some("a".into()), ..PromptRequest::default() };
    change(&mut request);
    request.validate(&limits())
}

fn tokens(tokens: Vec<u32>) -> Result<ValidRequest, RequestError> {
    text(|request| (request.prompt, request.tokens) = (None, Some(tokens)))
}

fn messages(entries: &[(&str, &str)]) -> Result<ValidRequest, RequestError> {
    let entry = |(role, content): &(&str, &str)| ChatMessage {
        role: (*role).to_owned(),
        content: (*content).to_owned(),
    };
    let entries = entries.iter().map(entry).collect();
    text(|request| (request.prompt, request.messages) = (None, Some(entries)))
}

#[test]
fn a_plain_request_is_taken_apart() {
    let id = RequestId::new("r").expect("an id");
    let valid = text(|request| {
        request.request_id = Some(id.clone());
        request.max_tokens = Some(1);
        request.stop = vec!["ab".into()];
        request.stream = Some(false);
    });
    let expected = ValidRequest {
        request_id: Some(id),
        input: PromptInput::Text("a".into()),
        max_tokens: Some(1),
        stop: vec!["ab".into()],
        stream: false,
        draft_tokens: None,
        priority: Priority::Interactive,
    };
    assert_eq!(valid, Ok(expected));
    assert!(text(|_| {}).expect("valid").stream);
    assert_eq!(tokens(vec![0, 99]).expect("valid").input, PromptInput::Tokens(vec![0, 99]));
    let chat = messages(&[("user", "")]).expect("valid");
    assert!(matches!(chat.input, PromptInput::Messages(list) if list.len() == 1));
}

#[test]
fn exactly_one_prompt_is_wanted() {
    let none = PromptRequest::default().validate(&limits());
    assert_eq!(none, Err(RequestError::Input { found: 0 }));
    let two = text(|request| request.tokens = Some(vec![1]));
    assert_eq!(two, Err(RequestError::Input { found: 2 }));
    let three = text(|request| {
        request.tokens = Some(Vec::new());
        request.messages = Some(Vec::new());
    });
    assert_eq!(three, Err(RequestError::Input { found: 3 }));
}

#[test]
fn an_empty_or_overlong_prompt_is_refused() {
    let empty = |result: Result<_, RequestError>| matches!(result, Err(RequestError::Empty { .. }));
    assert!(empty(text(|request| request.prompt = Some(String::new()))));
    assert!(empty(tokens(Vec::new())));
    assert!(empty(messages(&[])));
    assert!(empty(messages(&[("", "a")])));
    let long = "r".repeat(65);
    let too_long =
        |result: Result<_, RequestError>| matches!(result, Err(RequestError::TooLong { .. }));
    assert!(too_long(messages(&[(&long, "a")])));
    assert!(too_long(messages(&[("user", "a"); 4])));
    assert!(tokens(vec![1; 7]).is_ok());
    assert_eq!(tokens(vec![1; 8]), Err(RequestError::Context { found: 8, context_len: 8 }));
    assert_eq!(
        tokens(vec![1, 100]),
        Err(RequestError::TokenId { index: 1, found: 100, vocab_size: 100 })
    );
    assert!(limits().check_prompt_len(7).is_ok());
    assert!(limits().check_prompt_len(usize::MAX).is_err());
}

#[test]
fn stop_texts_are_limited() {
    let stops = |stops: &[&str]| {
        text(|request| request.stop = stops.iter().map(|stop| (*stop).to_owned()).collect())
    };
    assert!(stops(&["abcd", "b"]).is_ok());
    assert!(matches!(stops(&["a", "b", "c"]), Err(RequestError::TooLong { field: "stop", .. })));
    assert!(matches!(stops(&["abcde"]), Err(RequestError::TooLong { found: 5, limit: 4, .. })));
    assert!(matches!(stops(&[""]), Err(RequestError::Empty { .. })));
}

#[test]
fn greedy_requests_are_taken_and_sampling_is_refused_for_now() {
    let with = |temperature: Option<f32>, top_k: Option<u32>| {
        text(|request| {
            request.temperature = temperature;
            request.top_k = top_k;
            request.top_p = Some(0.9);
            request.seed = Some(1);
        })
    };
    for (temperature, top_k) in
        [(None, None), (Some(0.0), None), (Some(-0.0), Some(40)), (Some(0.7), Some(1))]
    {
        assert!(with(temperature, top_k).is_ok(), "{temperature:?} {top_k:?}");
    }
    for (temperature, top_k) in [(Some(0.7), None), (Some(1e-9), Some(0)), (Some(10.0), Some(2))] {
        let error = with(temperature, top_k).expect_err("sampling");
        assert!(matches!(error, RequestError::Unsupported { field: "temperature", .. }));
        let reply = ErrorReply::from(error);
        assert_eq!(reply.class, ErrorClass::InvalidRequest);
        assert!(reply.message.contains("does not support yet"), "{reply}");
    }
    assert!(text(|request| request.logprobs = Some(false)).is_ok());
    let error = text(|request| request.logprobs = Some(true)).expect_err("not yet");
    assert!(matches!(error, RequestError::Unsupported { field: "logprobs", .. }));
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    let field = |change: fn(&mut PromptRequest)| match text(change) {
        Err(RequestError::Range { field, .. }) => Some(field),
        _ => None,
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.1, 1e30] {
        let set = |change: fn(&mut PromptRequest, f32)| {
            text(|request| change(request, bad)).expect_err("out of range")
        };
        for error in [
            set(|request, bad| request.temperature = Some(bad)),
            set(|request, bad| request.top_p = Some(bad)),
            set(|request, bad| request.min_p = Some(bad)),
        ] {
            assert!(matches!(error, RequestError::Range { .. }), "{bad}: {error}");
        }
    }
    assert_eq!(field(|request| request.top_p = Some(1.1)), Some("top_p"));
    assert_eq!(field(|request| request.max_tokens = Some(0)), Some("max_tokens"));
    assert_eq!(field(|request| request.min_p = Some(1.0)), None);
}
